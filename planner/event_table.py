"""The plan of every next event, ready before the event (Unicron's look-up table).

For one cluster state: each running job losing a worker in place, a slot or a node, a node joining, an idle node
leaving, nodes leaving that several jobs share, each job ending, and the likeliest new job. D_running depends on
the number of slots, so there is one set of prefix and suffix tables (:mod:`planner.splice`) for each number of
slots that an event leads to, and an event is one splice into it, not a solution from scratch.

Nobody knows what the next new job will be called, and a name is the last word in a tie. So the newcomer is planned
twice, as the first and as the last of all names. If both give the same plan, every name does: its count is the
smallest of all tied plans (it came first), and the others' counts are the smallest list of all (it came last), so
that the plan is the smallest list with the newcomer at any place. Else this newcomer is not foreseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.ceilings import Ceilings, ceilings, changed
from planner.objective import options
from planner.program import Program, Solution
from planner.solver import describe, entries, solve
from planner.splice import Spliced
from planner.types import Cluster, ClusterEvent, Decision, Job, Trigger

MOST_SIZES = 4
"""Sizes of nodes whose loss and joining are foreseen: each is a cluster size, with tables of its own."""

FIRST, LAST = "", chr(0x10FFFF)
"""Names that sort before and after every job's."""

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
    decisions: dict[tuple[Key, Ceilings], Decision]
    by_state: dict[tuple[Cluster, tuple[Job, ...], Ceilings], Decision]
    arrivals: dict[Ceilings, Mapping[str, int]] = field(default_factory=dict)
    """Counts when the candidate arrives under whatever name; its own count is that of ``FIRST``."""

    def answer(
        self, cluster: Cluster, jobs: Sequence[Job], event: ClusterEvent, most: Ceilings = ()
    ) -> Decision | None:
        """The decision for ``event``, or None if it was not foreseen or the state is not the table's any more.

        ``most``: what whole groups can use of the nodes that the event leaves.
        """
        if cluster != self.cluster or tuple(jobs) != self.jobs:
            return None
        if event.submitted is not None and event.submitted != self.candidate:
            return None
        return self.decisions.get((_key(event), most))

    def answer_for_state(self, cluster: Cluster, jobs: Sequence[Job], most: Ceilings = ()) -> Decision | None:
        """The decision for what the cluster has become, if a foreseen event leads there."""
        return self.by_state.get((cluster, tuple(jobs), most)) or self._arrival(cluster, tuple(jobs), most)

    def _arrival(self, cluster: Cluster, jobs: tuple[Job, ...], most: Ceilings) -> Decision | None:
        """The decision if all that changed is that a job like the candidate came, whatever its name and place."""
        counts = self.arrivals.get(most)
        if self.candidate is None or counts is None or cluster != self.cluster or len(jobs) != len(self.jobs) + 1:
            return None
        known = {job.name for job in self.jobs}
        place = next(place for place, job in enumerate(jobs) if job.name not in known)
        new = jobs[place]
        if jobs[:place] + jobs[place + 1 :] != self.jobs or replace(new, name=self.candidate.name) != self.candidate:
            return None
        return describe(cluster, jobs, Solution({**counts, new.name: counts[FIRST]}, 0.0))

    def __len__(self) -> int:
        return len(self.decisions)


def foreseen(
    cluster: Cluster,
    jobs: Sequence[Job],
    holders: Iterable[frozenset[str]] = (),
    candidate: Job | None = None,
    sizes: Sequence[int] = (),
) -> Iterator[ClusterEvent]:
    """The events of the table; those that would leave no slot are left out, none comes twice.

    ``holders`` are the sets of jobs that a single node carries; sets of one job are foreseen anyway. ``sizes`` are
    the numbers of slots that a node may take along or bring; the cluster's slots per node, if empty.
    """
    nodes = sizes or (cluster.gpus_per_node,)
    sets = (frozenset(), *holders)
    events = [
        ClusterEvent(trigger=Trigger.TIMER),
        *(ClusterEvent(trigger=Trigger.NODE_JOINED, slots=size) for size in nodes),
        *(ClusterEvent(trigger=Trigger.NODE_LOST, slots=-size, faulted=names) for names in sets for size in nodes),
    ]
    for job in jobs:
        if job.workers > 0:
            struck = frozenset({job.name})
            events += [
                ClusterEvent(trigger=Trigger.WORKER_LOST, faulted=struck),
                ClusterEvent(trigger=Trigger.WORKER_LOST, slots=-1, faulted=struck),
                *(ClusterEvent(trigger=Trigger.NODE_LOST, slots=-size, faulted=struck) for size in nodes),
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
    cluster: Cluster,
    jobs: Sequence[Job],
    holders: Iterable[frozenset[str]] = (),
    candidate: Job | None = None,
    capacities: Sequence[int] = (),
) -> EventTable:
    """The table of a cluster state. Pure, and meant for a background thread: nothing is shared with the caller.

    ``capacities`` are the usable slots of each node: with them an event is foreseen for every kind of node that it
    may strike, and jobs with groups get no more than whole groups can use of the nodes that are left.
    """
    jobs = tuple(jobs)
    table = EventTable(cluster, jobs, candidate, {}, {})
    makers: dict[tuple[int, Ceilings], Spliced] = {}
    sizes = [size for size, _ in Counter(size for size in capacities if size).most_common(MOST_SIZES)]
    for event in sorted(foreseen(cluster, jobs, holders, candidate, sizes), key=lambda event: event.slots):
        if any(slots != event.slots for slots, _ in makers):
            makers.clear()  # the tables of one cluster size at a time: they are large
        after, then = event.apply(cluster, jobs)
        before = then if event.submitted else jobs
        for nodes in changed(capacities, event.slots):
            bounds = ceilings(nodes, (job.group for job in before))
            most = ceilings(nodes, (job.group for job in then))
            if (_key(event), most) in table.decisions:
                continue
            if most and most != bounds:  # the only job of a group's size has ended
                found = Solution((plan := solve(after, then, most)).assignments, plan.objective)
            else:
                maker = (event.slots, most)
                if maker not in makers:
                    makers[maker] = _tables(after, jobs, candidate if event.slots == 0 else None, most)
                found = _solution(makers[maker], after, then, event, most)
                if event.submitted is not None:
                    table.arrivals.update(_under_any_name(makers[maker], after, event.submitted, most))
            decision = describe(after, then, found, event.trigger)
            table.decisions[_key(event), most] = decision
            table.by_state.setdefault((after, then, most), decision)
    return table


def _tables(cluster: Cluster, jobs: Sequence[Job], candidate: Job | None, most: Ceilings) -> Spliced:
    groups = dict(most)
    expected = candidate is not None and (not groups or candidate.group in groups)
    room_for = [options(candidate, cluster)] if candidate is not None and expected else []
    return Spliced(Program(entries(cluster, jobs), cluster.gpus, room_for, dict(most) or None))


def _under_any_name(
    tables: Spliced, cluster: Cluster, newcomer: Job, most: Ceilings
) -> dict[Ceilings, Mapping[str, int]]:
    """The counts if ``newcomer`` comes, where they are the same whatever it is called."""
    first, last = (dict(tables.added(options(replace(newcomer, name=name), cluster)).counts) for name in (FIRST, LAST))
    last[FIRST] = last.pop(LAST)
    return {most: first} if first == last else {}


def _solution(tables: Spliced, cluster: Cluster, jobs: Sequence[Job], event: ClusterEvent, most: Ceilings) -> Solution:
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
    plan = solve(cluster, jobs, most)
    return Solution(plan.assignments, plan.objective)
