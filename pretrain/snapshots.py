"""The trainer's use of the snapshot tier: when to copy, when to wait, what it cost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.clock import Clock, SystemClock
from planner.errors import one_line
from planner.messages import RankCheckpoint
from pretrain import snapshot, snapshot_state
from pretrain.checkpoint import Parts
from pretrain.parallel import Layout
from pretrain.published import Fence
from pretrain.snapshot_writer import SnapshotWriter, Taken
from pretrain.state import TrainState

MEMORY_VARIABLE = "PLANARIA_SHM"
"""Folder in host memory that the stack (or the operator) gives to snapshots and staged models."""


def memory_dir() -> Path | None:
    """The node's folder in host memory, or None where nobody named one: then there is no snapshot tier."""
    named = os.environ.get(MEMORY_VARIABLE)
    return Path(named) if named else None


@dataclass
class Snapshots:
    """One rank's snapshots. ``writer`` is None on ranks whose replica another rank of the node copies."""

    parts: Parts
    fence: Fence
    every_steps: int
    writer: SnapshotWriter | None
    tell: Callable[[RankCheckpoint], None]
    clock: Clock
    speaks: bool = True
    """Whether this rank tells of snapshots that went well; one per job does."""
    memory: Path | None = None
    """The node's folder in host memory."""
    own_memory: bool = True
    """Whether the ranks themselves give the memory back; where an agent runs, it does."""

    def after_step(self, state: TrainState) -> None:
        """Begin a snapshot of ``state``, which the live tensors have just reached, where one is due."""
        if state.step % self.every_steps == 0:
            self.hand_over(state, persist=False)

    def hand_over(self, state: TrainState, *, persist: bool) -> Taken | None:
        """Begin a snapshot of ``state`` now, marked for the persister where ``persist`` says so.

        Returns:
            How it begins; its ``skipped`` says why nothing was taken. None on a rank that copies nothing.
        """
        self.parts.state = state
        if self.writer is None:
            return None
        source = snapshot_state.source(self.parts, fence=self.fence, created=self.clock.time(), persist=persist)
        self._report_previous()
        return self.writer.begin(source)

    def before_update(self) -> float:
        """Wait until the copy in flight has read the tensors that are about to change; the seconds waited."""
        if self.writer is None:
            return 0.0
        try:
            return self.writer.finish()
        except snapshot.SnapshotError as error:
            self._say("failed", self.parts.state.step, reason=one_line(error))
            return 0.0

    def drain(self) -> None:
        """Wait until the last snapshot is committed (before leaving, re-forming or waiting for its publication)."""
        if self.writer is not None:
            self.writer.finish()
            self.writer.wait_committed()

    def reformed(self, layout: Layout, fence: Fence, *, first_here: bool) -> None:
        """Go on under a new incarnation; a rank whose node lost the replica that copied takes over."""
        self.fence, self.speaks = fence, layout.rank == 0
        self.drain()
        if self.writer is None and self.memory is not None and first_here:
            self.writer = _writer(layout, fence.job, self.memory, self.clock)

    def close(self, *, completed: bool) -> None:
        """Stop copying. The files stay for the recovery; those of a completed job go, where no agent sees to that."""
        if self.writer is None:
            return
        self.writer.close()
        self._report_previous()
        if completed and self.own_memory and self.memory is not None:
            snapshot.remove_job(self.memory, self.fence.job)

    def _report_previous(self) -> None:
        """Say what the last snapshot cost, now that it is over."""
        taken: Taken | None = self.writer.taken[-1] if self.writer and self.writer.taken else None
        if taken is None:
            return
        if taken.skipped:
            self._say("failed", taken.step, reason=f"snapshot left out: {taken.skipped}")
        elif self.speaks:
            self._say("snapshot", taken.step, seconds=taken.copy_seconds, stall=taken.stall_seconds)

    def _say(
        self, what: str, step: int, reason: str = "", seconds: float | None = None, stall: float | None = None
    ) -> None:
        self.tell(
            RankCheckpoint(
                what=what,
                step=step,
                reason=reason,
                seconds=seconds,
                stall_seconds=stall,
                time=self.clock.time(),
            )
        )


def open_snapshots(
    parts: Parts,
    layout: Layout,
    *,
    fence: Fence,
    tell: Callable[[RankCheckpoint], None],
    memory: Path | None,
    first_replica_here: bool,
    own_memory: bool = True,
    clock: Clock | None = None,
) -> Snapshots:
    """The snapshot tier of one rank.

    Args:
        parts: the rank's live objects.
        layout: its coordinates.
        fence: the right under which it writes.
        tell: takes messages for the agent.
        memory: the node's folder in host memory; None: nothing is ever copied.
        first_replica_here: whether this rank is the first data-parallel replica of its shard on this node.
        own_memory: whether the ranks give the memory of a completed job back themselves.
        clock: time.
    """
    clock = clock or SystemClock()
    sharded = parts.optimizer is not None and snapshot_state.shards_optimizer(parts.optimizer)
    writer = None
    if memory is not None and (first_replica_here or sharded):
        writer = _writer(layout, fence.job, memory, clock, sharded=sharded)
    every = parts.config.checkpoint.snapshot_every_steps
    speaks = layout.rank == 0
    return Snapshots(parts, fence, every, writer, tell, clock, speaks=speaks, memory=memory, own_memory=own_memory)


def _writer(layout: Layout, job: str, memory: Path, clock: Clock, *, sharded: bool = False) -> SnapshotWriter:
    coordinate = snapshot.Coordinate(
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        tensor_rank=layout.tensor_rank,
        pipeline_rank=layout.pipeline_rank,
        replica=layout.data_rank if sharded else 0,
        replicas=layout.data if sharded else 1,
    )
    return SnapshotWriter(snapshot.job_dir(memory, job), coordinate, clock=clock.monotonic)
