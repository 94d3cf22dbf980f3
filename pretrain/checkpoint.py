"""The durable tier in its synchronous form: all ranks save, rank 0 publishes; and loading into any layout.

A save is: shards and metadata into a hidden work directory → rename to ``step-XXXXXXXX`` → manifest (the
commit point) → ``latest``. The fence (:mod:`pretrain.published`) is checked under the folder's lock around
the last three, so that an older incarnation can never publish. What fails before the manifest leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner import manifest
from planner.errors import BadInputError
from planner.pretrain_config import PretrainConfig
from pretrain import description, device, published
from pretrain.megatron_format import SaveFailedError, agreed, read_common, read_dist, write_dist
from pretrain.published import Fence, Refusal, newest_verified
from pretrain.state import TrainState

__all__ = ["Parts", "Refusal", "SaveFailedError", "collect", "load", "newest_verified", "restore", "save"]

MEGATRON = "megatron"
_FORMATS = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""How optimizer state is laid out, so that it can be loaded into any tensor, pipeline and data parallel size."""


@dataclass
class Parts:
    """The live objects of one rank that a checkpoint is made of and loaded into."""

    model: Any
    """The rank's model chunk, wrapped by Megatron's DistributedDataParallel or bare."""
    optimizer: Any
    """The Megatron optimizer; None loads or saves weights alone."""
    state: TrainState
    """Step and data position."""
    config: PretrainConfig
    """The job's settings; a checkpoint carries them, so that it can be exported and judged on its own."""
    vocabulary: int
    """Rows of the embedding, padding included."""
    schedule: Any = None
    """Whatever has ``state_dict`` and ``load_state_dict`` besides (a scheduler); None where the step says all."""


def unwrap(model: Any) -> Any:
    """The module inside data-parallel and precision wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def collect(parts: Parts, *, loading: bool = False) -> dict[str, Any]:
    """The sharded state dict of this rank, referring to the live tensors (nothing is copied)."""
    with device.emulation():
        model = unwrap(parts.model).sharded_state_dict(metadata=dict(_FORMATS))
        state: dict[str, Any] = {"model": model}
        if parts.optimizer is not None:
            state["optimizer"] = parts.optimizer.sharded_state_dict(model, is_loading=loading, metadata=dict(_FORMATS))
    if not loading:
        state["train_state"] = parts.state.to_json()
        if parts.schedule is not None:
            state["schedule"] = parts.schedule.state_dict()
    return state


def restore(parts: Parts, loaded: dict[str, Any]) -> TrainState:
    """Put loaded state into the live objects, in place, and return the training state (also in ``parts.state``)."""
    with device.emulation():
        unwrap(parts.model).load_state_dict(loaded["model"], strict=True)
        if parts.optimizer is not None:
            parts.optimizer.load_state_dict(loaded["optimizer"])
        if parts.schedule is not None and "schedule" in loaded:
            parts.schedule.load_state_dict(loaded["schedule"])
    parts.state = TrainState.from_json(loaded["train_state"])
    return parts.state


def save(
    parts: Parts,
    folder: Path,
    *,
    fence: Fence,
    created: float,
    on_stage: Callable[[str], None] | None = None,
) -> Path:
    """Save and publish the state as ``folder/step-XXXXXXXX`` (collective over the default group).

    Args:
        parts: this rank's live objects.
        folder: folder of the job's checkpoints.
        fence: the right under which this incarnation writes (:func:`pretrain.published.claim` at its start).
        created: seconds since the epoch, for the manifest.
        on_stage: called on every rank with ``write``, then on rank 0 with ``rename``, ``publish`` and ``latest``
            before each begins.

    Returns:
        The published directory, on every rank.

    Raises:
        SaveFailedError: on every rank; nothing half-made is left, older checkpoints are as they were.
    """
    step = parts.state.step
    work = published.work_dir(folder, step, fence)
    target = folder / manifest.step_dir_name(step)
    stage = on_stage or (lambda name: None)
    main = dist.get_rank() == 0
    try:
        with agreed(f"preparing the save of step {step}"):
            if main:
                folder.mkdir(parents=True, exist_ok=True)
                published.remove_tree(work)
                (work / MEGATRON).mkdir(parents=True)
        with agreed(f"saving step {step}"):
            stage("write")
        with device.emulation():
            write_dist(collect(parts), work / MEGATRON)
        with agreed(f"publishing step {step}"):
            if main:
                described = manifest.Described(
                    job=fence.job,
                    step=step,
                    consumed_samples=parts.state.consumed_samples,
                    incarnation=fence.incarnation,
                    created=created,
                    description=description.describe(parts.config, parts.vocabulary),
                )
                published.commit(work, target, fence=fence, described=described, on_stage=stage)
    finally:
        if main:
            published.remove_tree(work)
    return target


def load(path: Path, parts: Parts) -> TrainState:
    """Load a published checkpoint of any layout into the live objects (collective).

    The caller has verified it (:func:`newest_verified`): Megatron itself loads a flipped bit without any error.

    Raises:
        BadInputError: it was made by another model (shapes or names differ), or is no training checkpoint.
    """
    source = path / MEGATRON
    if "train_state" not in (common := read_common(source)):
        raise BadInputError(f"{path}: holds no training state (keys: {', '.join(sorted(common))})")
    try:
        with device.emulation():
            loaded = read_dist(collect(parts, loading=True), source)
    except Exception as error:
        raise BadInputError(f"{path}: does not fit this model: {type(error).__name__}: {error}") from error
    return restore(parts, loaded)
