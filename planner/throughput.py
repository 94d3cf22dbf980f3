"""T(t, x) of a job, from two sources behind one interface: what was measured, and what the model says.

A measured count always wins. For counts not seen yet the analytic model is scaled by how far it was off at the
measured counts next to them, so that a job's table becomes its own as its steps complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import exp, isfinite, log
from typing import Any, Protocol

from planner.throughput_model import Hardware, ModelShape, Training, best_estimate
from planner.types import Layout, ThroughputProfile

WINDOW_STEPS = 200.0
"""Steps that a measurement remembers: older ones fade, so that a slow start is forgotten."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Achieved aggregate FLOP/s at a count and the layout that reaches it."""

    flops: float
    layout: Layout | None = None


class ThroughputSource(Protocol):
    """Anything that knows how fast a job is."""

    def rate(self, workers: int) -> Rate | None:
        """The rate at ``workers``, or None if the job cannot run there or nothing is known."""


@dataclass(frozen=True, slots=True)
class AnalyticSource:
    """The model of :mod:`planner.throughput_model` at the best layout."""

    shape: ModelShape
    training: Training
    hardware: Hardware
    slots_per_node: int = 8

    def rate(self, workers: int) -> Rate | None:
        """The best layout that fits in memory."""
        if workers <= 0:
            return None
        found = best_estimate(self.shape, self.training, self.hardware, workers, self.slots_per_node)
        return Rate(found.flops, found.layout) if found else None


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps seen at one count: their (faded) number, their seconds, their FLOPs."""

    steps: float
    seconds: float
    flops: float
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """What the trainer recorded, per count; a record gives a new table."""

    entries: Mapping[int, Measured] = field(default_factory=dict)

    def record(
        self, workers: int, seconds: float, flops: float, steps: int = 1, layout: Layout | None = None
    ) -> MeasuredTable:
        """The table after ``steps`` more steps at ``workers`` that took ``seconds`` and did ``flops`` in all.

        Another layout at the same count starts that count anew.

        Raises:
            ValueError: a number is not positive and finite.
        """
        if workers <= 0 or steps <= 0 or not (isfinite(seconds) and seconds > 0 and isfinite(flops) and flops >= 0):
            raise ValueError(f"not a measurement: {steps} steps at {workers} workers, {seconds} s, {flops} FLOP")
        old = self.entries.get(workers)
        if old is None or old.layout != layout:
            new = Measured(float(steps), seconds, flops, layout)
        else:
            keep = min(1.0, max(WINDOW_STEPS - steps, 0.0) / old.steps)
            new = Measured(old.steps * keep + steps, old.seconds * keep + seconds, old.flops * keep + flops, layout)
        return MeasuredTable({**self.entries, workers: new})

    def rate(self, workers: int) -> Rate | None:
        """FLOPs per second over the remembered steps."""
        entry = self.entries.get(workers)
        return Rate(entry.flops / entry.seconds, entry.layout) if entry else None

    def to_json(self) -> dict[str, Any]:
        """For the job's record."""
        return {
            str(workers): {
                "steps": entry.steps,
                "seconds": entry.seconds,
                "flops": entry.flops,
                "layout": entry.layout.to_json() if entry.layout else None,
            }
            for workers, entry in sorted(self.entries.items())
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MeasuredTable:
        """The inverse of :meth:`to_json`."""
        return cls(
            {
                int(workers): Measured(
                    float(entry["steps"]),
                    float(entry["seconds"]),
                    float(entry["flops"]),
                    Layout(**entry["layout"]) if entry["layout"] else None,
                )
                for workers, entry in data.items()
            }
        )


@dataclass(frozen=True, slots=True)
class RefinedSource:
    """Measured where measured; elsewhere the model times the correction of the measured neighbours."""

    measured: MeasuredTable
    model: ThroughputSource

    def rate(self, workers: int) -> Rate | None:
        """The correction is interpolated over the logarithm of the count, and constant beyond the measured ones."""
        known = self.measured.rate(workers)
        if known is not None:
            return known
        guess = self.model.rate(workers)
        return Rate(guess.flops * self._correction(workers), guess.layout) if guess else None

    def _correction(self, workers: int) -> float:
        points: list[tuple[float, float]] = []
        for count in sorted(self.measured.entries):
            seen, said = self.measured.rate(count), self.model.rate(count)
            if seen is not None and said is not None and seen.flops > 0 and said.flops > 0:
                points.append((log(count), log(seen.flops / said.flops)))
        if not points:
            return 1.0
        at = log(workers)
        below = [point for point in points if point[0] <= at]
        above = [point for point in points if point[0] >= at]
        if not below or not above:
            return exp((below[-1] if below else above[0])[1])
        (x0, y0), (x1, y1) = below[-1], above[0]
        return exp(y0 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0))


def candidate_counts(least: int, most: int, slots_per_node: int) -> list[int]:
    """Counts worth listing: every one within a node, whole nodes up to eight, then four to each doubling."""
    nodes: list[int] = list(range(1, 9))
    while nodes[-1] * slots_per_node < most:
        nodes.append(nodes[-1] + 2 ** (nodes[-1].bit_length() - 3))
    within = range(1, slots_per_node + 1)
    counts = {*within, *(count * slots_per_node for count in nodes)}
    return sorted(count for count in counts if least <= count <= most)


def profile(source: ThroughputSource, counts: Iterable[int]) -> ThroughputProfile:
    """The counts at which the source knows a rate."""
    rates = {count: source.rate(count) for count in counts}
    return ThroughputProfile.of(
        {count: rate.flops for count, rate in rates.items() if rate},
        {count: rate.layout for count, rate in rates.items() if rate and rate.layout},
    )
