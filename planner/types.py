"""The values that the allocator reasons about. All frozen; units are in the names or in the docstrings.

Rates are in FLOP/s, worths and costs in FLOP (a rate times seconds), so that every term of every decision is in
one unit. A *count* is a number of slots of one job (``workers`` in configs and plans).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

CHECK_MARK = "check"
"""Mode of a cordon that the cluster itself set: a passing node check lifts it, a person's cordon stays."""


class JobKind(StrEnum):
    """What a job does with its slots."""

    PRETRAIN = "pretrain"
    EVALUATION = "evaluation"


@dataclass(frozen=True, order=True, slots=True)
class Slot:
    """One schedulable device of a node, named ``<node>/<index>``."""

    node: str
    index: int

    @property
    def name(self) -> str:
        """``<node>/<index>``."""
        return f"{self.node}/{self.index}"

    @classmethod
    def parse(cls, name: str) -> Slot:
        """The slot that a name means.

        Raises:
            ValueError: the name is not ``<node>/<index>``.
        """
        node, separator, index = name.rpartition("/")
        if not separator or not node or not index.isdecimal():
            raise ValueError(f"slot name {name!r} is not <node>/<index>")
        return cls(node, int(index))


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A host: its slots share memory and fast links (NVLink); ``switch`` names the leaf switch that it hangs on."""

    name: str
    slots: int
    switch: str = ""
    cordoned: bool = False

    def slot_list(self) -> tuple[Slot, ...]:
        """All slots of the node, by index."""
        return tuple(Slot(self.name, index) for index in range(self.slots))


@dataclass(frozen=True, order=True, slots=True)
class Layout:
    """How a job's ranks are arranged: tensor × pipeline × data parallel sizes."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def workers(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.data

    def to_json(self) -> dict[str, int]:
        """The shape that ``planaria plan`` prints."""
        return {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}


@dataclass(frozen=True, slots=True)
class ThroughputProfile:
    """T(t, x): achieved aggregate FLOP/s at each count that has a layout; nothing is known of other counts.

    ``counts`` ascend strictly and are positive; ``flops`` has as many entries; ``layouts`` too, or none.
    """

    counts: tuple[int, ...]
    flops: tuple[float, ...]
    layouts: tuple[Layout | None, ...] = ()

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.flops) or (self.layouts and len(self.layouts) != len(self.counts)):
            raise ValueError("a profile needs one rate (and at most one layout) for each count")
        if any(count <= 0 for count in self.counts):
            raise ValueError(f"counts must be positive, found {min(self.counts)}")
        if any(a >= b for a, b in pairwise(self.counts)):
            raise ValueError("counts must ascend strictly")

    @classmethod
    def of(cls, throughput: Mapping[int, float], layouts: Mapping[int, Layout] | None = None) -> ThroughputProfile:
        """From ``{count: FLOP/s}`` in any order."""
        counts = tuple(sorted(throughput))
        return cls(
            counts,
            tuple(float(throughput[count]) for count in counts),
            tuple(layouts.get(count) for count in counts) if layouts else (),
        )

    def rate(self, count: int) -> float:
        """Aggregate FLOP/s at ``count``; 0 where it is not listed."""
        place = bisect_left(self.counts, count)
        return self.flops[place] if place < len(self.counts) and self.counts[place] == count else 0.0

    def layout(self, count: int) -> Layout | None:
        """The layout at ``count``, where one is known."""
        place = bisect_left(self.counts, count)
        listed = place < len(self.counts) and self.counts[place] == count
        return self.layouts[place] if self.layouts and listed else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as the allocator sees it.

    ``workers`` is its present count x (before the fault, if there was one); ``faulted`` says that it lost a
    worker in this event; ``transition_seconds`` is how long it stands still when its count changes or it heals.
    ``group`` slots must lie together on a node (its tensor-parallel group); it divides every listed count.
    """

    name: str
    profile: ThroughputProfile
    kind: JobKind = JobKind.PRETRAIN
    weight: float = 1.0
    min_workers: int = 1
    workers: int = 0
    faulted: bool = False
    transition_seconds: float = 0.0
    group: int = 1

    def rate(self, count: int) -> float:
        """F(t, x) = w(t)·T(t, x) in FLOP/s where x is listed and at least ``min_workers``, else 0 (DESIGN.md)."""
        if count < self.min_workers or count <= 0:
            return 0.0
        return self.weight * self.profile.rate(count)

    def feasible(self, slots: int) -> tuple[int, ...]:
        """Listed counts that reach the minimum and fit ``slots``, ascending; 0 is always possible besides."""
        counts = self.profile.counts
        return counts[bisect_left(counts, self.min_workers) : bisect_right(counts, slots)]

    def with_fault(self) -> Job:
        """The same job having lost a worker."""
        return replace(self, faulted=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What the slots are: ``gpus`` of them, how often they fail, what they cost and what a spare is worth.

    ``spare_values`` holds the worth in FLOP of the first, second, … slot that is left unassigned on purpose
    (not increasing); empty turns spares off. ``price_per_gpu_hour`` (currency) counts only together with
    ``flop_value`` (FLOP per currency unit).
    """

    gpus: int
    gpus_per_node: int = 8
    mtbf_gpu_hours: float = 12000.0
    price_per_gpu_hour: float = 0.0
    flop_value: float = 0.0
    spare_values: tuple[float, ...] = ()

    @property
    def running_seconds(self) -> float:
        """D_running = MTBF·3600/n: mean seconds until the next failure anywhere in the cluster."""
        return self.mtbf_gpu_hours * 3600 / self.gpus

    def resized(self, gpus: int) -> Cluster:
        """The same cluster with another number of slots."""
        return replace(self, gpus=gpus)


class Trigger(StrEnum):
    """Why a plan is made."""

    WORKER_LOST = "worker_lost"  #: jobs in ``faulted`` lost workers; ``slots`` of them are gone (0: restart in place)
    NODE_LOST = "node_lost"
    NODE_JOINED = "node_joined"  #: or was repaired
    JOB_SUBMITTED = "job_submitted"
    JOB_ENDED = "job_ended"  #: finished, failed or cancelled
    CHECKPOINT_PUBLISHED = "checkpoint_published"
    BACKLOG_CHANGED = "backlog_changed"
    PRICE_CHANGED = "price_changed"
    TIMER = "timer"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterEvent:
    """One thing that can happen next, as far as the plan depends on it.

    ``slots`` is the change of the number of slots (negative: lost); ``faulted`` names the jobs that lost a
    worker; ``ended`` names a job that leaves, ``submitted`` is one that arrives.
    """

    trigger: Trigger
    slots: int = 0
    faulted: frozenset[str] = frozenset()
    ended: str | None = None
    submitted: Job | None = None

    def apply(self, cluster: Cluster, jobs: tuple[Job, ...]) -> tuple[Cluster, tuple[Job, ...]]:
        """Cluster and jobs after the event; job order is kept, a new job comes last.

        Raises:
            ValueError: no slot would be left, or a named job is not there.
        """
        names = {job.name for job in jobs}
        unknown = (self.faulted | ({self.ended} if self.ended else set())) - names
        if unknown:
            raise ValueError(f"the event names jobs that are not there: {sorted(unknown)}")
        gpus = cluster.gpus + self.slots
        if gpus <= 0:
            raise ValueError(f"no slot is left after losing {-self.slots} of {cluster.gpus}")
        after = tuple(job.with_fault() if job.name in self.faulted else job for job in jobs if job.name != self.ended)
        if self.submitted is not None:
            if self.submitted.name in names:
                raise ValueError(f"the submitted job {self.submitted.name!r} is already there")
            after += (self.submitted,)
        return (cluster.resized(gpus) if self.slots else cluster), after


@dataclass(frozen=True, slots=True)
class Plan:
    """Slots per job: every job has an entry, 0 means that it waits. ``objective`` is in FLOP."""

    assignments: Mapping[str, int]
    unassigned: int
    objective: float

    @property
    def slots(self) -> int:
        """Slots assigned in all."""
        return sum(self.assignments.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPrice:
    """One job's share of a plan's objective: ``worth − transition_cost − slot_cost`` (FLOP)."""

    name: str
    old: int
    new: int
    waf: float
    """F(t, x') in FLOP/s."""
    worth: float
    """F(t, x')·D_running."""
    transition_cost: float
    """[x' ≠ x or faulted]·F(t, x)·transition_seconds."""
    slot_cost: float
    """x'·price·D_running/3600·flop_value."""
    layout: Layout | None = None

    @property
    def value(self) -> float:
        """The job's term of the objective."""
        return self.worth - self.transition_cost - self.slot_cost


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was not chosen and how many FLOP it would have cost against the chosen one (not negative)."""

    label: str
    plan: Plan
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A plan with its reason in words and its costs; what the event log records of it."""

    plan: Plan
    reason: str
    prices: tuple[JobPrice, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    trigger: Trigger | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def changes(self) -> dict[str, tuple[int, int]]:
        """``{job: (old, new)}`` of the jobs whose count changes."""
        return {price.name: (price.old, price.new) for price in self.prices if price.old != price.new}

    def to_json(self) -> dict[str, Any]:
        """What an event's details hold."""
        return {
            "assignments": dict(self.plan.assignments),
            "unassigned": self.plan.unassigned,
            "objective": self.plan.objective,
            "reason": self.reason,
            "alternatives": [
                {"label": other.label, "assignments": dict(other.plan.assignments), "cost": other.cost}
                for other in self.alternatives
            ],
        }
