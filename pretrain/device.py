"""The one module that lets Megatron-core run without CUDA; where CUDA is present it changes nothing.

Megatron-core 0.16 asks for the current CUDA device, creates tensors with ``device="cuda"`` and compares
``Tensor.type()`` with CUDA names. :func:`prepare` answers those questions with the CPU, process-wide, and
:func:`emulation` covers the factory calls of a region of code. The forward and backward passes need no
region, so the hot path pays nothing.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def has_cuda() -> bool:
    """Whether this process trains on a GPU."""
    return torch.cuda.is_available()


def current() -> torch.device:
    """The device that tensors of this rank live on."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


class _CpuForCuda(TorchFunctionMode):
    """Redirects requests for a CUDA device to the CPU and answers ``Tensor.type()`` with CUDA's names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype) or func(*args)
        return func(*args, **(kwargs or {}))


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


@contextlib.contextmanager
def emulation() -> Iterator[None]:
    """A region in which Megatron's CUDA factory calls make CPU tensors; nothing where CUDA is present.

    Needed around building the model and optimizer, Megatron's pipeline schedules, gradient clipping and
    distributed checkpoints. It holds for the calling thread.
    """
    if has_cuda():
        yield
    else:
        with _CpuForCuda():
            yield


def prepare(device: str = "cpu") -> torch.device:
    """Make this process ready for Megatron-core on ``device`` (``cpu`` or ``cuda:N``); call it once, first.

    Returns:
        The device that the rank's tensors live on.
    """
    if has_cuda() and device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
        return current()
    _answer_for_cuda()
    return CPU


def _answer_for_cuda() -> None:
    """Replace what Megatron calls in ``torch.cuda`` by the same question to the CPU; safe to repeat."""
    _import_uncompiled()
    _keep_compiler_out_of_optimizers()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 0
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = lambda device=None: None
    cuda.empty_cache = lambda: None
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self

    from megatron.core.tensor_parallel import random as megatron_random

    rng: Any = megatron_random
    rng._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    from megatron.core.fusions import fused_softmax

    softmax: Any = fused_softmax
    softmax.get_default_causal_mask = _causal_mask


def _import_uncompiled() -> None:
    """Import Megatron-core with its ``torch.compile`` decorators off.

    They pay on GPUs only; on a CPU they would load the compiler stack (two seconds of every rank's start).
    Megatron keeps what it finds on import, so this does nothing once it is imported.
    """
    compiler: Any = torch
    original = compiler.compile
    compiler.compile = lambda model=None, **_: model if model is not None else (lambda function: function)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a dozen notices that Apex and Transformer Engine are not there
            import megatron.core.optimizer  # noqa: F401
    finally:
        compiler.compile = original


def _keep_compiler_out_of_optimizers() -> None:
    """Let torch's Adam work without loading torch's compiler, which nothing here uses on a CPU (two seconds a rank).

    Some methods load it on their first call, only to exempt themselves from compilation; that exemption is cached
    as an attribute of the function, and without a compiler it is the function itself. ``step`` loads it to mark
    breaks in a graph that nobody records; what else its wrapper does is to turn gradients off.
    """
    for method in vars(torch.optim.Optimizer).values():
        inner = getattr(method, "__wrapped__", None)
        if inner is not None and not hasattr(inner, "__dynamo_disable"):
            setattr(inner, "__dynamo_disable", inner)
    adam: Any = torch.optim.Adam  # AdamW inherits its step
    wrapped = getattr(adam.step, "__wrapped__", None)
    if wrapped is not None and not hasattr(adam.step, "hooked"):
        adam.step = torch.no_grad()(wrapped)
        del adam.step.__wrapped__


@functools.lru_cache(maxsize=32)
def _causal_mask(length: int) -> torch.Tensor:
    """True where a position (row) must not look (column): Megatron's mask, on the CPU."""
    return torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
