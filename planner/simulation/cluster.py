"""One run: jobs, nodes, failures and evaluation under one policy. The policy decides, this carries it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from planner.ettr import LOSSES
from planner.simulation.engine import Engine
from planner.simulation.evaluation import EvaluationService, Report
from planner.simulation.failures import Failure
from planner.simulation.jobs import ABSENT, RUNNING, RunningJob
from planner.simulation.memory import PlanMemory
from planner.simulation.parameters import Parameters
from planner.simulation.policies.base import Policy, Strike
from planner.simulation.scenario import ClusterSpec
from planner.simulation.workload import Demand, GivenReport, TrainingJob, Work
from planner.types import Cluster

Stages = Sequence[tuple[str, float]]
"""``(loss category, seconds)`` in order."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What all policies of a comparison share."""

    cluster: ClusterSpec
    jobs: tuple[TrainingJob, ...]
    failures: tuple[Failure, ...]
    horizon: float
    parameters: Parameters
    demand: Demand | None = None
    """Evaluation of the jobs' own checkpoints."""
    reports: tuple[GivenReport, ...] = ()
    """Evaluations that a trace asks for."""
    mtbf_gpu_hours: float = 12000.0
    """Mean GPU-hours between failures, as the operator of this cluster knows it."""
    memory: PlanMemory = field(default_factory=PlanMemory)
    """Plans made before; only saves time."""

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate."""
        return self.demand is not None or bool(self.reports)

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return self.cluster.nodes * self.cluster.gpus_per_node

    @property
    def evaluation_share(self) -> float:
        """Share of the GPU-seconds that evaluation needs."""
        share = self.demand.spec.load_share if self.demand else 0.0
        return share + sum(report.work.slot_seconds for report in self.reports) / (self.gpus * self.horizon)


@dataclass(kw_only=True)
class Outcome:
    """What came out of one run. Losses are in seconds of ``makespan`` and sum to it with the effective part."""

    accumulated_waf: float
    certain_waf: float
    """The same with evaluation counted: less what was done for runs that an awaited report is expected to stop."""
    useful_flop: float
    ettr: float
    makespan: float
    losses: dict[str, float]
    gpu_hours: float
    cost: float
    busy_gpu_hours: float
    latencies: list[float]
    pending: int
    series: list[tuple[float, float]]
    events: int


class Simulation:
    """The cluster under one policy."""

    def __init__(self, world: World, policy: Policy, samples: int = 0, work_of: Callable[[Work], Work] | None = None):
        self.world = world
        self.policy = policy
        self.engine = Engine()
        self.jobs = [RunningJob(spec) for spec in world.jobs]
        self.up = [True] * world.cluster.nodes
        self.owner: list[RunningJob | None] = [None] * world.cluster.nodes
        self.evaluation = EvaluationService(
            self.engine, world.parameters.evaluation.load, policy.evaluation_changed, self._report_out
        )
        for job in self.jobs:
            job.stop_probability = world.parameters.evaluation.stop_probability
        self._by_name = {job.name: job for job in self.jobs}
        self.samples = samples
        self.series: list[tuple[float, float]] = []
        self.busy_seconds = 0.0
        self._reports_left = len(world.reports)
        self._work_of = work_of or (lambda work: work)
        self._full: dict[frozenset[str], dict[str, float]] = {}
        policy.attach(self)

    # ---------------------------------------------------------------- the run

    @property
    def now(self) -> float:
        """Simulated seconds."""
        return self.engine.now

    def run(self) -> Outcome:
        """From the start to the horizon, or until every job has ended and every report is out."""
        arrivals: dict[float, list[RunningJob]] = {}
        for job in self.jobs:
            arrivals.setdefault(job.spec.submit, []).append(job)
        for time, jobs in sorted(arrivals.items()):
            self.engine.at(time, lambda jobs=jobs: self._arrive(jobs))  # type: ignore[misc]
        for failure in self.world.failures:
            early = failure.notice_seconds if self.policy.heeds_notice else 0.0
            self.engine.at(failure.time - early, lambda f=failure: self._fail(f))  # type: ignore[misc]
        for report in self.world.reports:
            self.engine.at(report.time, lambda report=report: self._publish_given(report))  # type: ignore[misc]
        for index in range(1, self.samples + 1):
            self.engine.at(self.world.horizon * index / self.samples, self._sample)
        self.engine.run(self.world.horizon, self._done)
        for job in self.jobs:
            self.settle(job)
        self.evaluation.settle()
        return self._outcome()

    def _done(self) -> bool:
        ended = all(job.ended is not None for job in self.jobs)
        return ended and self._reports_left == 0 and self.evaluation.pending == 0

    def _arrive(self, jobs: list[RunningJob]) -> None:
        for job in jobs:
            job.since = self.now
            job.stage = "waiting"
        self._live_changed()
        self.policy.arrived()

    def _sample(self) -> None:
        for job in self.jobs:
            self.settle(job)
        self.series.append((self.now, sum(job.account.useful for job in self.jobs)))

    def settle(self, job: RunningJob) -> None:
        """Account for a job's time until now."""
        if job.stage == RUNNING:
            self.busy_seconds += len(job.active) * (self.now - job.since)
        job.settle(self.now)

    def _live_changed(self) -> None:
        """Full sizes are those of the plan for the undamaged cluster and the jobs that are there."""
        for job in self.jobs:
            self.settle(job)
        live = frozenset(job.name for job in self.jobs if job.live)
        if live not in self._full:
            nodes = self.world.cluster.nodes
            jobs = tuple(job.spec.to_job() for job in self.jobs if job.live)
            plan = self.world.memory.decide(Cluster(gpus=nodes, gpus_per_node=1), jobs).plan if jobs else None
            self._full[live] = {
                job.name: job.spec.rate(plan.assignments[job.name]) for job in self.jobs if job.live and plan
            }
        for job in self.jobs:
            job.full = self._full[live].get(job.name, 0.0)

    # ---------------------------------------------------------------- what policies may do

    def assign(self, job: RunningJob, nodes: Iterable[int]) -> None:
        """Give a job exactly these nodes."""
        for node in job.nodes:
            self.owner[node] = None
        job.nodes = sorted(nodes)
        for node in job.nodes:
            if self.owner[node] is not None:
                raise RuntimeError(f"node {node} is given to {job.name} twice, or while another job holds it")
            self.owner[node] = job

    def free_nodes(self) -> list[int]:
        """Nodes that are up and belong to no job."""
        return [node for node, up in enumerate(self.up) if up and self.owner[node] is None]

    def stop(self, job: RunningJob, stage: str) -> None:
        """The job stands still in a stage."""
        self.settle(job)
        job.stage = stage
        job.version += 1

    def follow(self, job: RunningJob, stages: Stages, then: Callable[[], None]) -> None:
        """The job goes through stages, then ``then`` (unless something else happened to it)."""
        remaining = [(stage, seconds) for stage, seconds in stages if seconds > 0]
        if not remaining:
            self.stop(job, "other")
            self._resume(job, then)
            return
        self.stop(job, remaining[0][0])
        version = job.version
        rest = remaining[1:]

        def next_stage() -> None:
            if job.version == version:
                if rest:
                    self.follow(job, rest, then)
                else:
                    self._resume(job, then)

        self.engine.after(remaining[0][1], next_stage)

    def _resume(self, job: RunningJob, then: Callable[[], None]) -> None:
        """A failure that nobody has seen yet keeps the job from running: it hangs until that is detected."""
        if job.undetected:
            self.stop(job, "detect")
        else:
            then()

    def go(self, job: RunningJob, active: Sequence[int], rate: float) -> None:
        """The job trains on ``active`` at ``rate``, or waits if that is 0."""
        self.settle(job)
        job.active = list(active)
        job.rate = rate
        job.stall_share = self.policy.stall_share
        job.stage = RUNNING if rate > 0 else "waiting"
        job.version += 1
        if rate > 0:
            self._schedule(job)

    def at_version(self, job: RunningJob, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``seconds`` unless the job's stage changed until then."""
        version = job.version
        self.engine.after(seconds, lambda: action() if job.version == version else None)

    def roll_back(self, job: RunningJob, snapshot_interval: float | None = None) -> None:
        """Give up the work since the last durable (or snapshotted) state."""
        self.settle(job)
        job.roll_back(snapshot_interval)

    # ---------------------------------------------------------------- progress

    def _schedule(self, job: RunningJob) -> None:
        speed = job.speed * job.kept_share
        if self.world.demand is not None:
            self.at_version(job, job.seconds_to_checkpoint(), lambda: self._publish(job))
        if job.spec.flop is not None:
            self.at_version(job, max(0.0, job.spec.flop - job.useful_flop) * job.spec.weight / speed,
                            lambda: self._finish(job))  # fmt: skip

    def _publish(self, job: RunningJob) -> None:
        self.settle(job)
        demand = self.world.demand
        index = round(job.run_clock / job.spec.checkpoint_interval)
        self.at_version(job, job.seconds_to_checkpoint(), lambda: self._publish(job))
        if demand is not None and index % demand.spec.every_checkpoints == 0:
            work = self._work_of(demand.work(job.spec, index))
            job.unread += 1
            self.evaluation.publish(Report(job.name, index, work, self.now, work.slot_seconds))
            self.policy.published()

    def _report_out(self, report: Report) -> None:
        if (job := self._by_name.get(report.job)) is not None and job.unread:
            self.settle(job)
            job.unread -= 1

    def _publish_given(self, given: GivenReport) -> None:
        self._reports_left -= 1
        work = self._work_of(given.work)
        self.evaluation.publish(Report(given.name, 0, work, self.now, work.slot_seconds))
        self.policy.published()

    def _finish(self, job: RunningJob) -> None:
        self.settle(job)
        job.stage = ABSENT
        job.version += 1
        job.ended = self.now
        self.assign(job, ())
        job.active = []
        self._live_changed()
        self.policy.ended(job)

    # ---------------------------------------------------------------- failures

    def _fail(self, failure: Failure) -> None:
        nodes = [node for node in failure.nodes if self.up[node]]
        struck: dict[str, list[int]] = {}
        idle: list[int] = []
        for node in nodes:
            job = self.owner[node]
            if job is None:
                idle.append(node)
            else:
                struck.setdefault(job.name, []).append(node)
        if failure.permanent and failure.cause != "straggler":
            for node in nodes:
                self.up[node] = False
            self.engine.after(failure.away_seconds + (self.policy.heeds_notice * failure.notice_seconds),
                              lambda: self.repair(nodes))  # fmt: skip
            if idle:
                self.engine.after(self.world.parameters.detection.node_health, lambda: self.policy.lost_idle(idle))
        for job in self.jobs:
            if job.name in struck:
                self._strike(Strike(job=job, failure=failure, nodes=tuple(struck[job.name])))

    def _strike(self, strike: Strike) -> None:
        job = strike.job
        if strike.failure.cause == "straggler":
            if set(strike.nodes) & set(job.active):
                self.settle(job)
                job.slowdown = max(job.slowdown, strike.failure.slowdown)
                self._slow(strike)
            return
        warned = self.policy.heeds_notice and strike.failure.notice_seconds > 0
        if not warned and job.stage == RUNNING:
            self.stop(job, "detect")
        job.undetected += 1

        def detected() -> None:
            job.undetected -= 1
            if job.live:
                self.policy.struck(strike)

        seconds = 0.0 if warned or job.stage == "waiting" else self.policy.detect_seconds(strike)
        self.engine.after(seconds, detected)

    def _slow(self, strike: Strike) -> None:
        """A straggler: policies that watch the step time isolate its node, under the others it stays."""
        job = strike.job
        seconds = self.world.parameters.detection.straggler
        if not self.policy.watches_stragglers:
            seconds = strike.failure.away_seconds

        def over() -> None:
            self.settle(job)
            job.slowdown = 1.0
            if self.policy.watches_stragglers and all(self.owner[node] is job for node in strike.nodes):
                nodes = list(strike.nodes)
                for node in nodes:
                    self.up[node] = False
                self.engine.after(strike.failure.away_seconds, lambda: self.repair(nodes))
                self.policy.struck(strike)

        self.engine.after(seconds, over)

    def repair(self, nodes: Sequence[int]) -> None:
        """Nodes are back."""
        for node in nodes:
            self.up[node] = True
        self.policy.repaired(list(nodes))

    # ---------------------------------------------------------------- the end

    def _outcome(self) -> Outcome:
        end = self.now
        reference = sum(job.account.reference for job in self.jobs)
        useful = sum(job.account.useful for job in self.jobs)
        lost = {name: sum(job.account.lost[name] for job in self.jobs) for name in LOSSES}
        share = end / reference if reference > 0 else 0.0
        gpus = self.world.gpus
        return Outcome(
            accumulated_waf=useful,
            certain_waf=useful - sum(job.account.doubtful for job in self.jobs),
            useful_flop=sum(job.useful_flop for job in self.jobs),
            ettr=useful / reference if reference > 0 else 0.0,
            makespan=end,
            losses={name: value * share for name, value in _net(lost).items()},
            gpu_hours=gpus * end / 3600,
            cost=_cost(self.world.cluster, gpus, end),
            busy_gpu_hours=(self.busy_seconds * self.world.cluster.gpus_per_node + self.evaluation.gpu_seconds) / 3600,
            latencies=self.evaluation.all_latencies(),
            pending=self.evaluation.pending,
            series=self.series,
            events=self.engine.events,
        )


def _net(lost: dict[str, float]) -> dict[str, float]:
    """A job that has more than its full size (since another one cannot run) makes up for what that one loses: a
    negative remainder is taken from the waiting, then from the other parts."""
    found = dict(lost)
    over = -min(0.0, found["degraded"])
    found["degraded"] = max(0.0, found["degraded"])
    for name in ("waiting", *LOSSES):
        taken = min(over, found[name])
        found[name] -= taken
        over -= taken
    return found


def _cost(cluster: ClusterSpec, gpus: int, end: float) -> float:
    """GPU-hours at the price of their time."""
    points = [(0.0, cluster.price_per_gpu_hour), *cluster.prices]
    total = 0.0
    for index, (start, price) in enumerate(points):
        stop = min(points[index + 1][0] if index + 1 < len(points) else end, end)
        total += max(0.0, stop - start) / 3600 * gpus * price
    return total
