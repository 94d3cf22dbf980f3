"""What ``planaria plan`` reads: a cluster and its jobs, validated field by field (DESIGN.md, Contracts)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from planner.errors import BadInputError
from planner.loading import Settings, read_yaml, validate
from planner.throughput import AnalyticSource, candidate_counts, profile
from planner.throughput_model import HARDWARE, ModelShape, Training
from planner.types import Cluster, Job, JobKind, Layout, ThroughputProfile


def _no_bool(value: Any) -> Any:
    """YAML's ``yes`` is no number, though Python would count it as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed, not yes or no")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=10**12)]
Positive = Annotated[int, BeforeValidator(_no_bool), Field(gt=0, le=10**12)]
Amount = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]
PositiveAmount = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]


class ClusterInput(Settings):
    """The slots and what they cost."""

    gpus: Positive
    """Slots of the cluster."""
    gpus_per_node: Positive = 8
    """Slots of a node."""
    mtbf_gpu_hours: PositiveAmount = 12000.0
    """Mean GPU-hours between failures; D_running = mtbf_gpu_hours·3600/gpus seconds."""
    price_per_gpu_hour: Amount = 0.0
    """Currency per slot-hour; counts only together with ``flop_value``."""
    flop_value: Amount = 0.0
    """FLOP that one currency unit is worth."""
    spare_value: Amount = 0.0
    """FLOP that each spare slot is worth at the next failure; 0 keeps no spares."""
    gpu: Literal["a100-80gb", "h100-80gb", "h200-141gb"] = "a100-80gb"
    """What a slot is, for jobs that give a model instead of a throughput."""
    spares: Count = 1
    """Slots that are worth ``spare_value``; further ones are worth nothing."""

    def to_cluster(self) -> Cluster:
        """As the allocator's type."""
        return Cluster(
            gpus=self.gpus,
            gpus_per_node=self.gpus_per_node,
            mtbf_gpu_hours=self.mtbf_gpu_hours,
            price_per_gpu_hour=self.price_per_gpu_hour,
            flop_value=self.flop_value,
            spare_values=(self.spare_value,) * min(self.spares, self.gpus) if self.spare_value > 0 else (),
        )


class LayoutInput(Settings):
    """Parallel sizes at one count; ``data`` follows from the count when left out."""

    tensor: Positive = 1
    """Tensor-parallel size."""
    pipeline: Positive = 1
    """Pipeline-parallel size."""
    data: Positive | None = None
    """Data-parallel size."""


class ModelInput(Settings):
    """A model whose throughput the analytic model gives (docs/allocator.md)."""

    layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive | None = None
    """Width of the MLP; 4 × hidden_size when left out."""
    heads: Positive
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads; as many as query heads when left out."""
    seq_length: Positive
    """Tokens of a sample."""
    vocab_size: Positive = 51200
    """Entries of the embedding."""
    gated: bool = False
    """SwiGLU: three matrices in the MLP."""
    global_batch: Positive
    """Samples of a step."""

    @model_validator(mode="after")
    def _shape(self) -> ModelInput:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by heads {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        return self

    def shape(self) -> ModelShape:
        """For the analytic model."""
        return ModelShape(
            layers=self.layers,
            hidden=self.hidden_size,
            ffn_hidden=self.ffn_hidden_size or 4 * self.hidden_size,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            seq_length=self.seq_length,
            vocab=self.vocab_size,
            gated=self.gated,
        )


class JobInput(Settings):
    """One job of the cluster: ``throughput`` is needed, or a ``model`` that it can be derived from."""

    name: Annotated[str, Field(min_length=1)]
    """Unique name."""
    kind: JobKind = JobKind.PRETRAIN
    """``pretrain`` or ``evaluation``."""
    weight: Amount = 1.0
    """w(t): how much this job's FLOP/s are worth against others'."""
    min_workers: Count = 1
    """Below it F is 0."""
    throughput: dict[Positive, Amount] | None = None
    """Aggregate FLOP/s at each feasible worker count."""
    model: ModelInput | None = None
    """Instead of ``throughput``: the best layout and its rate at each count that fits in memory."""
    layouts: dict[Positive, LayoutInput] = {}
    """Parallel sizes per count, shown as ``parallel`` in the plan."""
    workers: Count = 0
    """Present count; where a worker was lost in this event, the count before."""
    faulted: bool = False
    """Whether the job lost a worker in this event."""
    transition_seconds: Amount = 0.0
    """Seconds that the job stands still when its count changes or it heals."""

    @field_validator("throughput", mode="before")
    @classmethod
    def _counts_once(cls, value: Any) -> Any:
        if isinstance(value, dict):
            text = [str(key) for key in value]
            twice = sorted({key for key in text if text.count(key) > 1})
            if twice:
                raise ValueError(f"the count {twice[0]} stands twice")
            if any(isinstance(key, bool) for key in value):
                raise ValueError("a worker count is needed as key, not yes or no")
        return value

    @model_validator(mode="after")
    def _layouts_fit(self) -> JobInput:
        if (self.throughput is None) == (self.model is None):
            raise ValueError("throughput: give either a throughput or a model")
        if self.model is not None and self.layouts:
            raise ValueError("layouts: they follow from the model; remove one of the two")
        for count, layout in self.layouts.items():
            group = layout.tensor * layout.pipeline
            if count not in (self.throughput or {}):
                raise ValueError(f"layouts.{count}: the count is not in throughput")
            if count % group or (layout.data is not None and group * layout.data != count):
                raise ValueError(f"layouts.{count}: tensor × pipeline × data is not {count}")
        return self

    def to_job(self, cluster: ClusterInput) -> Job:
        """As the allocator's type."""
        return Job(
            name=self.name,
            kind=self.kind,
            weight=self.weight,
            min_workers=self.min_workers,
            profile=self._profile(cluster),
            workers=self.workers,
            faulted=self.faulted,
            transition_seconds=self.transition_seconds,
        )

    def _profile(self, cluster: ClusterInput) -> ThroughputProfile:
        if self.model is not None:
            training = Training(global_batch=self.model.global_batch)
            source = AnalyticSource(self.model.shape(), training, HARDWARE[cluster.gpu], cluster.gpus_per_node)
            counts = candidate_counts(self.min_workers, cluster.gpus, cluster.gpus_per_node)
            return profile(source, sorted({*counts, self.workers} - {0}))
        layouts = {
            count: Layout(given.tensor, given.pipeline, count // (given.tensor * given.pipeline))
            for count, given in self.layouts.items()
        }
        return ThroughputProfile.of(self.throughput or {}, layouts)


class _PlanFile(Settings):
    cluster: dict[str, Any]
    """See :class:`ClusterInput`."""
    jobs: list[dict[str, Any]]
    """See :class:`JobInput`."""


def read_plan_input(path: Path) -> tuple[Cluster, tuple[Job, ...]]:
    """Cluster and jobs of a file, in file order.

    Raises:
        BadInputError: one line that names the file, the job, the field and the value.
    """
    whole = validate(_PlanFile, read_yaml(path), str(path))
    cluster = validate(ClusterInput, whole.cluster, f"{path}: cluster")
    jobs: dict[str, Job] = {}
    for index, raw in enumerate(whole.jobs):
        given = validate(JobInput, raw, f"{path}: job {raw.get('name', f'number {index + 1}')!s}")
        where = f"{path}: job {given.name}"
        if given.name in jobs:
            raise BadInputError(f"{where}: name: two jobs are called {given.name!r}; give each its own name")
        jobs[given.name] = given.to_job(cluster)
        _check_counts(given, jobs[given.name], cluster, where)
    return cluster.to_cluster(), tuple(jobs.values())


def _check_counts(given: JobInput, job: Job, cluster: ClusterInput, where: str) -> None:
    gpus = cluster.gpus
    counts = job.profile.counts
    above = max(given.throughput or {}, default=0)
    if above > gpus:
        raise BadInputError(f"{where}: throughput.{above}: the count is above the cluster's {gpus} gpus; remove it")
    if given.model is not None and not counts:
        raise BadInputError(f"{where}: model: no feasible count, it fits the memory of no {gpus} × {cluster.gpu}")
    if not counts:
        raise BadInputError(f"{where}: throughput: no feasible count; list at least one as count: FLOP/s")
    if counts[-1] < job.min_workers:
        raise BadInputError(
            f"{where}: throughput: no feasible count, since none of {list(counts)} reaches "
            f"min_workers {job.min_workers}"
        )
    if job.workers > gpus and not job.faulted:
        raise BadInputError(
            f"{where}: workers: {job.workers} is above the cluster's {gpus} gpus; "
            "set faulted: true if the job lost workers in this event"
        )
