"""The cost-aware decision as the allocator's loop runs it: with the table of next events built in the background.

The decision itself stays pure (:mod:`planner.cost_aware`); here is what it takes to have the answer before the event:
the counts before a fault, and a thread that plans every next event while nothing happens.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from planner.allocation import Allocation, ClusterView, allocate
from planner.arrivals import Arrivals
from planner.cost_aware import (
    EVALUATION,
    CostAware,
    CostSettings,
    cluster_of,
    held_slots,
    node_capacities,
    training_jobs,
    typical_rate,
)
from planner.errors import one_line
from planner.event_table import EventTable, build
from planner.types import Cluster, Decision, Job

log = logging.getLogger(__name__)

MOST_JOBS = 256
"""With more jobs no table is built: planning one event takes less time than keeping so many up to date."""


class Foresight:
    """``decide(view, now)`` for :class:`planner.service.Allocator`."""

    def __init__(self, settings: CostSettings | None = None) -> None:
        self._planner = CostAware(settings or CostSettings())
        self._before: dict[str, int] = {}
        self._arrivals = Arrivals()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="next-events")
        self._building: Future[EventTable] | None = None
        self._seen: tuple[Cluster, tuple[Job, ...], tuple[int, ...], Job | None] | None = None

    def __call__(self, view: ClusterView, now: float) -> Allocation:
        """Decide, and see to it that the next events are being planned."""
        slots = 0

        def planner(seen: ClusterView, count: int) -> Decision:
            nonlocal slots
            slots = count
            return self._planner(seen, count, now, self._before)

        self._collect()
        allocation = allocate(view, now, planner)
        self._look_ahead(view, slots)
        return allocation

    def use(self, settings: CostSettings) -> None:
        """Decide by other settings from now on."""
        self._planner = replace(self._planner, settings=settings)

    @property
    def table(self) -> EventTable | None:
        """The newest complete table."""
        self._collect()
        return self._planner.table

    def close(self) -> None:
        """End the thread; a table under way is finished first."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _collect(self) -> None:
        if self._building is None or not self._building.done():
            return
        done, self._building = self._building, None
        failure = done.exception()
        if failure is not None:
            # Without a table every event is planned when it comes: slower, never wrong.
            log.error("action=next_events.failed reason=%s: %s", type(failure).__name__, one_line(failure))
        self._planner = replace(self._planner, table=None if failure else done.result())

    def _look_ahead(self, view: ClusterView, slots: int) -> None:
        held = held_slots(view)
        faulted = {demand.holder for demand in view.demands if demand.faulted}
        self._before = {
            demand.holder: self._before.get(demand.holder, 0)
            if demand.holder in faulted
            else held.get(demand.holder, 0)
            for demand in view.demands
        }
        self._arrivals.note((demand for demand in view.demands if demand.kind != EVALUATION), held)
        if slots <= 0 or faulted or self._building is not None:
            return  # while something is being healed, what comes next is not the next event of this state
        jobs = training_jobs(view, held, {})
        nodes = node_capacities(view)
        likeliest = self._arrivals.likeliest(typical_rate(view.demands))
        cluster = cluster_of(slots, jobs, self._planner.settings)
        state = (cluster, jobs, nodes, likeliest)
        if state != self._seen and 0 < len(jobs) <= MOST_JOBS:
            self._seen = state
            self._building = self._thread.submit(build, cluster, jobs, _shared_nodes(view), likeliest, nodes)


def _shared_nodes(view: ClusterView) -> list[frozenset[str]]:
    """Sets of training jobs that one node carries, where there are several."""
    by_node: dict[str, set[str]] = {}
    for lease in view.leases:
        if not lease.holder.startswith(f"{EVALUATION}:"):
            by_node.setdefault(lease.node, set()).add(lease.holder)
    known = {demand.holder for demand in view.demands if demand.kind != EVALUATION}
    return sorted({frozenset(names & known) for names in by_node.values() if len(names & known) > 1}, key=sorted)
