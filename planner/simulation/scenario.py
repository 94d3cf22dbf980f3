"""What a scenario file says (``configs/scenarios/``), checked field by field before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from planner.errors import BadInputError
from planner.loading import Settings, read_yaml, validate
from planner.plan_input import LayoutInput, ModelInput
from planner.severity import TABLE

POLICIES = (
    "planaria",
    "unicron",
    "megatron-restart",
    "oobleck",
    "varuna",
    "bamboo",
    "recycle",
    "fixed-partition",
    "one-job-per-dataset",
)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not yes or no")
    return value


Count = Annotated[int, BeforeValidator(_number), Field(ge=0, le=10**6)]
PositiveCount = Annotated[int, BeforeValidator(_number), Field(gt=0, le=10**6)]
Amount = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]


class ClusterSpec(Settings):
    """Nodes and prices."""

    nodes: PositiveCount
    """Nodes, spares included."""
    gpus_per_node: PositiveCount = 8
    """GPUs of a node."""
    gpu: Literal["a100-80gb", "h100-80gb", "h200-141gb"] = "a100-80gb"
    """What a GPU is, for jobs that give a model."""
    price_per_gpu_hour: Amount = 0.0
    """Currency per GPU-hour at the start."""
    prices: list[tuple[Amount, Amount]] = []
    """Later prices as [seconds, price], in order of time."""
    nodes_per_switch: PositiveCount = 16
    """Nodes behind one leaf switch, for correlated failures."""

    @model_validator(mode="after")
    def _ordered(self) -> ClusterSpec:
        times = [time for time, _ in self.prices]
        if times != sorted(times):
            raise ValueError(f"prices: times out of order: {times}")
        return self


class JobSpec(Settings):
    """One training job: a ``model``, or ``throughput`` in FLOP/s per GPU count (whole nodes)."""

    name: Annotated[str, Field(min_length=1)]
    """Unique name."""
    weight: Positive = 1.0
    """w(t) of the objective."""
    min_workers: PositiveCount = 1
    """Fewest GPUs."""
    max_workers: PositiveCount | None = None
    """Most GPUs; the cluster when left out."""
    count_step: PositiveCount | None = None
    """GPUs between listed counts of a ``model``; a node when left out."""
    model: ModelInput | None = None
    """Rates from the analytic model."""
    throughput: dict[PositiveCount, Positive] | None = None
    """Aggregate FLOP/s per GPU count."""
    layouts: dict[PositiveCount, LayoutInput] = {}
    """Parallel sizes per count of ``throughput``; pure data parallelism when left out."""
    step_seconds: Positive | None = None
    """Seconds of a step where no model says it; ``training.step_seconds`` when left out."""
    checkpoint_interval_seconds: Positive | None = None
    """Running seconds between checkpoints; ``training.checkpoint_interval`` when left out."""
    submit_seconds: Amount = 0.0
    """When it arrives."""
    flop: Positive | None = None
    """Work after which it ends; it runs to the horizon when left out."""

    @model_validator(mode="after")
    def _one_source(self) -> JobSpec:
        if (self.model is None) == (self.throughput is None):
            raise ValueError("throughput: give either a throughput or a model")
        for count, layout in self.layouts.items():
            if count not in (self.throughput or {}) or count % (layout.tensor * layout.pipeline):
                raise ValueError(f"layouts.{count}: the count is not in throughput, or no multiple of its layout")
        return self


class RepairSpec(Settings):
    """Seconds until a node is back; the parameter file's repair_low and repair_high when left out."""

    low: Amount
    """Least."""
    high: Amount
    """Most."""

    @model_validator(mode="after")
    def _ordered(self) -> RepairSpec:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")
        return self


class FailureSpec(Settings):
    """How nodes fail. Counts are expected numbers over the horizon and the whole cluster."""

    process: Literal["poisson", "weibull", "fixed"] = "poisson"
    """``fixed``: exactly the given counts, at uniform times; ``weibull``: gaps with ``shape``, the same mean."""
    shape: Positive = 1.0
    """Weibull's shape: below 1 failures come in bursts."""
    permanent: Amount = 0.0
    """SEV1 failures: the node is drained and repaired."""
    transient: Amount = 0.0
    """SEV2 and SEV3 failures."""
    switch: Amount = 0.0
    """Failures of a leaf switch: all its nodes at once, back after ``switch_seconds``."""
    switch_seconds: Amount = 3600.0
    """Seconds until a failed switch is back."""
    stragglers: Amount = 0.0
    """Nodes that become slow without failing."""
    slowdown: Positive = 1.5
    """Step time of a job with a straggler, relative."""
    preemptions: Amount = 0.0
    """Nodes taken away by the provider."""
    notice_seconds: Amount = 120.0
    """Notice of a preemption; 0: none."""
    away_seconds: Amount = 3600.0
    """Seconds until a preempted node is given back."""
    mix: dict[str, Positive] | None = None
    """Share by class of error; the parameter file's mix when left out."""
    repair: RepairSpec | None = None
    """Repair time of SEV1 failures."""

    @field_validator("mix")
    @classmethod
    def _known(cls, mix: dict[str, float] | None) -> dict[str, float] | None:
        unknown = sorted(set(mix or {}) - set(TABLE))
        if unknown:
            raise ValueError(f"{unknown[0]} is no class of error; known: {', '.join(sorted(TABLE))}")
        return mix


class EvaluationSpec(Settings):
    """Evaluation of published checkpoints."""

    load_share: Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1)]
    """Share of the cluster's GPU-seconds that evaluation needs when all training runs."""
    every_checkpoints: PositiveCount = 1
    """Every k-th checkpoint is evaluated."""
    datasets: PositiveCount = 63
    """Datasets of a checkpoint's evaluation."""
    partition_nodes: PositiveCount | None = None
    """Nodes of a fixed partition; sized by ``evaluation.partition_load`` when left out."""


class TraceSpec(Settings):
    """Jobs from a file instead of (or besides) ``jobs``."""

    path: str
    """The file, relative to the scenario's folder."""
    format: Literal["acme", "slurm", "events"]
    """AcmeTrace CSV, ``sacct --parsable2`` output, or a real job's ``events.jsonl``."""
    limit: PositiveCount | None = None
    """Take only so many jobs."""
    flops_per_gpu: Positive = 1.5e14
    """Rate of a GPU, since traces tell none."""


class ClusterScenario(Settings):
    """Training jobs (and their evaluation) on a cluster that fails."""

    name: Annotated[str, Field(min_length=1)]
    """Name in the output."""
    kind: Literal["cluster"] = "cluster"
    seed: Count = 0
    """Seed of all random draws."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 1
    """Traces to draw, from ``seed`` on; the figures are means over them."""
    horizon_seconds: Positive
    """Simulated time."""
    cluster: ClusterSpec
    jobs: list[JobSpec] = []
    trace: TraceSpec | None = None
    """Jobs from a file."""
    failures: FailureSpec = FailureSpec()
    evaluation: EvaluationSpec | None = None
    """Evaluation demand; none when left out."""
    policies: Annotated[list[Literal[POLICIES]], Field(min_length=1)]  # type: ignore[valid-type]
    """Policies to compare on one and the same trace."""

    @model_validator(mode="after")
    def _fits(self) -> ClusterScenario:
        gpus = self.cluster.nodes * self.cluster.gpus_per_node
        if not self.jobs and self.trace is None:
            raise ValueError("jobs: give jobs or a trace")
        names = [job.name for job in self.jobs]
        for job in self.jobs:
            if names.count(job.name) > 1:
                raise ValueError(f"jobs: two jobs are called {job.name!r}")
            above = max([job.min_workers, *(job.throughput or {})])
            if above > gpus:
                raise ValueError(f"jobs: {job.name} asks for {above} GPUs and the cluster has {gpus}")
        if len(set(self.policies)) != len(self.policies):
            raise ValueError(f"policies: one stands twice in {self.policies}")
        if (
            self.evaluation is None
            and self.trace is None
            and {"fixed-partition", "one-job-per-dataset"} & set(self.policies)
        ):
            raise ValueError("policies: fixed-partition and one-job-per-dataset need an evaluation block")
        return self


class TrialScenario(Settings):
    """One checkpoint on many datasets, shard by shard, on given nodes."""

    name: Annotated[str, Field(min_length=1)]
    """Name in the output."""
    kind: Literal["evaluation"]
    seed: Count = 0
    """Seed of the order in which the datasets are submitted."""
    nodes: PositiveCount
    """Nodes that evaluate."""
    gpus_per_node: PositiveCount = 8
    """GPUs of a node."""
    price_per_gpu_hour: Amount = 0.0
    """Currency per GPU-hour."""
    orders: PositiveCount = 20
    """Random orders of submission of the baseline, whose mean is given."""
    policies: Annotated[list[Literal["planaria", "fixed-partition", "one-job-per-dataset"]], Field(min_length=1)]
    """``one-job-per-dataset`` is Acme's baseline, ``fixed-partition`` Acme's own method."""


class SweepAxes(Settings):
    """The cells: their product, fixed before the first run."""

    failure_rate: Annotated[list[Positive], Field(min_length=1)]
    """Failures of each kind relative to the base scenario."""
    evaluation_load: Annotated[list[Annotated[float, Field(gt=0, lt=1)]], Field(min_length=1)]
    """``load_share`` of evaluation."""
    nodes: Annotated[list[PositiveCount], Field(min_length=1)]
    """Cluster sizes; failures grow in proportion."""


class SweepScenario(Settings):
    """A cluster scenario over cells, several seeds each."""

    name: Annotated[str, Field(min_length=1)]
    """Name in the output."""
    kind: Literal["sweep"]
    seed: Count = 0
    """First seed."""
    seeds: Annotated[int, Field(ge=2, le=1000)] = 20
    """Seeds a cell."""
    axes: SweepAxes
    reference_cell: dict[str, float]
    """The cell whose figures stand under ``policies``."""
    base: dict[str, Any]
    """The cluster scenario of the smallest size, without name and kind."""
    partitions: list[PositiveCount] = []
    """Sizes of fixed partitions (nodes) that are tried besides the sized one, in the reference cell."""
    lending_rules: bool = True
    """Compare the lending price with simpler rules in the reference cell."""


Scenario = ClusterScenario | TrialScenario | SweepScenario
_KINDS: dict[str, type[ClusterScenario] | type[TrialScenario] | type[SweepScenario]] = {
    "cluster": ClusterScenario,
    "evaluation": TrialScenario,
    "sweep": SweepScenario,
}


def read_scenario(path: Path) -> Scenario:
    """The scenario of a file.

    Raises:
        BadInputError: one line with file, field and value.
    """
    data = read_yaml(path)
    kind = data.get("kind", "cluster")
    if kind not in _KINDS:
        raise BadInputError(f"{path}: kind: {kind!r} is none of {', '.join(_KINDS)}")
    return validate(_KINDS[kind], data, str(path))
