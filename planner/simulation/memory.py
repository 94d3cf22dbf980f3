"""Plans made before, by the whole state that they depend on: months of simulated events meet few different states."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ceilings import Ceilings
from planner.event_table import EventTable
from planner.solver import decide
from planner.types import Cluster, Decision, Job


class PlanMemory(EventTable):
    """An event table that foresees everything: what it has not got is planned by :func:`planner.solver.decide`.

    It stands where the service's table of next events stands, so the decision is the one that production makes.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(Cluster(gpus=1), (), None, {}, {})

    def decide(self, cluster: Cluster, jobs: Sequence[Job], most: Ceilings = ()) -> Decision:
        """The decision for a state."""
        state = (cluster, tuple(jobs), most)
        found = self.by_state.get(state)
        if found is None:
            found = self.by_state[state] = decide(cluster, jobs, most=most)
        return found

    def answer_for_state(self, cluster: Cluster, jobs: Sequence[Job], most: Ceilings = ()) -> Decision | None:
        """The decision for a state; never None."""
        return self.decide(cluster, jobs, most)
