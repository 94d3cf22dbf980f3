"""How long a run will still take: estimated seconds of what is open, scaled by what finished shards really took.

Scoring and generation are scaled apart, since their estimates err apart; before a shard has finished, the pace since
the first answer counts, so that loading the model does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

from evalsched.types import RequestId

SHORTEST_MEASURED = 0.05
MEASURED_SHARDS = 3
"""Shards after which a worker's speed is believed."""
SMOOTHING = 0.2
MOST_APART = 5.0
LEAST_FACTOR = 1e-4
LEAST_SHARE = 0.02
"""Share of the work before which nothing is said."""


def kind_of(one: RequestId) -> str:
    """``generation`` or ``scoring``."""
    return "generation" if one.request_type == "generate_until" else "scoring"


@dataclass
class Pace:
    """The account of one run, in estimated seconds on one slot."""

    cost: Mapping[RequestId, float] = field(default_factory=dict)
    open: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    done: float = 0.0
    shards: int = 0
    """Shards that finished."""
    _measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    _first: tuple[float, float] | None = None
    _learned: bool = False

    def begin(self, cost: Mapping[RequestId, float], *, learned: bool = False) -> None:
        """What has to be run, with its estimates; ``learned``: from measurements, so that they can be told at once."""
        self.cost, self._learned = cost, learned
        self.total = sum(cost.values())
        for one, seconds in cost.items():
            kind = kind_of(one)
            self.open[kind] = self.open.get(kind, 0.0) + seconds

    def closed(self, ids: Iterable[RequestId], now: float) -> None:
        """Requests that were answered or given up."""
        for one in ids:
            seconds, kind = self.cost.get(one, 0.0), kind_of(one)
            self.open[kind] = max(0.0, self.open.get(kind, 0.0) - seconds)
            self.done += seconds
        if self._first is None:
            self._first = (now, self.done)

    def shard(self, ids: Iterable[RequestId], seconds: float) -> None:
        """A shard finished after ``seconds`` in the engine."""
        self.shards += 1
        estimates: dict[str, float] = {}
        for one in ids:
            kind = kind_of(one)
            estimates[kind] = estimates.get(kind, 0.0) + self.cost.get(one, 0.0)
        whole = sum(estimates.values())
        for kind, estimate in estimates.items():
            before = self._measured.get(kind, (0.0, 0.0))
            self._measured[kind] = (before[0] + estimate, before[1] + seconds * (estimate / whole if whole else 0.0))

    @property
    def factor(self) -> float:
        """What finished shards took over what was estimated; 1 while none has finished."""
        estimate = sum(one[0] for one in self._measured.values())
        seconds = sum(one[1] for one in self._measured.values())
        return max(LEAST_FACTOR, seconds / estimate) if estimate > 0 else 1.0

    @property
    def measured(self) -> bool:
        """Whether any shard has finished."""
        return bool(self._measured)

    @property
    def share(self) -> float:
        """Share of the work that is done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0

    def left(self, workers: int, now: float) -> float | None:
        """Seconds until the last answer with ``workers`` at work; None while nothing can be said."""
        if self.share < LEAST_SHARE:
            return sum(self.open.values()) / workers if self._learned and workers > 0 else None
        if self._measured:
            return sum(self._scaled(kind, open_) for kind, open_ in self.open.items()) / max(1, workers)
        if self._first is None or self.done <= self._first[1]:
            return sum(self.open.values()) / workers if self._learned and workers > 0 else None
        return sum(self.open.values()) * (now - self._first[0]) / (self.done - self._first[1])

    def _scaled(self, kind: str, open_: float) -> float:
        estimate, seconds = self._measured.get(kind, (0.0, 0.0))
        return open_ * (seconds / estimate if estimate > 0 else self.factor)


class Speeds:
    """How fast each worker is against the others: estimated over measured seconds of its shards, smoothed."""

    def __init__(self) -> None:
        self._ratios: dict[str, tuple[int, float]] = {}

    def note(self, worker: str, estimate: float, seconds: float) -> None:
        """A shard finished."""
        if estimate <= 0 or seconds < SHORTEST_MEASURED:
            return
        count, before = self._ratios.get(worker, (0, 0.0))
        weight = max(1 / (count + 1), SMOOTHING)
        self._ratios[worker] = (count + 1, before + weight * (log(estimate / seconds) - before))

    def of(self, worker: str) -> float:
        """Speed; 1 is the middle worker's, and that of one that has not run :data:`MEASURED_SHARDS` yet."""
        known = {name: ratio for name, (count, ratio) in self._ratios.items() if count >= MEASURED_SHARDS}
        if worker not in known or len(known) < 2:
            return 1.0
        return min(MOST_APART, max(1 / MOST_APART, exp(known[worker] - median(known.values()))))

    def forget(self, worker: str) -> None:
        """It is gone."""
        self._ratios.pop(worker, None)
