"""What a holder wants: the question that the allocator answers with leases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Demand:
    """What a holder wants; the allocator answers with leases."""

    holder: str
    """``job:<id>`` or ``evaluation``."""
    kind: str
    """``pretrain`` or ``evaluation``."""
    weight: float
    min_slots: int
    max_slots: int
    feasible: tuple[int, ...]
    """Counts that have a layout, ascending."""
    throughput: Mapping[int, float]
    """Aggregate FLOP/s per count."""
    transition_seconds: float
    backlog_seconds: float = 0.0
    """Evaluation: slot-seconds of work that waits."""
    since: float = 0.0
    """When it began to wait (ageing), seconds since the epoch."""
    faulted: bool = False
    """It lost a worker in the event that this demand answers."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What a finer cost model wants to know besides (pending reports, state size, layouts)."""

    def __post_init__(self) -> None:
        numbers = [self.weight, self.transition_seconds, self.backlog_seconds, *self.throughput.values()]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"demand of {self.holder}: rates, weight and seconds must be finite and not negative")
        if self.min_slots < 0 or self.max_slots < 0 or any(count <= 0 for count in self.feasible):
            raise ValueError(f"demand of {self.holder}: counts must be positive, found {self.feasible}")

    def to_json(self) -> dict[str, Any]:
        """As plain JSON; the counts of ``throughput`` become text."""
        return asdict(self) | {"throughput": {str(count): rate for count, rate in self.throughput.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Demand:
        """The inverse of :meth:`to_json`."""
        known = dict(data)
        known["feasible"] = tuple(int(count) for count in known["feasible"])
        known["throughput"] = {int(count): float(rate) for count, rate in known["throughput"].items()}
        return cls(**known)
