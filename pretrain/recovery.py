"""Which state a starting incarnation goes on from: the newest that verifies, and of equally new ones the nearest.

The order is decided by a pure function; the shell tries the candidates in that order, on all ranks together, and
says why each one before the chosen was refused. Random weights are the answer only where there is nothing at all:
checkpoints that exist and cannot be used stop the job, unless it was told to start over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.errors import GivenUpError, one_line
from pretrain import checkpoint, published, snapshot, snapshot_state
from pretrain.checkpoint import Parts, SaveFailedError
from pretrain.megatron_format import agreed


class Tier(IntEnum):
    """Where a state is; nearer tiers have smaller numbers."""

    SNAPSHOT = 1
    PEER = 2
    DURABLE = 3


@dataclass(frozen=True)
class Candidate:
    """A state that could be gone on from, not yet verified."""

    tier: Tier
    step: int
    incarnation: int
    where: str

    def __str__(self) -> str:
        return f"{self.tier.name.lower()} of step {self.step} ({self.where})"


@dataclass(frozen=True)
class Refused:
    """A candidate that was tried, and why it was not used."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Recovered:
    """What was decided. ``chosen`` is None where the job starts from its seed."""

    chosen: Candidate | None
    refused: tuple[Refused, ...]
    reason: str


def order(candidates: Iterable[Candidate], *, at_most: int | None = None) -> list[Candidate]:
    """The candidates as they are to be tried: newest step first, then nearest tier, then latest incarnation.

    Args:
        candidates: what exists.
        at_most: leave out what is newer (a roll-back goes to an earlier state on purpose).
    """
    usable = [one for one in candidates if at_most is None or one.step <= at_most]
    return sorted(usable, key=lambda one: (-one.step, one.tier, -one.incarnation, one.where))


def common_steps(per_rank: Sequence[Iterable[tuple[int, int]]]) -> list[tuple[int, int]]:
    """(step, incarnation) of the snapshots that every rank can be served from, newest first."""
    sets = [set(one) for one in per_rank]
    shared = set.intersection(*sets) if sets else set()
    return sorted(shared, reverse=True)


def try_all(candidates: Sequence[Candidate], attempt: Callable[[Candidate], str | None], start_over: bool) -> Recovered:
    """Try candidates in order; the first without a problem is chosen.

    Args:
        candidates: in the order of :func:`order`.
        attempt: loads one; returns the reason why it cannot be used, or None when it was loaded.
        start_over: begin from the seed although everything that exists is unusable.

    Raises:
        GivenUpError: candidates exist and none can be used, and ``start_over`` is false.
    """
    refused: list[Refused] = []
    for candidate in candidates:
        problem = attempt(candidate)
        if problem is None:
            newer = f", after {len(refused)} newer or nearer could not be used" if refused else ""
            return Recovered(candidate, tuple(refused), f"{candidate} is the newest that verifies{newer}")
        refused.append(Refused(candidate, problem))
    if not refused:
        return Recovered(None, (), "no state exists: starting from the seed")
    why = "; ".join(f"{one.candidate}: {one.reason}" for one in refused)
    if start_over:
        return Recovered(None, tuple(refused), f"starting over as told; unusable: {why}")
    raise GivenUpError(
        f"no state can be used ({why}); repair one, or set checkpoint.start_over: true to begin from random weights"
    )


def recover(
    parts: Parts,
    *,
    folder: Path,
    snapshots: Path | None,
    start_over: bool,
    at_most: int | None = None,
    exact: bool = False,
) -> Recovered:
    """Find and load the state to go on from into the live objects (collective).

    Args:
        parts: this rank's live objects; untouched where nothing exists.
        folder: published checkpoints (already fetched, where they are in an object store).
        snapshots: the job's snapshots on this node, own and peers'; None: no such tier.
        start_over: see :func:`try_all`.
        at_most: use nothing newer than this step.
        exact: use published checkpoints alone.

    Raises:
        GivenUpError: see :func:`try_all`; on every rank.
    """
    found: dict[tuple[int, int], snapshot.SnapshotSet] = {}
    if snapshots is not None and not exact:
        found = {(one.step, one.incarnation): one for one in snapshot.find(snapshots) if _serves(one, parts)}
    gathered: list[Any] = [None] * dist.get_world_size()
    durable = [(step, str(path)) for step, path in published.published(folder)] if dist.get_rank() == 0 else []
    dist.all_gather_object(gathered, (list(found), durable))
    candidates = [
        Candidate(Tier.SNAPSHOT, step, incarnation, "host memory")
        for step, incarnation in common_steps([mine for mine, _ in gathered])
    ]
    candidates += [Candidate(Tier.DURABLE, step, 0, path) for step, path in gathered[0][1]]

    def attempt(candidate: Candidate) -> str | None:
        if candidate.tier == Tier.SNAPSHOT:
            return _load_snapshot(candidate, found, parts)
        try:
            with agreed(f"verifying {candidate.where}"):
                _refuse_broken(candidate)
        except SaveFailedError as error:
            return one_line(error)
        checkpoint.load(Path(candidate.where), parts)
        return None

    return try_all(order(candidates, at_most=at_most), attempt, start_over)


def from_snapshots(
    parts: Parts, snapshots: Path | None, *, newer_than: int, at_most: int | None = None, since: int = 0
) -> Recovered:
    """Load the newest snapshot that is newer than what the durable tier has, and of step ``at_most`` at most where that
    is given (collective); none may be chosen.

    A snapshot that fails in the middle leaves the live objects half-filled; the caller then loads another state
    over them, or builds them anew where there is none. ``since``: incarnations before it made nothing that counts.
    """
    found: dict[tuple[int, int], snapshot.SnapshotSet] = {}
    if snapshots is not None:
        found = {(one.step, one.incarnation): one for one in snapshot.find(snapshots) if _serves(one, parts)}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [key for key in found if key[0] > newer_than and key[1] >= since])
    candidates = [
        Candidate(Tier.SNAPSHOT, step, incarnation, "host memory") for step, incarnation in common_steps(gathered)
    ]
    return try_all(order(candidates, at_most=at_most), lambda one: _load_snapshot(one, found, parts), start_over=True)


def _load_snapshot(
    candidate: Candidate, found: dict[tuple[int, int], snapshot.SnapshotSet], parts: Parts
) -> str | None:
    try:
        with agreed(f"loading the {candidate}"):
            snapshot_state.load(found[candidate.step, candidate.incarnation], parts)
    except SaveFailedError as error:
        return one_line(error)
    return None


def _serves(found: snapshot.SnapshotSet, parts: Parts) -> bool:
    try:
        snapshot_state.needed(found, parts)
    except snapshot.SnapshotError:
        return False
    return True


def _refuse_broken(candidate: Candidate) -> None:
    """Every byte is checked on rank 0: Megatron itself loads a flipped bit without any error."""
    if dist.get_rank() == 0:
        problems = published.examine(Path(candidate.where), candidate.step)
        if problems:
            raise snapshot.SnapshotError("; ".join(f"{problem.file}: {problem.problem}" for problem in problems))
