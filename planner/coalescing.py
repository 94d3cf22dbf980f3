"""What is done with a job's checkpoints when their evaluation falls behind: pure; the scheduler carries it out.

Evaluation is *behind* when the work that waits for a job takes longer, on the slots that there are, than two intervals
between its checkpoints (:data:`PATIENCE`): more come in than go out. A job's ``evaluate.behind`` says what then:
``all`` (evaluate every checkpoint, later), ``skip`` (leave out intermediate checkpoints that nobody has begun) or
``limit`` (fewer documents of the newest). What was left out is always said in the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

Behind = Literal["all", "skip", "limit"]

PATIENCE = 2.0
"""Checkpoint intervals that the waiting work may take."""
LEAST_LIMIT = 20
"""Documents per task below which no limit is lowered: the interval of a score would say nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingReport:
    """A checkpoint of one job whose report is not out."""

    run: str
    step: int
    seconds: float
    """Slot-seconds that are left to run."""
    begun: bool
    """Whether anything of it was run: such a report is finished."""


@dataclass(frozen=True, slots=True)
class Skip:
    """A checkpoint that is not evaluated."""

    run: str
    reason: str


def interval(published: Sequence[float]) -> float | None:
    """The middle time between the last checkpoints (s), from the times of their publication; None with fewer than 2."""
    times = sorted(published)[-6:]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return median(gaps) if gaps else None


def skips(waiting: Sequence[WaitingReport], slots: int, seconds: float | None) -> list[Skip]:
    """Which checkpoints of a job to leave out; ``seconds`` between its checkpoints.

    Never the newest and never one that was begun. Of the others the one goes first whose kept neighbours are closest
    together, so that what is left is spread evenly over the steps.
    """
    if seconds is None or not waiting:
        return []
    kept = sorted(waiting, key=lambda one: one.step)
    bound = PATIENCE * seconds * max(1, slots)
    found: list[Skip] = []
    while True:
        left = sum(one.seconds for one in kept)
        candidates = [number for number in range(len(kept) - 1) if not kept[number].begun]
        if left <= bound or not candidates:
            return found
        number = min(candidates, key=lambda place: (_gap(kept, place), kept[place].step))
        found.append(Skip(kept[number].run, _reason(left, slots, seconds)))
        del kept[number]


def _gap(kept: Sequence[WaitingReport], place: int) -> int:
    before = kept[place - 1].step if place else 0
    return kept[place + 1].step - before


def _reason(left: float, slots: int, seconds: float) -> str:
    return (
        f"evaluation was behind: {left:.0f} slot-seconds waited for {max(1, slots)} slots, "
        f"and a checkpoint came every {seconds:.0f} s"
    )


@dataclass(frozen=True, slots=True)
class Lowered:
    """A limit that a new checkpoint is evaluated with."""

    limit: int
    reason: str


def lowered_limit(
    limit: int | None, documents: int, own: float, left: float, slots: int, seconds: float | None
) -> Lowered | None:
    """A smaller limit for a new checkpoint; None where evaluation is not behind.

    ``documents``: of the largest task of an earlier checkpoint; ``own``: slot-seconds that this checkpoint would take
    with ``limit``; ``left``: those that wait already. Halved until it fits, down to :data:`LEAST_LIMIT`.
    """
    if seconds is None or documents <= 0 or left + own <= PATIENCE * seconds * max(1, slots):
        return None
    whole = documents if limit is None else min(limit, documents)
    chosen = whole
    while chosen // 2 >= LEAST_LIMIT and left + own * chosen / whole > PATIENCE * seconds * max(1, slots):
        chosen //= 2
    if chosen == whole:
        return None
    return Lowered(chosen, f"{chosen} documents per task instead of {whole}: {_reason(left + own, slots, seconds)}")
