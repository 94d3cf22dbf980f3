"""Training jobs with their rates, and what the evaluation of each of their checkpoints costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from planner.errors import BadInputError
from planner.simulation.engine import generator
from planner.simulation.parameters import Parameters
from planner.simulation.scenario import ClusterSpec, EvaluationSpec, JobSpec
from planner.throughput import AnalyticSource, profile
from planner.throughput_model import HARDWARE, Training
from planner.types import Job, Layout, ThroughputProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingJob:
    """A job as simulated: counts are in nodes."""

    name: str
    weight: float
    profile: ThroughputProfile
    """FLOP/s and layouts per number of *nodes*; layouts in GPUs."""
    min_nodes: int
    step_flop: float | None
    """FLOP of a step where a model says it."""
    step_seconds: float
    checkpoint_interval: float
    submit: float
    flop: float | None
    gaps: float = 0.0
    """Share of running time between steps (validation, bookkeeping), where measured."""
    jitter: float = 0.0
    """Share of running time at full size that goes to slow steps, where measured."""

    def rate(self, nodes: int) -> float:
        """Weighted FLOP/s on ``nodes`` (0 where not listed)."""
        return self.weight * self.profile.rate(nodes) if nodes >= self.min_nodes else 0.0

    def interpolated(self, nodes: int) -> float:
        """The same for systems that run at any count: linear between listed counts."""
        counts = [count for count in self.profile.counts if count >= self.min_nodes]
        if not counts or nodes < counts[0]:
            return 0.0
        below = max(count for count in counts if count <= nodes)
        above = min((count for count in counts if count >= nodes), default=below)
        share = (nodes - below) / (above - below) if above > below else 0.0
        return self.weight * (self.profile.rate(below) * (1 - share) + self.profile.rate(above) * share)

    def replicas(self, nodes: int) -> int:
        """Data-parallel size at a count; 1 where no layout is known to have more."""
        layout = self.profile.layout(nodes)
        return layout.data if layout else 1

    def one_replica_less(self, nodes: int) -> float:
        """Rate while one data-parallel replica is missing: the listed count below it, or in proportion."""
        layout, replicas = self.profile.layout(nodes), self.replicas(nodes)
        if layout is None or replicas < 2:
            return 0.0
        left = nodes * (replicas - 1) / replicas
        if left == int(left) and self.profile.rate(int(left)) > 0:
            return min(self.rate(nodes), self.weight * self.profile.rate(int(left)))
        return self.rate(nodes) * (replicas - 1) / replicas

    def seconds_of_step(self, nodes: int) -> float:
        """Seconds of one step."""
        rate = self.profile.rate(nodes)
        return self.step_flop / rate if self.step_flop and rate > 0 else self.step_seconds

    def to_job(self, workers: int = 0, faulted: bool = False, transition_seconds: float = 0.0) -> Job:
        """As the allocator's type, counted in nodes."""
        return Job(name=self.name, weight=self.weight, profile=self.profile, min_workers=self.min_nodes,
                   workers=workers, faulted=faulted, transition_seconds=transition_seconds)  # fmt: skip


def build(spec: JobSpec, cluster: ClusterSpec, parameters: Parameters, where: str) -> TrainingJob:
    """A job of a scenario.

    Raises:
        BadInputError: no feasible layout within the cluster.
    """
    per_node = cluster.gpus_per_node
    most = min(spec.max_workers or 10**9, cluster.nodes * per_node)
    step_flop = None
    if spec.model is not None:
        training = Training(global_batch=spec.model.global_batch)
        source = AnalyticSource(spec.model.shape(), training, HARDWARE[cluster.gpu], per_node)
        step = spec.count_step or per_node
        first = -(-max(spec.min_workers, step) // step) * step
        gpus = profile(source, [count for count in range(first, most + 1, step) if count % per_node == 0])
        step_flop = spec.model.shape().model_flops(spec.model.global_batch)
    else:
        rates = {count: rate for count, rate in (spec.throughput or {}).items() if count <= most}
        odd = [count for count in rates if count % per_node]
        if odd:
            raise BadInputError(f"{where}: throughput.{odd[0]}: no whole number of nodes of {per_node} GPUs")
        given = {
            count: Layout(layout.tensor, layout.pipeline, count // (layout.tensor * layout.pipeline))
            for count, layout in spec.layouts.items()
        }
        gpus = ThroughputProfile.of(rates, {count: given.get(count, Layout(data=count)) for count in rates})
    if not any(count >= spec.min_workers for count in gpus.counts):
        raise BadInputError(f"{where}: no feasible layout: no listed count from {spec.min_workers} to {most} GPUs fits")
    nodes = ThroughputProfile(tuple(count // per_node for count in gpus.counts), gpus.flops, gpus.layouts)
    return TrainingJob(
        name=spec.name, weight=spec.weight, profile=nodes, min_nodes=-(-spec.min_workers // per_node),
        step_flop=step_flop, step_seconds=spec.step_seconds or parameters.training.step_seconds,
        checkpoint_interval=spec.checkpoint_interval_seconds or parameters.training.checkpoint_interval,
        submit=spec.submit_seconds, flop=spec.flop,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one checkpoint's evaluation takes: inference on slots, its longest shard, its CPU tail, all in seconds."""

    slot_seconds: float
    longest: float
    tail: float
    datasets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenReport:
    """A report that a trace asks for at a time."""

    time: float
    name: str
    work: Work


@dataclass(frozen=True, slots=True)
class Demand:
    """Evaluation demand: the same checkpoint costs the same under every policy."""

    spec: EvaluationSpec
    gpus: int
    jobs: int
    parameters: Parameters
    seed: int

    def work(self, job: TrainingJob, index: int) -> Work:
        """The evaluation of a job's ``index``-th evaluated checkpoint; the mean is such that all jobs, running without
        pause, need ``load_share`` of the cluster's GPU-seconds."""
        given = self.parameters.evaluation
        period = job.checkpoint_interval * self.spec.every_checkpoints
        mean = self.spec.load_share * self.gpus * period / self.jobs
        normal = float(generator(self.seed, f"evaluation.{job.name}.{index}").standard_normal())
        seconds = mean * exp(given.spread * normal - given.spread**2 / 2)
        return Work(slot_seconds=seconds, longest=given.longest_share * seconds, tail=given.tail,
                    datasets=self.spec.datasets)  # fmt: skip


def whole_job(work: Work, parameters: Parameters) -> Work:
    """The same evaluation as one job per dataset: each loads over the network, prepares, and holds its GPU through its
    metric (Acme's baseline, with the profile of a HumanEval trial)."""
    trial = parameters.trial
    overhead = trial.preparation + 8 * trial.model_bytes / trial.nic_bytes_per_second
    inference = work.slot_seconds / work.datasets
    metric = trial.metric_share * inference
    # The longest of n log-normal datasets, as in planner.simulation.trials.
    largest = inference * exp(2.3 * trial.inference_spread - trial.inference_spread**2 / 2)
    return Work(
        slot_seconds=work.datasets * (overhead + inference + metric),
        longest=overhead + largest * (1 + trial.metric_share), tail=0.0, datasets=work.datasets,
    )  # fmt: skip
