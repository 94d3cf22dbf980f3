"""Megatron-core without CUDA: what is answered with the CPU, and what a rank does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from pretrain import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where CUDA is present the module does nothing")


def test_cuda_requests_are_answered_with_the_cpu_inside_a_region_only() -> None:
    device.prepare()
    assert torch.cuda.current_device() == torch.device("cpu")
    with device.emulation():
        made = torch.zeros(3, device="cuda")
        assert made.device.type == "cpu"
        assert made.cuda() is made
        assert made.to("cuda:1").device.type == "cpu"
        assert torch.tensor([1.0], device=torch.device("cuda")).type() == "torch.cuda.FloatTensor"
        assert made.to(torch.float64).dtype == torch.float64
    assert made.type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_preparing_twice_changes_nothing() -> None:
    device.prepare()
    step = torch.optim.Adam.step
    device.prepare()
    assert torch.optim.Adam.step is step


def test_a_rank_does_not_load_torch_s_compiler() -> None:
    program = """
import sys
from pretrain import device
device.prepare()
import pretrain.assembly, torch
weight = torch.nn.Parameter(torch.ones(2))
adam = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
weight.sum().backward()
adam.step()
adam.load_state_dict(adam.state_dict())
adam.zero_grad()
assert abs(weight[0].item() - 0.9) < 1e-6, weight
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "False"
