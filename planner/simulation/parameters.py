"""The simulator's parameters: one file for all scenarios, each number with its source."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from planner.loading import Settings, load, read_yaml
from planner.resources import configs_dir
from planner.severity import TABLE


def _sourced(raw: Any) -> Any:
    """``{value, source}`` → the value; a number without a source is refused."""
    if not isinstance(raw, dict) or set(raw) != {"value", "source"}:
        raise ValueError("write it as {value: …, source: …}")
    if not isinstance(raw["source"], str) or not raw["source"].strip():
        raise ValueError('source: name where the number is from, or "unverified"')
    value = raw["value"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ValueError(f"value: a finite number is needed, not {value!r}")
    return float(value)


Amount = Annotated[float, BeforeValidator(_sourced), Field(ge=0)]
Positive = Annotated[float, BeforeValidator(_sourced), Field(gt=0)]
Share = Annotated[float, BeforeValidator(_sourced), Field(ge=0, le=1)]


class Detection(Settings):
    """Seconds from a failure to its detection, by method."""

    node_health: Amount
    process_supervision: Amount
    exception_propagation: Amount
    statistics_steps: Amount
    collective_timeout: Amount
    straggler: Amount


class Communicators(Settings):
    """Leaving and building process groups."""

    base: Amount
    per_gpu: Amount

    def seconds(self, gpus: int) -> float:
        """For so many ranks."""
        return self.base + self.per_gpu * gpus


class Planaria(Settings):
    """Healing in place."""

    decide: Amount
    join: Amount
    process_start: Amount
    newcomer_start: Amount
    load_peer: Amount
    snapshot_interval: Positive
    release_evaluation: Amount
    replan: Positive
    stall_share: Share


class Unicron(Settings):
    """Unicron as published."""

    decide: Amount
    restart: Amount
    reconfigure: Amount
    load: Amount
    snapshot_interval: Positive
    stall_share: Share


class ManualRestart(Settings):
    """Megatron, restarted by a person."""

    resubmit: Amount
    setup: Amount
    stall_share: Share


class Oobleck(Settings):
    """Pipeline templates."""

    healthy: Share
    detect: Amount
    reconfigure_8: Amount
    reconfigure_16: Amount
    reconfigure_32: Amount
    reconfigure_64: Amount


class Varuna(Settings):
    """Job morphing."""

    healthy: Share
    detect: Amount
    restart: Amount


class Bamboo(Settings):
    """Redundant computation."""

    healthy: Share
    detect: Amount
    local: Amount
    rendezvous: Amount
    degraded_step: Positive


class Recycle(Settings):
    """Micro-batches routed around the lost rank."""

    healthy: Share
    detect: Amount
    reroute: Amount
    rejoin: Amount


class Failures(Settings):
    """What failures have in common."""

    retry_success: Share
    repair_low: Amount
    repair_high: Amount

    @model_validator(mode="after")
    def _ordered(self) -> Failures:
        if self.repair_low > self.repair_high:
            raise ValueError(f"repair_low {self.repair_low} is above repair_high {self.repair_high}")
        return self


class Training(Settings):
    """Defaults of training jobs."""

    checkpoint_interval: Positive
    step_seconds: Positive


class Evaluation(Settings):
    """One checkpoint's evaluation in a cluster scenario."""

    load: Amount
    spread: Amount
    longest_share: Share
    tail: Amount
    partition_load: Annotated[float, BeforeValidator(_sourced), Field(gt=0, le=1)]
    stop_probability: Share


class Trial(Settings):
    """One evaluation of one checkpoint, dataset by dataset."""

    nic_bytes_per_second: Positive
    model_bytes: Positive
    memory_bytes_per_second: Positive
    storage_bytes_per_second: Positive
    preparation: Amount
    inference: Positive
    inference_spread: Amount
    metric_share: Amount
    datasets: Positive
    acme_pieces: Positive
    shard_seconds: Positive
    engine_start: Amount
    shard_overhead: Amount


class Parameters(Settings):
    """All of ``configs/scenarios/parameters.yaml``; what each number means stands beside it there."""

    detection: Detection
    communicators: Communicators
    planaria: Planaria
    unicron: Unicron
    manual_restart: ManualRestart
    oobleck: Oobleck
    varuna: Varuna
    bamboo: Bamboo
    recycle: Recycle
    failures: Failures
    mix: dict[str, Positive]
    training: Training
    evaluation: Evaluation
    trial: Trial

    @model_validator(mode="after")
    def _known(self) -> Parameters:
        unknown = sorted(set(self.mix) - set(TABLE))
        if unknown:
            raise ValueError(f"mix.{unknown[0]}: no class of error in the severity table")
        return self


def default_path() -> Path:
    """The file that all shipped scenarios use."""
    return configs_dir() / "scenarios" / "parameters.yaml"


def read_parameters(path: Path | None = None) -> Parameters:
    """The parameters.

    Raises:
        BadInputError: one line with file, field and value.
    """
    return load(Parameters, path or default_path())


def sources(path: Path | None = None) -> list[tuple[str, float, str]]:
    """``(name, value, source)`` of every parameter, for the page and the docs."""
    return [
        (f"{group}.{name}", float(entry["value"]), str(entry["source"]))
        for group, entries in read_yaml(path or default_path()).items()
        for name, entry in entries.items()
    ]
