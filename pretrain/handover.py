"""Saves by hand-over: ranks copy their state into host memory and go on, the node's persister makes it durable.

Which way a save goes is decided alike on all ranks. It is handed over where an agent gave host memory, rank 0's
node holds a shard of every part of the model, and the persister is up; until then, and whenever memory has no
room, the ranks save synchronously as ever: a save may cost time, it is never left out.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.messages import Persisted
from planner.pretrain_config import FaultKind, Phase
from pretrain import snapshot
from pretrain.megatron_format import SaveFailedError, agreed
from pretrain.parallel import Layout
from pretrain.saving import PublishedCheckpoints
from pretrain.snapshot import SnapshotError
from pretrain.snapshots import Snapshots
from pretrain.state import TrainState

LONGEST_PUBLICATION = 900.0
"""Seconds that a leaving rank waits for the publication of what it handed over."""
_REMEMBERED = 8
"""Words of the persister that a rank keeps."""


@dataclass(frozen=True)
class Place:
    """Where one rank is: what :func:`placement` is decided from."""

    node: str
    """Host, address and memory together: two agents on one host are two nodes."""
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    memory: bool = True
    """Whether its agent gives it host memory, and with it a persister."""
    token: int = 0
    """Fencing token of its lease."""


@dataclass(frozen=True)
class Placement:
    """What a rank does for the snapshot tier."""

    copies: bool
    """It is the first data-parallel replica of its shard on its node."""
    first: bool
    """It is the first rank of its node."""
    marks: bool
    """Its node's persister publishes: it is rank 0's."""
    whole: bool
    """That node has memory and holds a shard of every part of the model; otherwise nothing can be handed over."""
    token: int = 0
    """Fencing token under which all ranks write: rank 0's, which claims the checkpoints."""


def placement(places: Sequence[Place], rank: int, layout: Layout, *, sharded: bool = False) -> Placement:
    """Decide for ``rank`` from the places of all ranks, in rank order. Pure.

    Args:
        places: where every rank is.
        rank: the one asked about.
        layout: sizes; the coordinates in it are not used.
        sharded: optimizer state differs between data-parallel replicas, so every one is needed.
    """
    own, main = places[rank], places[0]
    same = [(number, place) for number, place in enumerate(places) if place.node == own.node]
    replicas = [
        place.data_rank
        for _, place in same
        if (place.tensor_rank, place.pipeline_rank) == (own.tensor_rank, own.pipeline_rank)
    ]
    there = {
        (place.tensor_rank, place.pipeline_rank, place.data_rank if sharded else 0)
        for place in places
        if place.node == main.node
    }
    return Placement(
        copies=sharded or own.data_rank == min(replicas),
        first=rank == min(number for number, _ in same),
        marks=own.node == main.node,
        whole=main.memory and len(there) == layout.tensor * layout.pipeline * (layout.data if sharded else 1),
        token=main.token,
    )


def find_placement(layout: Layout, node: str, *, memory: bool, token: int, sharded: bool) -> Placement:
    """:func:`placement` of this rank (collective)."""
    places = gathered(Place(node, layout.tensor_rank, layout.pipeline_rank, layout.data_rank, memory, token))
    return placement(places, layout.rank, layout, sharded=sharded)


def gathered(value: Any) -> list[Any]:
    """Every rank's value, in rank order (collective)."""
    found = [value] * dist.get_world_size()
    if len(found) > 1:
        dist.all_gather_object(found, value)
    return found


@dataclass
class HandedOverCheckpoints(PublishedCheckpoints):
    """Saves through host memory and the node's persister; loads as the base does."""

    memory: Path | None = None
    """The job's snapshots on this node; None: no agent gave memory, every save is synchronous."""
    snapshots: Snapshots | None = None
    placement: Placement | None = None
    heard_from: queue.SimpleQueue[Persisted] = field(default_factory=queue.SimpleQueue)
    """What the persister said, put by the channel's thread."""
    up: bool = False
    """Whether this rank has heard that the persister is up."""
    ready: bool = False
    """Whether all ranks know that; equal on all of them."""
    fates: dict[int, Persisted] = field(default_factory=dict)
    """Step → the last word about it."""
    pending: int | None = None
    """Step handed over last, until it is known to be published."""

    def heard(self, message: Persisted) -> None:
        """Take a word of the persister (in the channel's thread)."""
        self.heard_from.put(message)

    def hands_over(self) -> bool:
        """Whether the next save goes through host memory (the same on all ranks)."""
        return self.ready and self._can

    @property
    def _can(self) -> bool:
        """Whether there is a persister that could publish the whole model (the same on all ranks)."""
        return self.placement is not None and self.placement.whole

    # ------------------------------------------------------------ saving

    def _save_once(self, state: TrainState, *, insist: bool) -> None:
        if not self._agree_on_way():
            super()._save_once(state, insist=insist)
            return
        self._judge_pending()
        with agreed(f"handing step {state.step} over"):
            self._drill(state.step)
        self.fates.pop(state.step, None)
        try:
            with agreed(f"copying step {state.step} to host memory"):
                self._copy(state, wait=insist)
        except SaveFailedError as error:
            self._tell("failed", state.step, None, reason=f"{error}; saving synchronously")
            self._save_directly(state)
            return
        self.pending = state.step
        if insist:
            self.settle()

    def _agree_on_way(self) -> bool:
        """Whether all ranks hand over; asks around until rank 0's node has heard of its persister (collective)."""
        self._listen(0.0)
        if not self._can:
            return False
        assert self.placement is not None
        if not self.ready:
            self.ready = any(gathered(self.up and self.placement.marks))
        return self.ready

    def _save_directly(self, state: TrainState) -> None:
        """The synchronous way, where host memory refuses."""
        super()._save_once(state, insist=True)

    def _copy(self, state: TrainState, *, wait: bool) -> None:
        assert self.snapshots is not None
        assert self.placement is not None
        taken = self.snapshots.hand_over(state, persist=self.placement.marks)
        if wait:
            self.snapshots.drain()
        if taken is not None and taken.skipped:
            raise SnapshotError(taken.skipped)

    def _drill(self, step: int) -> None:
        """Fire the faults of a save; those of storage are left for the persister to suffer."""
        try:
            kinds = self.injector.fire(Phase.SAVE, step)
        except OSError:
            kinds = (FaultKind.DISK_FULL,)
        if self.memory is not None:
            for kind in kinds:
                snapshot.leave_drill(self.memory, step, kind.value)

    def _judge_pending(self) -> None:
        """What became of the checkpoint before: published ends a row of failures, given up is one (collective).

        Raises:
            SaveFailedError: with the persister's reason; on every rank.
        """
        fate = gathered(self.fates.get(self.pending or 0))[0]
        if fate is not None and fate.published:
            self.failures = 0
        elif fate is not None:
            self.pending = None
            raise SaveFailedError(f"step {fate.step} was given up: {fate.reason}")

    def _is_durable(self) -> bool:
        return self.pending is None

    # ------------------------------------------------------------ publication

    def settle(self) -> None:
        """Wait until what was handed over last is published (collective).

        Raises:
            SaveFailedError: it was given up, or takes too long; on every rank.
        """
        step, self.pending = self.pending, None
        if step is None:
            return
        with agreed(f"publishing step {step}"):
            if self._main:
                self._await(step)

    def _await(self, step: int) -> None:
        end = self.clock.monotonic() + LONGEST_PUBLICATION
        while (fate := self.fates.get(step)) is None:
            self._listen(1.0)
            if self.clock.monotonic() > end:
                raise SaveFailedError(f"the persister has not published step {step} in {LONGEST_PUBLICATION:.0f} s")
        if not fate.published:
            raise SaveFailedError(fate.reason)

    def _listen(self, seconds: float) -> None:
        """Take what was heard, waiting up to ``seconds`` for the first word."""
        while True:
            try:
                message = self.heard_from.get(timeout=seconds) if seconds else self.heard_from.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0
            self.up = True
            if message.step:
                self.fates[message.step] = message
                while len(self.fates) > _REMEMBERED:
                    del self.fates[next(iter(self.fates))]

    # ------------------------------------------------------------ incarnations

    def take_over(self, step: int) -> bool:
        """Make the snapshots up to ``step`` this incarnation's own (collective); False: the last hand-over is lost.

        What earlier incarnations left to be published is published under this one's right; what is newer than the
        state that this incarnation goes on from belongs to a past that did not happen.
        """
        if not self._can:
            return True
        assert self.placement is not None
        with agreed("taking over the snapshots"):
            if self.placement.first and self.memory is not None:
                snapshot.relabel(self.memory, incarnation=self.fence.incarnation, token=self.fence.token, at_most=step)
        self._listen(0.0)
        told = gathered((self.ready or (self.up and self.placement.marks), self._pending_is_safe()))
        self.ready = any(ready for ready, _ in told)
        if not all(safe for _, safe in told):
            self.pending = None
            return False
        return True

    def _pending_is_safe(self) -> bool:
        """On rank 0: whether what was handed over last is published or waits in memory, whole."""
        if not self._main or self.pending is None or self.memory is None:
            return True
        fate = self.fates.get(self.pending)
        if fate is not None and fate.published:
            return True
        return any(
            found.step == self.pending and found.complete and found.shards[0].description.persist
            for found in snapshot.find(self.memory)
        )
