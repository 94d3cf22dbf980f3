"""Megatron with a person: fixed sizes; every failure is a restart of all from the last checkpoint."""

from __future__ import annotations

from planner.simulation.jobs import RunningJob
from planner.simulation.parameters import Parameters
from planner.simulation.policies.base import PartitionedPolicy, Strike


class MegatronRestart(PartitionedPolicy):
    """Sizes are the optimal ones of the healthy cluster; a lost node is waited for, or a free one taken."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.stall_share = parameters.manual_restart.stall_share
        self.size: dict[str, int] = {}

    def detect_seconds(self, strike: Strike) -> float:
        """The collective's time-out."""
        return self.parameters.detection.collective_timeout

    def arrived(self) -> None:
        """Give every job its size where nodes are free; a size is never changed."""
        counts = self.plan(self.sim.world.cluster.nodes - len(self.partition))
        for other in self.sim.jobs:
            if other.live and not other.nodes:
                self.size[other.name] = counts[other.name]
        self._start_waiting()

    def struck(self, strike: Strike) -> None:
        """Roll back; restart at once if all nodes are there or can be replaced."""
        job = strike.job
        self.sim.roll_back(job)
        self._restart(job)

    def joined(self, nodes: list[int]) -> None:
        """Whoever waits may go on."""
        self._start_waiting()

    def ended(self, job: RunningJob) -> None:
        """Its nodes are free for who waits."""
        self._start_waiting()

    def lost_idle(self, nodes: list[int]) -> None:
        """A node of the partition, or a spare."""
        super().lost_idle(nodes)

    def _start_waiting(self) -> None:
        for job in self.sim.jobs:
            if job.live and job.stage == "waiting" and self.size.get(job.name):
                self._restart(job)

    def _restart(self, job: RunningJob) -> None:
        size = self.size[job.name]
        self.take(job, size)
        if len(job.nodes) < size:
            self.sim.stop(job, "waiting")
            return
        given = self.parameters.manual_restart
        stages = [("reallocate", given.resubmit), ("start", given.setup)]
        self.sim.follow(job, stages, lambda: self.sim.go(job, job.nodes, job.spec.rate(size)))
