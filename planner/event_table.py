"""The plan of every next event, ready before the event (Unicron's look-up table).

For one cluster state: each running job losing a worker in place, a slot or a node, a node joining, an idle node
leaving, nodes leaving that several jobs share, each job ending, and the likeliest new job. D_running depends on
the number of slots, so there is one set of prefix and suffix tables (:mod:`planner.splice`) for each number of
slots that an event leads to, and an event is one splice into it, not a solution from scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from planner.objective import options, spare_options
from planner.program import Program, Solution
from planner.solver import describe, solve
from planner.splice import Spliced
from planner.types import Cluster, ClusterEvent, Decision, Job, Trigger

Key = tuple[int, frozenset[str], str | None, str | None]


def _key(event: ClusterEvent) -> Key:
    submitted = event.submitted.name if event.submitted else None
    return event.slots, event.faulted, event.ended, submitted


@dataclass(frozen=True, slots=True)
class EventTable:
    """Decisions by event, for exactly one state of the cluster."""

    cluster: Cluster
    jobs: tuple[Job, ...]
    candidate: Job | None
    decisions: dict[Key, Decision]
    by_state: dict[tuple[Cluster, tuple[Job, ...]], Decision]

    def answer(self, cluster: Cluster, jobs: Sequence[Job], event: ClusterEvent) -> Decision | None:
        """The decision for ``event``, or None if it was not foreseen or the state is not the table's any more."""
        if cluster != self.cluster or tuple(jobs) != self.jobs:
            return None
        if event.submitted is not None and event.submitted != self.candidate:
            return None
        return self.decisions.get(_key(event))

    def answer_for_state(self, cluster: Cluster, jobs: Sequence[Job]) -> Decision | None:
        """The decision for what the cluster has become, if a foreseen event leads there."""
        return self.by_state.get((cluster, tuple(jobs)))

    def __len__(self) -> int:
        return len(self.decisions)


def foreseen(
    cluster: Cluster, jobs: Sequence[Job], holders: Iterable[frozenset[str]] = (), candidate: Job | None = None
) -> Iterator[ClusterEvent]:
    """The events of the table; those that would leave no slot are left out, none comes twice.

    ``holders`` are the sets of jobs that a single node carries; sets of one job are foreseen anyway.
    """
    node = cluster.gpus_per_node
    shared = [ClusterEvent(trigger=Trigger.NODE_LOST, slots=-node, faulted=names) for names in holders]
    events = [
        ClusterEvent(trigger=Trigger.TIMER),
        ClusterEvent(trigger=Trigger.NODE_JOINED, slots=node),
        ClusterEvent(trigger=Trigger.NODE_LOST, slots=-node),
        *shared,
    ]
    for job in jobs:
        if job.workers > 0:
            struck = frozenset({job.name})
            events += [
                ClusterEvent(trigger=Trigger.WORKER_LOST, faulted=struck),
                ClusterEvent(trigger=Trigger.WORKER_LOST, slots=-1, faulted=struck),
                ClusterEvent(trigger=Trigger.NODE_LOST, slots=-node, faulted=struck),
            ]
        events.append(ClusterEvent(trigger=Trigger.JOB_ENDED, ended=job.name))
    if candidate is not None:
        events.append(ClusterEvent(trigger=Trigger.JOB_SUBMITTED, submitted=candidate))
    seen: set[Key] = set()
    for event in events:
        if cluster.gpus + event.slots > 0 and _key(event) not in seen:
            seen.add(_key(event))
            yield event


def build(
    cluster: Cluster, jobs: Sequence[Job], holders: Iterable[frozenset[str]] = (), candidate: Job | None = None
) -> EventTable:
    """The table of a cluster state. Pure, and meant for a background thread: nothing is shared with the caller."""
    state = tuple(jobs)
    by_size: dict[int, list[ClusterEvent]] = {}
    for event in foreseen(cluster, state, holders, candidate):
        by_size.setdefault(event.slots, []).append(event)
    decisions: dict[Key, Decision] = {}
    by_state: dict[tuple[Cluster, tuple[Job, ...]], Decision] = {}
    for change, events in by_size.items():
        after = cluster.resized(cluster.gpus + change)
        tables = _tables(after, state, candidate if change == 0 else None)
        for event in events:
            _, then = event.apply(cluster, state)
            decision = describe(after, then, _solution(tables, after, then, event), event.trigger)
            decisions[_key(event)] = decision
            by_state.setdefault((after, then), decision)
    return EventTable(cluster, state, candidate, decisions, by_state)


def _tables(cluster: Cluster, jobs: Sequence[Job], candidate: Job | None) -> Spliced:
    entries = [options(job, cluster) for job in jobs]
    spare = spare_options(cluster)
    if spare is not None:
        entries.append(spare)
    room_for = [options(candidate, cluster)] if candidate is not None else []
    return Spliced(Program(entries, cluster.gpus, room_for))


def _solution(tables: Spliced, cluster: Cluster, jobs: Sequence[Job], event: ClusterEvent) -> Solution:
    """The solution after ``event``, from the tables of the cluster that it leaves."""
    if event.submitted is not None:
        return tables.added(options(event.submitted, cluster))
    if event.ended is not None:
        return tables.dropped(event.ended)
    if not event.faulted:
        return tables.solve()
    if len(event.faulted) == 1:
        (struck,) = (job for job in jobs if job.name in event.faulted)
        return tables.replaced(options(struck, cluster))
    plan = solve(cluster, jobs)
    return Solution(plan.assignments, plan.objective)
