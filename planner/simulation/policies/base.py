"""What a policy is: told what happened, it acts through the verbs of :class:`planner.simulation.cluster.Simulation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from planner.severity import TABLE, Method
from planner.simulation.failures import Failure
from planner.simulation.jobs import RunningJob
from planner.simulation.parameters import Parameters
from planner.types import Cluster

if TYPE_CHECKING:
    from planner.simulation.cluster import Simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """A failure as it hits one job."""

    job: RunningJob
    failure: Failure
    nodes: tuple[int, ...]


class Policy:
    """The base: nothing is shared with evaluation but a fixed partition, and every failure is seen by its tier."""

    stall_share: float = 0.0
    """Share of running time that saving takes."""
    heeds_notice = False
    """Whether an announced preemption is acted upon before it happens."""
    watches_stragglers = False
    """Whether a slow node is isolated."""
    shares = False
    """Whether evaluation runs on whatever is spare, rather than in a partition."""
    sim: Simulation

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.partition: list[int] = []

    def attach(self, sim: Simulation) -> None:
        """Called once, before the run."""
        self.sim = sim

    # ------------------------------------------------------------ what happens

    def detect_seconds(self, strike: Strike) -> float:
        """Seconds until the failure is seen: the four tiers of the severity table."""
        given = self.parameters.detection
        method = TABLE[strike.failure.cause].method
        if method is Method.ONLINE_STATISTICS:
            return given.statistics_steps * strike.job.spec.seconds_of_step(len(strike.job.active))
        return {
            Method.NODE_HEALTH: given.node_health,
            Method.PROCESS_SUPERVISION: given.process_supervision,
            Method.EXCEPTION_PROPAGATION: given.exception_propagation,
        }[method]

    def arrived(self) -> None:
        """Jobs were submitted."""
        raise NotImplementedError

    def struck(self, strike: Strike) -> None:
        """A failure was detected; nodes of a permanent one are down already."""
        raise NotImplementedError

    def repaired(self, nodes: list[int]) -> None:
        """Nodes are back."""
        raise NotImplementedError

    def ended(self, job: RunningJob) -> None:
        """A job is done and holds nothing any more."""
        raise NotImplementedError

    def lost_idle(self, nodes: list[int]) -> None:
        """Nodes that no job held went down."""

    def published(self) -> None:
        """A checkpoint waits for its report."""

    def evaluation_changed(self) -> None:
        """A report's inference is done."""


class PartitionedPolicy(Policy):
    """Evaluation has the last nodes for itself, where there is any; training shares out the others."""

    def attach(self, sim: Simulation) -> None:
        """Set the partition up."""
        super().attach(sim)
        world = sim.world
        if world.evaluates:
            nodes = world.cluster.nodes
            asked = world.demand.spec.partition_nodes if world.demand else None
            # As many nodes as are busy for ``partition_load`` of the time.
            count = asked or ceil(nodes * world.evaluation_share / self.parameters.evaluation.partition_load)
            self.partition = list(range(nodes - min(count, nodes - 1), nodes))
            self._serve(len(self.partition))

    def _serve(self, change: int) -> None:
        self.sim.evaluation.change_slots(change * self.sim.world.cluster.gpus_per_node, loaded=True)

    def free_nodes(self) -> list[int]:
        """Free nodes that training may have."""
        reserved = set(self.partition)
        return [node for node in self.sim.free_nodes() if node not in reserved]

    def usable(self) -> int:
        """Nodes that are up and training's."""
        return sum(self.sim.up) - sum(self.sim.up[node] for node in self.partition)

    def lost_idle(self, nodes: list[int]) -> None:
        """The partition may have shrunk."""
        lost = len(set(nodes) & set(self.partition))
        if lost:
            self._serve(-lost)

    def repaired(self, nodes: list[int]) -> None:
        """Partition's nodes serve again, training's are planned."""
        back = set(nodes) & set(self.partition)
        if back:
            self._serve(len(back))
        if set(nodes) - back:
            self.joined([node for node in nodes if node not in back])

    def joined(self, nodes: list[int]) -> None:
        """Training nodes are back."""
        raise NotImplementedError

    def plan(self, nodes: int, faulted: str = "", transition_seconds: float = 0.0) -> Mapping[str, int]:
        """The optimal counts (in nodes) for the live jobs, by the production solver."""
        jobs = [
            job.spec.to_job(len(job.nodes), job.name == faulted, transition_seconds)
            for job in self.sim.jobs
            if job.live
        ]
        if nodes <= 0:
            return {job.name: 0 for job in jobs}
        world = self.sim.world
        unit_hours = world.mtbf_gpu_hours / world.cluster.gpus_per_node
        return world.memory.decide(
            Cluster(gpus=nodes, gpus_per_node=1, mtbf_gpu_hours=unit_hours), jobs
        ).plan.assignments

    def take(self, job: RunningJob, count: int) -> None:
        """The job keeps what it has up to ``count`` nodes and takes free ones for the rest."""
        keep = [node for node in job.nodes if self.sim.up[node]][:count]
        self.sim.assign(job, keep)
        self.sim.assign(job, [*keep, *self.free_nodes()[: count - len(keep)]])
