"""How long a run will still take: estimated seconds of what is open, scaled by what finished shards really took.

Scoring and generation are scaled apart, since their estimates err apart; before a shard has finished, the pace since
the first answer counts, so that loading the model does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from evalsched.types import RequestId

LEAST_SHARE = 0.02
"""Share of the work before which nothing is said."""


def kind_of(one: RequestId) -> str:
    """``generation`` or ``scoring``."""
    return "generation" if one.request_type == "generate_until" else "scoring"


@dataclass
class Pace:
    """The account of one run, in estimated seconds on one slot."""

    cost: dict[RequestId, float] = field(default_factory=dict)
    open: dict[str, float] = field(default_factory=dict)
    total: float = 0.0
    done: float = 0.0
    _measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    _first: tuple[float, float] | None = None

    def begin(self, cost: Mapping[RequestId, float]) -> None:
        """What has to be run, with its estimates."""
        self.cost = dict(cost)
        self.total = sum(cost.values())
        for one, seconds in cost.items():
            self.open[kind_of(one)] = self.open.get(kind_of(one), 0.0) + seconds

    def closed(self, ids: Iterable[RequestId], now: float) -> None:
        """Requests that were answered or given up."""
        for one in ids:
            seconds = self.cost.get(one, 0.0)
            self.open[kind_of(one)] = max(0.0, self.open.get(kind_of(one), 0.0) - seconds)
            self.done += seconds
        if self._first is None:
            self._first = (now, self.done)

    def shard(self, ids: Iterable[RequestId], seconds: float) -> None:
        """A shard finished after ``seconds`` in the engine."""
        estimates: dict[str, float] = {}
        for one in ids:
            estimates[kind_of(one)] = estimates.get(kind_of(one), 0.0) + self.cost.get(one, 0.0)
        whole = sum(estimates.values())
        for kind, estimate in estimates.items():
            before = self._measured.get(kind, (0.0, 0.0))
            self._measured[kind] = (before[0] + estimate, before[1] + seconds * (estimate / whole if whole else 0.0))

    @property
    def factor(self) -> float:
        """What finished shards took over what was estimated; 1 while none has finished."""
        estimate = sum(one[0] for one in self._measured.values())
        return sum(one[1] for one in self._measured.values()) / estimate if estimate > 0 else 1.0

    @property
    def share(self) -> float:
        """Share of the work that is done, 0 to 1."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0

    def left(self, workers: int, now: float) -> float | None:
        """Seconds until the last answer with ``workers`` at work; None while nothing can be said."""
        if self.share < LEAST_SHARE:
            return None
        if self._measured:
            return sum(self._scaled(kind, open_) for kind, open_ in self.open.items()) / max(1, workers)
        if self._first is None or self.done <= self._first[1]:
            return None
        return sum(self.open.values()) * (now - self._first[0]) / (self.done - self._first[1])

    def _scaled(self, kind: str, open_: float) -> float:
        estimate, seconds = self._measured.get(kind, (0.0, 0.0))
        return open_ * (seconds / estimate if estimate > 0 else self.factor)
