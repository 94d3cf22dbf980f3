"""Systems that go on with what is left of their own nodes: Oobleck, Varuna, Bamboo, ReCycle, by named parameters.

Sizes are the optimal ones of the healthy cluster; a job takes a free node where there is one and its own repaired
nodes back. What they cost in health and in recovery stands in the parameter file.
"""

from __future__ import annotations

from planner.simulation.jobs import RunningJob
from planner.simulation.parameters import Parameters
from planner.simulation.policies.base import PartitionedPolicy, Strike

Stages = list[tuple[str, float]]


class Elastic(PartitionedPolicy):
    """The common part; subclasses give costs."""

    healthy = 1.0
    detect = 0.0
    loses_progress = False
    """Whether a failure rolls the job back to its last checkpoint."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.size: dict[str, int] = {}

    def detect_seconds(self, strike: Strike) -> float:
        """The system's own detection."""
        return self.detect

    def recovery(self, job: RunningJob, lost: bool) -> Stages:
        """Stages after a failure; ``lost``: with fewer nodes."""
        raise NotImplementedError

    def growth(self, job: RunningJob) -> Stages:
        """Stages when a node joins."""
        return self.recovery(job, True)

    def rate(self, job: RunningJob) -> float:
        """Weighted FLOP/s on the nodes that it has."""
        return self.healthy * job.spec.interpolated(len(job.nodes))

    def arrived(self) -> None:
        """Sizes as planned for the healthy cluster."""
        counts = self.plan(self.sim.world.cluster.nodes - len(self.partition))
        for other in self.sim.jobs:
            if other.live and not other.nodes:
                self.size[other.name] = counts[other.name]
        self._fill()

    def ended(self, job: RunningJob) -> None:
        """Its nodes are free."""
        self._fill()

    def joined(self, nodes: list[int]) -> None:
        """To whoever lacks most."""
        self._fill()

    def struck(self, strike: Strike) -> None:
        """Go on with what is left."""
        job = strike.job
        if self.loses_progress:
            self.sim.roll_back(job)
        before = len(job.nodes)
        self.take(job, before)
        self._go(job, self.recovery(job, strike.failure.permanent))

    def _fill(self) -> None:
        """Free nodes go to the job that lacks the largest share of its size, one by one."""
        grown: dict[str, RunningJob] = {}
        while self.free_nodes():
            short = [job for job in self.sim.jobs if job.live and len(job.nodes) < self.size.get(job.name, 0)]
            if not short:
                break
            job = min(short, key=lambda job: len(job.nodes) / self.size[job.name])
            self.take(job, len(job.nodes) + 1)
            grown[job.name] = job
        for job in grown.values():
            self._go(job, self.growth(job))

    def _go(self, job: RunningJob, stages: Stages) -> None:
        if self.rate(job) <= 0:
            self.sim.stop(job, "waiting")
        else:
            self.sim.follow(job, stages, lambda: self.sim.go(job, job.nodes, self.rate(job)))


class Oobleck(Elastic):
    """Pipeline templates: reconfigures to the template for what is left."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        given = parameters.oobleck
        self.healthy, self.detect = given.healthy, given.detect
        self.points = [(8, given.reconfigure_8), (16, given.reconfigure_16), (32, given.reconfigure_32),
                       (64, given.reconfigure_64)]  # fmt: skip

    def recovery(self, job: RunningJob, lost: bool) -> Stages:
        """By the number of GPUs, between the published points; in proportion beyond them."""
        return [("reallocate", self._seconds(len(job.nodes) * self.sim.world.cluster.gpus_per_node))]

    def _seconds(self, gpus: int) -> float:
        count, seconds = self.points[-1]
        if gpus >= count:
            return seconds * gpus / count
        for (low, first), (high, second) in zip(self.points, self.points[1:], strict=False):
            if gpus <= high:
                return first + (second - first) * max(0, gpus - low) / (high - low)
        return seconds


class Varuna(Elastic):
    """Job morphing: all processes start again from the last checkpoint in a new shape."""

    loses_progress = True

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.healthy, self.detect = parameters.varuna.healthy, parameters.varuna.detect
        self.stall_share = parameters.manual_restart.stall_share

    def recovery(self, job: RunningJob, lost: bool) -> Stages:
        """A restart of all."""
        return [("start", self.parameters.varuna.restart)]


class Bamboo(Elastic):
    """Redundant computation: the next stage takes over, slower, until the pipeline is whole again."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.healthy, self.detect = parameters.bamboo.healthy, parameters.bamboo.detect

    def recovery(self, job: RunningJob, lost: bool) -> Stages:
        """A local rendezvous."""
        return [("reallocate", self.parameters.bamboo.local)]

    def growth(self, job: RunningJob) -> Stages:
        """A rendezvous of all."""
        return [("reallocate", self.parameters.bamboo.rendezvous)]

    def rate(self, job: RunningJob) -> float:
        """A pipeline with a shadowed stage slows every step, since all replicas wait for it."""
        size = self.size.get(job.name, len(job.nodes))
        whole = self.healthy * job.spec.interpolated(len(job.nodes))
        if len(job.nodes) >= size:
            return whole
        shadowed = self.healthy * job.spec.interpolated(size) / self.parameters.bamboo.degraded_step
        return min(whole, shadowed) if whole > 0 else 0.0


class Recycle(Elastic):
    """Micro-batches of the lost rank go to its data-parallel peers."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.healthy, self.detect = parameters.recycle.healthy, parameters.recycle.detect

    def recovery(self, job: RunningJob, lost: bool) -> Stages:
        """Plan and reroute."""
        return [("reallocate", self.parameters.recycle.reroute)]

    def growth(self, job: RunningJob) -> Stages:
        """The repaired node's processes start while the others wait."""
        return [("start", self.parameters.recycle.rejoin)]
