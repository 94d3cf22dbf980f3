"""One optimizer step in hand, in explicit parts: plan → accumulate micro-batches → reduce buckets → agree → update.

A :class:`StepWork` says at every moment which micro-batches' gradients are in this rank's buffers and which buckets
are reduced, so that a step can be taken up again by other ranks after a fault.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import _allreduce_word_embedding_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import distributed as dist

from planner.microbatches import Shares, assign
from planner.pretrain_config import FaultKind, Phase
from pretrain import device
from pretrain.collective import Membership
from pretrain.data import Samples
from pretrain.faults import Injector, distort_loss
from pretrain.parallel import Layout

STOPS = ("preempted", "paused", "cancelled")
"""Reasons to stop at a step's end, strongest last."""


@dataclass(frozen=True)
class StepPlan:
    """What a step consists of: the same on every rank, and independent of how many there are but for ``shares``."""

    step: int
    """1-based number of the optimizer step."""
    ids: tuple[int, ...]
    """Sample ids of the global batch, in drawing order."""
    micro: int
    """Samples of a micro-batch."""
    seq_length: int
    shares: Shares
    """Micro-batches of each data-parallel replica."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the whole step."""
        return len(self.ids) // self.micro

    @property
    def tokens(self) -> int:
        """Predicted tokens of the global batch: what the summed loss is divided by."""
        return len(self.ids) * self.seq_length

    def samples_of(self, micro_batch: int) -> tuple[int, ...]:
        """Sample ids of one micro-batch."""
        return self.ids[micro_batch * self.micro : (micro_batch + 1) * self.micro]

    def samples_of_all(self, micro_batches: Sequence[int]) -> list[int]:
        """Sample ids of several micro-batches."""
        return [sample for micro_batch in micro_batches for sample in self.samples_of(micro_batch)]


def plan(step: int, ids: Sequence[int], micro: int, seq_length: int, replicas: int) -> StepPlan:
    """The plan of an undisturbed step on ``replicas`` data-parallel replicas."""
    return StepPlan(step, tuple(ids), micro, seq_length, assign(len(ids) // micro, replicas))


@dataclass
class Machine:
    """What runs steps on this rank: rebuilt in part when ranks re-form, the model and data stay."""

    layout: Layout
    chunk: DistributedDataParallel
    optimizer: MegatronOptimizer
    samples: Samples
    index_of: Callable[[int], int]
    """Sample id → index in ``samples``."""
    injector: Injector
    device: torch.device
    membership: Membership = field(default_factory=lambda: Membership(0))
    """This rank's part in the incarnation's collectives."""
    spares: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Memory for the copies of gradient buckets from before their reduction, by bucket group."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after the step's one small exchange; equal on every rank."""

    loss: float
    """Mean loss per token of the global batch."""
    stop: str | None
    """A reason from :data:`STOPS` if any rank was told to stop."""
    regroup: int = 0
    """The incarnation in which some rank was told to re-form at this step's end; 0: none was. A re-form for another
    reason before that end makes the wish void."""


@dataclass
class StepWork:
    """A step under way on this rank. The methods are called in the order in which they stand here."""

    machine: Machine
    plan: StepPlan
    own: tuple[int, ...] = ()
    """Micro-batches that were this replica's from the start."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time by part of the step."""
    done: list[int] = field(default_factory=list)
    """Micro-batches whose gradients are in this rank's buffers, in order."""
    loss_sums: dict[int, float] = field(default_factory=dict)
    """Summed loss of each micro-batch done; on ranks of the last pipeline stage."""
    reduced: list[int] = field(default_factory=list)
    """Indices of the gradient buckets whose reduction is complete."""
    clean: bool = True
    """False while a micro-batch is under way: an interrupted one leaves a part of its gradient in the buffers."""
    copied: bool = False
    """Whether the machine's spares hold this attempt's gradients from before the reduction."""
    finished: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Reduced buckets of an earlier incarnation, to be put back after micro-batches were run again."""

    def begin(self) -> None:
        """Empty the gradient buffers and forget what was done."""
        self.machine.chunk.zero_grad_buffer()
        # The last update left param.grad pointing into the buffer; autograd would add there and the hook once more.
        self.machine.optimizer.zero_grad()
        self.done.clear()
        self.loss_sums.clear()
        self.reduced.clear()
        self.finished.clear()
        self.clean, self.copied = True, False

    def take_up(self, keep: bool, finished: Collection[int]) -> None:
        """Bring the buffers to where a new incarnation goes on (:func:`planner.alignment.align`).

        Args:
            keep: whether this replica's accumulated gradient counts; else it begins with empty buffers.
            finished: buckets that all survivors had reduced: their values stay, all others lose what the
                reduction did to them.
        """
        values = {index: self.finished.get(index) or self._clone(index) for index in finished}
        if not keep:
            self.begin()
        elif self.copied:
            for index, copies in self.machine.spares.items():
                if index not in values:
                    for bucket, copy in zip(self._buckets(index), copies, strict=True):
                        bucket.grad_data.copy_(copy)
        self.finished = values
        self.reduced = sorted(values)
        self.copied = False

    def _buckets(self, index: int) -> list[Any]:
        return list(self.machine.chunk.bucket_groups[index].buckets)

    def _clone(self, index: int) -> list[torch.Tensor]:
        return [bucket.grad_data.clone() for bucket in self._buckets(index)]

    # ------------------------------------------------------------ forward and backward

    def accumulate(self, micro_batches: Sequence[int], *, forward_only: bool = False) -> None:
        """Add the gradients of ``micro_batches``: of this replica's summed loss over the global batch's tokens.

        With ``forward_only`` the gradients are there already, and only the losses are measured.

        Raises:
            CollectiveLeftError: the incarnation was left meanwhile; what was done stays done.
        """
        machine = self.machine
        gradients = torch.no_grad() if forward_only else contextlib.nullcontext()
        with self._timed("forward_backward"), machine.chunk.no_sync(), machine.membership.private(), gradients:
            if machine.layout.pipeline > 1:
                self._accumulate_pipelined(micro_batches, forward_only)
                return
            for micro_batch in micro_batches:
                self._accumulate_one(micro_batch, forward_only)
                if machine.layout.tensor == 1:
                    machine.membership.check()

    def _accumulate_one(self, micro_batch: int, forward_only: bool) -> None:
        step, nth = self.plan.step, len(self.done)
        self.clean = False
        effects = self.machine.injector.fire(Phase.FORWARD, step, nth)
        losses = self._forward(self.machine.chunk, self._tokens(micro_batch))
        loss_sum = distort_loss(losses.sum(), effects)
        self.machine.injector.fire(Phase.BACKWARD, step, nth)
        if not forward_only:
            (loss_sum / self.plan.tokens).backward()
        self.loss_sums[micro_batch] = loss_sum.item()
        self.done.append(micro_batch)
        self.clean = True

    def _accumulate_pipelined(self, micro_batches: Sequence[int], forward_only: bool) -> None:
        """All micro-batches through Megatron's pipeline schedule; they count as done together, at its end."""
        if not micro_batches:
            return
        queue = iter(list(enumerate(micro_batches, start=len(self.done))))
        self.clean = False
        with device.emulation():
            get_forward_backward_func()(
                forward_step_func=self._pipeline_step,
                data_iterator=queue,
                model=[self.machine.chunk],
                num_microbatches=len(micro_batches),
                seq_length=self.plan.seq_length,
                micro_batch_size=self.plan.micro,
                forward_only=forward_only,
            )
        self.done.extend(micro_batches)
        self.clean = True

    def _pipeline_step(self, queue: Iterator[tuple[int, int]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        nth, micro_batch = next(queue)
        effects = self.machine.injector.fire(Phase.FORWARD, self.plan.step, nth)
        output: torch.Tensor = self._forward(model, self._tokens(micro_batch))
        if output.requires_grad:
            output.register_hook(partial(self._fire_backward, nth))  # type: ignore[no-untyped-call]
        return output, partial(self._pipeline_loss, micro_batch, effects)

    def _fire_backward(self, nth: int, gradient: torch.Tensor) -> None:
        self.machine.injector.fire(Phase.BACKWARD, self.plan.step, nth)

    def _pipeline_loss(
        self, micro_batch: int, effects: Sequence[FaultKind], losses: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss_sum = distort_loss(losses.sum(), effects)
        self.loss_sums[micro_batch] = loss_sum.item()
        return loss_sum / self.plan.tokens, torch.tensor(losses.numel(), dtype=torch.int), {}

    def _tokens(self, micro_batch: int) -> torch.Tensor:
        started = time.monotonic()
        indices = [self.machine.index_of(sample) for sample in self.plan.samples_of(micro_batch)]
        tokens = torch.from_numpy(self.machine.samples.batch(indices)).to(self.machine.device)
        self.seconds["data"] = self.seconds.get("data", 0.0) + time.monotonic() - started
        return tokens

    @staticmethod
    def _forward(model: Any, tokens: torch.Tensor) -> Any:
        return forward(model, tokens)

    # ------------------------------------------------------------ reduction

    def reduce(self) -> None:
        """Sum the gradients over the replicas, bucket by bucket, then those of tied embeddings over the pipeline."""
        with self._timed("reduce"):
            self.machine.injector.fire(Phase.REDUCE, self.plan.step)
            for index, values in self.finished.items():
                for bucket, value in zip(self._buckets(index), values, strict=True):
                    bucket.grad_data.copy_(value)
            if self.machine.layout.data > 1:
                self._copy_buckets()
            for index, bucket_group in enumerate(self.machine.chunk.bucket_groups):
                if index not in self.reduced:
                    bucket_group.finish_grad_sync()
                    self.reduced.append(index)
            if self.machine.layout.pipeline > 1:
                _allreduce_word_embedding_grads(
                    [self.machine.chunk],
                    self.machine.chunk.config,
                    parallel_state.get_embedding_group(check_initialized=False),
                    parallel_state.get_pipeline_model_parallel_group(),
                )

    def reduced_for_good(self) -> frozenset[int]:
        """Buckets that nothing but the optimizer changes any more. Tied embeddings are summed over the pipeline after
        the buckets are reduced, in place, so there no bucket is ever certain."""
        tied = self.machine.layout.pipeline > 1 and self.machine.chunk.module.share_embeddings_and_output_weights
        return frozenset() if tied else frozenset(self.reduced)

    def _copy_buckets(self) -> None:
        """Keep what the reduction is about to change in place: after a failure in it, nobody knows what is in there."""
        for index in range(len(self.machine.chunk.bucket_groups)):
            if index not in self.reduced:
                if index not in self.machine.spares:
                    self.machine.spares[index] = [torch.empty_like(bucket.grad_data) for bucket in self._buckets(index)]
                for bucket, spare in zip(self._buckets(index), self.machine.spares[index], strict=True):
                    spare.copy_(bucket.grad_data)
        self.copied = True

    def agree(self, stop: str | None, *, regroup: bool = False) -> Agreement:
        """Exchange the loss and the wishes to stop or re-form: one small all-reduce over all ranks, in float64.

        Raises:
            RuntimeError: the ranks together did not run every micro-batch exactly once.
        """
        with self._timed("reduce"):
            speaks = self.machine.layout.last_stage and self.machine.layout.tensor_rank == 0
            times = [float(self.done.count(batch)) if speaks else 0.0 for batch in range(self.plan.micro_batches)]
            own = [math.fsum(self.loss_sums.values()) if speaks else 0.0]
            wishes = [1.0 if stop == reason else 0.0 for reason in STOPS] + [1.0 if regroup else 0.0]
            exchanged = torch.tensor(own + times + wishes, dtype=torch.float64, device=self.machine.device)
            dist.all_reduce(exchanged)
            loss_sum, *counted = exchanged.tolist()
        times, votes = counted[: self.plan.micro_batches], counted[self.plan.micro_batches :]
        odd = {batch: int(count) for batch, count in enumerate(times) if count != 1.0}
        if odd:
            raise RuntimeError(
                f"step {self.plan.step}: micro-batches that were not run exactly once, and how often: {odd}"
            )
        wanted = [reason for reason, vote in zip(STOPS, votes, strict=False) if vote]
        stop = wanted[-1] if wanted else None
        wished = self.machine.membership.incarnation if votes[-1] > 0 else 0
        return Agreement(loss=loss_sum / self.plan.tokens, stop=stop, regroup=wished)

    # ------------------------------------------------------------ update

    def gradient_norm(self) -> float:
        """Norm of the summed gradient over all parameters of the model, before clipping; equal on every rank."""
        with self._timed("optimizer"), device.emulation():
            self.machine.optimizer.prepare_grads()
            return float(self.machine.optimizer.get_grad_norm())

    def prepare(self) -> None:
        """What :meth:`gradient_norm` does besides, where the norm is known already."""
        self.machine.optimizer.prepare_grads()

    def update(self, norm: float) -> None:
        """Clip by the ``norm`` that :meth:`gradient_norm` gave and take the optimizer's step."""
        with self._timed("optimizer"):
            self.machine.injector.fire(Phase.OPTIMIZER, self.plan.step)
            with device.emulation():
                for part in self.machine.optimizer.chained_optimizers:
                    if part.config.clip_grad > 0.0 and part.get_parameters():
                        clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, norm)
                self.machine.optimizer.step_with_ready_grads()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started


def forward(model: Any, tokens: torch.Tensor) -> Any:
    """Loss per token (samples, L) on the last pipeline stage, hidden states elsewhere; tokens are (samples, L+1)."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    return model(inputs.contiguous(), positions, None, labels=labels.contiguous())
