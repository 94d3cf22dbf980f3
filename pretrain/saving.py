"""The rank's use of the durable tier: claim, resume, save with an allowance for failures, retention."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from planner import manifest
from planner.clock import Clock, SystemClock
from planner.errors import BadInputError, GivenUpError, one_line
from planner.messages import Persisted, RankCheckpoint
from planner.pretrain_config import FaultKind, Phase
from pretrain import checkpoint, published
from pretrain.channel import Channel
from pretrain.checkpoint import Parts, SaveFailedError
from pretrain.faults import Injector, corrupt
from pretrain.megatron_format import agreed
from pretrain.published import Fence
from pretrain.state import TrainState

BACK_OFF_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Waits between tries of a save that must succeed now (the last one, or before leaving)."""


@dataclass
class PublishedCheckpoints:
    """Saves into and loads from one folder, all ranks together; rank 0 speaks."""

    folder: Path
    fence: Fence
    parts: Parts
    channel: Channel
    injector: Injector
    clock: Clock = field(default_factory=SystemClock)
    failures: int = 0
    """Saves that failed in a row."""

    @property
    def _main(self) -> bool:
        return dist.get_rank() == 0

    def claim(self) -> None:
        """Take the right to publish and clear what crashed writers left (collective).

        Raises:
            SaveFailedError: a newer incarnation has the folder, or it cannot be written; on every rank.
        """
        with agreed(f"claiming {self.folder}"):
            if self._main:
                published.claim(self.folder, self.fence)
                with published.locked(self.folder):
                    published.clear_debris(self.folder)

    # ------------------------------------------------------------ resuming

    def find(self, named: str | None) -> Path | None:
        """The published checkpoint to go on from: the one that the supervisor named."""
        return Path(named) if named else None

    def resume(self, wanted: Path) -> TrainState:
        """Load ``wanted``, or the newest older checkpoint that verifies where it does not (collective).

        Raises:
            GivenUpError: none can be used and ``checkpoint.start_over`` is false.
        """
        started = self.clock.monotonic()
        found: list[Path | None] = [self._usable(wanted) if self._main else None]
        dist.broadcast_object_list(found, src=0)
        if found[0] is None:
            if self.parts.config.checkpoint.start_over:
                return self.parts.state
            raise GivenUpError(
                f"{self.folder}: no checkpoint up to {wanted.name} can be used; the event log says why. "
                "Repair it, or set checkpoint.start_over to begin from random weights"
            )
        state = checkpoint.load(found[0], self.parts)
        self._tell("loaded", state.step, found[0], seconds=self.clock.monotonic() - started)
        return state

    def _usable(self, wanted: Path) -> Path | None:
        """``wanted`` or the newest older one that verifies; tells of every one that does not."""
        parsed = manifest.parse_step_dir(wanted.name)
        if parsed is None:
            raise BadInputError(f"resume: {wanted} is not named like a checkpoint (step-00000000)")
        older = [item for item in reversed(published.published(wanted.parent)) if item[0] < parsed[0]]
        for step, path in [(parsed[0], wanted), *older]:
            problems = published.examine(path, step)
            if not problems:
                return path
            reason = "; ".join(f"{problem.file}: {problem.problem}" for problem in problems)
            self._tell("refused", step, path, reason=reason)
        return None

    # ------------------------------------------------------------ saving

    def save(self, state: TrainState, *, insist: bool = False) -> bool:
        """Save and publish ``state`` (collective); False where it failed and training may go on without.

        Args:
            state: what the live model and optimizer belong to.
            insist: try again at once, with pauses, instead of leaving it to a later step.

        Raises:
            SaveFailedError: the allowance ``checkpoint.failures`` of failures in a row is used up; on every rank.
        """
        self.parts.state = state
        while True:
            try:
                self._save_once(state, insist=insist)
            except SaveFailedError as error:
                self.failures += 1
                self._tell("failed", state.step, None, reason=one_line(error))
                if self.failures >= self.parts.config.checkpoint.failures:
                    raise
                if not insist:
                    return False
                self.clock.sleep(BACK_OFF_SECONDS[min(self.failures, len(BACK_OFF_SECONDS)) - 1])
            else:
                if self._is_durable():
                    self.failures = 0
                return True

    def settle(self) -> None:
        """Wait until what was saved last is published; here it is, when :meth:`save` returns."""

    def heard(self, message: Persisted) -> None:
        """A word of the node's persister; of no interest to who publishes by itself."""

    def hands_over(self) -> bool:
        """Whether the next save is a snapshot that the persister publishes (the same on all ranks)."""
        return False

    def _is_durable(self) -> bool:
        """Whether the save that has just succeeded is published already."""
        return True

    def _save_once(self, state: TrainState, *, insist: bool) -> None:
        started = self.clock.monotonic()
        effects: list[FaultKind] = []

        def on_stage(stage: str) -> None:
            if stage == "write":
                effects.extend(self.injector.fire(Phase.SAVE, state.step))

        path = checkpoint.save(self.parts, self.folder, fence=self.fence, created=self.clock.time(), on_stage=on_stage)
        seconds = self.clock.monotonic() - started
        self._tell("published", state.step, path, seconds=seconds, stall_seconds=seconds)
        if FaultKind.CORRUPT_CHECKPOINT in effects:
            corrupt(path)
        self._retain(state.step)

    def _retain(self, step: int) -> None:
        if not self._main:
            return
        keep = self.parts.config.checkpoint
        removed: list[Path] = []
        with contextlib.suppress(OSError):  # what cannot be deleted now is deleted after the next publication
            removed = published.apply_retention(
                self.folder, keep=keep.keep, keep_every=keep.keep_every, newest_verified=step
            )
        for path in removed:
            parsed = manifest.parse_step_dir(path.name)
            self._tell("deleted", parsed[0] if parsed else 0, path)

    def _tell(
        self,
        what: str,
        step: int,
        path: Path | None,
        *,
        reason: str = "",
        seconds: float | None = None,
        stall_seconds: float | None = None,
    ) -> None:
        """Say what became of a checkpoint, once for the job."""
        if self._main:
            self.channel.send(
                RankCheckpoint(
                    what=what,
                    step=step,
                    path=str(path) if path else None,
                    seconds=seconds,
                    stall_seconds=stall_seconds,
                    reason=reason,
                    time=self.clock.time(),
                )
            )
