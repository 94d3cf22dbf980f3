"""Unicron as published: severity tiers, the cost-aware plan of all training jobs, transitions that stop the job."""

from __future__ import annotations

from planner.severity import Severity
from planner.simulation.jobs import RunningJob
from planner.simulation.parameters import Parameters
from planner.simulation.policies.base import PartitionedPolicy, Strike


class Unicron(PartitionedPolicy):
    """``one_at_a_time`` plans only the job that was struck and leaves the others as they are."""

    def __init__(self, parameters: Parameters, one_at_a_time: bool = False) -> None:
        super().__init__(parameters)
        self.given = parameters.unicron
        self.stall_share = self.given.stall_share
        self.one_at_a_time = one_at_a_time

    def arrived(self) -> None:
        """Plan with the new job."""
        self._replan()

    def ended(self, job: RunningJob) -> None:
        """Plan without it."""
        self._replan()

    def joined(self, nodes: list[int]) -> None:
        """Plan with the repaired nodes."""
        self._replan()

    def struck(self, strike: Strike) -> None:
        """SEV3: retry in place. SEV2: the process starts again. SEV1: the node is isolated, all are planned."""
        job, failure = strike.job, strike.failure
        given = self.given
        replicas = job.spec.replicas(len(job.active))
        if len(strike.nodes) >= replicas:
            self.sim.roll_back(job, given.snapshot_interval)
        elif failure.severity != Severity.SEV3:
            self.sim.settle(job)
            job.share_micro_batches(replicas)
        if failure.severity == Severity.SEV1:
            self._replan(job)
            return
        stages = [("decide", given.decide), ("reallocate", self._communicators(job))]
        if failure.severity == Severity.SEV2 or failure.luck >= self.parameters.failures.retry_success:
            stages += [("start", given.restart), ("load", given.load)]
        self._go(job, stages)

    def _communicators(self, job: RunningJob) -> float:
        return self.parameters.communicators.seconds(len(job.nodes) * self.sim.world.cluster.gpus_per_node)

    def _go(self, job: RunningJob, stages: list[tuple[str, float]]) -> None:
        self.sim.follow(job, stages, lambda: self.sim.go(job, job.nodes, job.spec.rate(len(job.nodes))))

    def _replan(self, faulted: RunningJob | None = None) -> None:
        """Everybody whose count changes, and who was struck, stops for the transition."""
        given = self.given
        before = {job.name: len(job.nodes) for job in self.sim.jobs}
        if self.one_at_a_time and faulted is not None:
            counts = dict(before)
            room = len([node for node in faulted.nodes if self.sim.up[node]]) + len(self.free_nodes())
            fitting = [count for count in faulted.spec.profile.counts if faulted.spec.min_nodes <= count <= room]
            counts[faulted.name] = max((c for c in fitting if c <= before[faulted.name]), default=0)
        else:
            transition = given.reconfigure + given.load
            counts = dict(self.plan(self.usable(), faulted.name if faulted else "", transition))
        changed = [
            job for job in self.sim.jobs if job.live and (counts[job.name] != before[job.name] or job is faulted)
        ]
        for job in sorted(changed, key=lambda job: counts[job.name] - before[job.name]):
            self.take(job, counts[job.name])
            if not job.nodes:
                self.sim.stop(job, "waiting")
            else:
                self._go(job, [("decide", given.decide), ("reallocate", self._communicators(job)),
                               ("start", given.reconfigure), ("load", given.load)])  # fmt: skip
