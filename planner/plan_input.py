"""What ``planaria plan`` reads: a cluster and its jobs, validated field by field (DESIGN.md, Contracts)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from planner.errors import BadInputError
from planner.loading import Settings, read_yaml, validate
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


class JobInput(Settings):
    """One job of the cluster."""

    name: Annotated[str, Field(min_length=1)]
    """Unique name."""
    kind: JobKind = JobKind.PRETRAIN
    """``pretrain`` or ``evaluation``."""
    weight: Amount = 1.0
    """w(t): how much this job's FLOP/s are worth against others'."""
    min_workers: Count = 1
    """Below it F is 0."""
    throughput: dict[Positive, Amount]
    """Aggregate FLOP/s at each feasible worker count."""
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
        for count, layout in self.layouts.items():
            group = layout.tensor * layout.pipeline
            if count not in self.throughput:
                raise ValueError(f"layouts.{count}: the count is not in throughput")
            if count % group or (layout.data is not None and group * layout.data != count):
                raise ValueError(f"layouts.{count}: tensor × pipeline × data is not {count}")
        return self

    def to_job(self) -> Job:
        """As the allocator's type."""
        layouts = {
            count: Layout(given.tensor, given.pipeline, count // (given.tensor * given.pipeline))
            for count, given in self.layouts.items()
        }
        return Job(
            name=self.name,
            kind=self.kind,
            weight=self.weight,
            min_workers=self.min_workers,
            profile=ThroughputProfile.of(self.throughput, layouts),
            workers=self.workers,
            faulted=self.faulted,
            transition_seconds=self.transition_seconds,
        )


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
        _check_counts(given, cluster.gpus, where)
        jobs[given.name] = given.to_job()
    return cluster.to_cluster(), tuple(jobs.values())


def _check_counts(job: JobInput, gpus: int, where: str) -> None:
    above = max(job.throughput, default=0)
    if above > gpus:
        raise BadInputError(f"{where}: throughput.{above}: the count is above the cluster's {gpus} gpus; remove it")
    if not any(count >= job.min_workers for count in job.throughput):
        raise BadInputError(
            f"{where}: throughput: no feasible count, since none of {sorted(job.throughput)} "
            f"reaches min_workers {job.min_workers}"
        )
    if job.workers > gpus and not job.faulted:
        raise BadInputError(
            f"{where}: workers: {job.workers} is above the cluster's {gpus} gpus; "
            "set faulted: true if the job lost workers in this event"
        )
