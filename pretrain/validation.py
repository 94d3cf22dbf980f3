"""Loss on the held-out half of the data: a fixed set of samples, shared out over the replicas."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import distributed as dist

from planner.microbatches import assign
from pretrain import device
from pretrain.data import Samples
from pretrain.parallel import Layout
from pretrain.step import forward

SAMPLES = 64
"""Held-out samples that the loss is measured on, spread evenly over the held-out text."""


class Validation:
    """Measures the held-out loss; the same samples at every step and for every number of ranks."""

    def __init__(self, samples: Samples, micro: int, where: torch.device, limit: int = SAMPLES) -> None:
        """Use at most ``limit`` of ``samples``, ``micro`` at a time."""
        self._samples = samples
        self._micro = micro
        self._device = where
        count = min(limit, samples.count)
        self._chosen = [index * samples.count // count for index in range(count)]

    @torch.no_grad()
    def loss(self, chunk: Any, layout: Layout, check: Callable[[], None] = lambda: None) -> float:
        """Mean loss per token, equal on every rank (collective); ``check`` is called before each micro-batch and may
        raise to break the measurement off."""
        batches = [self._chosen[start : start + self._micro] for start in range(0, len(self._chosen), self._micro)]
        own = [batches[index] for index in assign(len(batches), layout.data)[layout.data_rank]]
        sums: list[float] = []
        # Micro-batches of a pipelined pass have one shape, so a smaller last one makes a pass of its own.
        for batch_size in sorted({len(batch) for batch in own}, reverse=True):
            self._pass(chunk, [batch for batch in own if len(batch) == batch_size], sums, check)
        speaks = layout.last_stage and layout.tensor_rank == 0
        total = torch.tensor([math.fsum(sums) if speaks else 0.0], dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return float(total.item()) / (len(self._chosen) * self._samples.seq_length)

    def _pass(self, chunk: Any, batches: list[list[int]], sums: list[float], check: Callable[[], None]) -> None:
        def step(queue: Iterator[list[int]], model: Any) -> tuple[Any, Any]:
            check()
            tokens = torch.from_numpy(self._samples.batch(next(queue))).to(self._device)
            return forward(model, tokens), partial(note)

        def note(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            total = losses.sum()
            sums.append(total.item())
            return total, torch.tensor(losses.numel(), dtype=torch.int), {}

        with device.emulation():
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iter(batches),
                model=[chunk],
                num_microbatches=len(batches),
                seq_length=self._samples.seq_length,
                micro_batch_size=len(batches[0]),
                forward_only=True,
            )
