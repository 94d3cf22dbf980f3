"""Between live Megatron objects and snapshots: what to copy, and how to put it back into any layout.

Putting back is in place where the optimizer's tensors are the live ones (the plain optimizer): each needed piece
is copied once, straight from host memory, with no state dict in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from pretrain import checkpoint, description, device, plain
from pretrain.checkpoint import Parts
from pretrain.published import Fence
from pretrain.snapshot import Description, Mapping, Shard, SnapshotError, SnapshotSet, TensorEntry, opened, verify
from pretrain.snapshot_writer import Source
from pretrain.state import TrainState


def shards_optimizer(optimizer: Any) -> bool:
    """Whether optimizer state differs from one data-parallel replica to the next."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    return any(isinstance(one, DistributedOptimizer) for one in inner)


def source(parts: Parts, *, fence: Fence, created: float, persist: bool) -> Source:
    """What a snapshot of this rank copies. Refers to live tensors; everything else is as of now."""
    state = checkpoint.collect(parts)
    with device.emulation():
        sharded, common = save_preprocess(state, validate_access_integrity=False)
    values = list(nested_values(sharded))
    keep_replica = shards_optimizer(parts.optimizer)
    tensors = [_normal(value, keep_replica) for value in values if isinstance(value, ShardedTensor)]
    objects = [_normal(value, keep_replica) for value in values if isinstance(value, ShardedObject)]
    return Source(
        job=fence.job,
        incarnation=fence.incarnation,
        token=fence.token,
        step=parts.state.step,
        consumed_samples=parts.state.consumed_samples,
        created=created,
        persist=persist,
        tensors=tuple(tensors),
        objects=tuple(_encode_object(value) for value in objects),
        common=plain.encode(common),
        description=description.describe(parts.config, parts.vocabulary),
    )


def _normal(value: Any, keep_replica: bool) -> Any:
    """The value with its data-parallel replica counted as the first: any replica may be the one that snapshots."""
    if not keep_replica and isinstance(value.replica_id, tuple):
        value.replica_id = (*value.replica_id[:-1], 0)
    return value


def _encode_object(value: ShardedObject) -> dict[str, Any]:
    replica = [value.replica_id] if isinstance(value.replica_id, int) else list(value.replica_id)
    return {
        "key": value.key,
        "global_shape": list(value.global_shape),
        "global_offset": list(value.global_offset),
        "replica_id": replica,
        "data": plain.encode(value.data),
    }


# ---------------------------------------------------------------- to the durable tier


def to_megatron(shards: Iterable[tuple[Description, Mapping]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The (sharded, common) state that a save writes, with tensors that share the snapshot's memory."""
    held: list[Any] = []
    common: dict[str, Any] | None = None
    for said, mapping in shards:
        for entry in said.tensors:
            if is_main_replica(entry.replica_id):
                held.append(_sharded(entry, mapping))
        held += [
            ShardedObject(
                key=item["key"],
                data=plain.decode(item["data"]),
                global_shape=tuple(item["global_shape"]),
                global_offset=tuple(item["global_offset"]),
                replica_id=tuple(item["replica_id"]),
            )
            for item in said.objects
            if is_main_replica(tuple(item["replica_id"]))
        ]
        if common is None or (said.coordinate.tensor_rank, said.coordinate.pipeline_rank) == (0, 0):
            common = plain.decode(said.common)
    assert common is not None
    return {"shards": held}, common


def _sharded(entry: TensorEntry, mapping: Mapping) -> ShardedTensor:
    return ShardedTensor(
        key=entry.key,
        data=mapping.tensor(entry),
        dtype=plain.named_dtype(entry.dtype),
        local_shape=entry.local_shape,
        global_shape=entry.global_shape,
        global_offset=entry.global_offset,
        axis_fragmentations=entry.axis_fragmentations,
        replica_id=entry.replica_id,
        prepend_axis_num=entry.prepend_axis_num,
        allow_shape_mismatch=entry.allow_shape_mismatch,
    )


# ---------------------------------------------------------------- back into a rank


def load(snapshot: SnapshotSet, parts: Parts) -> TrainState:
    """Put a snapshot of any layout into the live objects; no collective, each rank reads what it needs.

    Every shard is compared with its hash, on a thread beside the copying; nothing is returned before that is done.

    Raises:
        SnapshotError: shards are missing, damaged or overwritten meanwhile, or belong to another model. The live
            objects may then hold a mixture and must be filled from another tier.
    """
    with contextlib.ExitStack() as stack, torch.no_grad():
        held = [(shard, stack.enter_context(opened(shard))) for shard in needed(snapshot, parts)]
        checks = stack.enter_context(ThreadPoolExecutor(1)).map(lambda one: verify(*one), held)
        pieces: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
        for shard, mapping in held:
            for entry in shard.description.tensors:
                shape = (1,) * entry.prepend_axis_num + entry.local_shape
                pieces.setdefault(entry.key, {})[entry.global_offset] = mapping.tensor(entry).reshape(shape)
        common = plain.decode(snapshot.shards[0].description.common)
        if shards_optimizer(parts.optimizer):
            loaded = _assembled(parts, pieces, common)
            _await(checks)
            return checkpoint.restore(parts, loaded)
        for value in targets(parts):
            _fill(value, pieces)
        _await(checks)
        return restore_plain(parts, common)


def _await(checks: Iterable[None]) -> None:
    """Raise what a check found."""
    for _ in checks:
        pass


def needed(snapshot: SnapshotSet, parts: Parts) -> list[Shard]:
    """The shards that this rank must read: its own where the layout is the same, else all of them."""
    from megatron.core import parallel_state

    mine = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    for shard in snapshot.shards:
        at = shard.description.coordinate
        if at.replicas == 1 and (at.tensor, at.pipeline, at.tensor_rank, at.pipeline_rank) == mine:
            return [shard]
    if not snapshot.complete:
        raise SnapshotError(f"snapshot of step {snapshot.step}: shards are missing for another layout")
    return list(snapshot.shards)


def targets(parts: Parts) -> list[ShardedTensor]:
    """This rank's live tensors, weights and optimizer state, with their names and places in the whole model."""
    state = checkpoint.collect(parts, loading=True)
    with device.emulation():
        sharded, _ = save_preprocess(state, validate_access_integrity=False)
    return [value for value in nested_values(sharded) if isinstance(value, ShardedTensor)]


def _fill(target: ShardedTensor, pieces: dict[str, dict[tuple[int, ...], torch.Tensor]]) -> None:
    """Copy everything that overlaps the target from the pieces of its global tensor."""
    held = pieces.get(target.key)
    if held is None:
        raise SnapshotError(f"the snapshot has no tensor {target.key}; it belongs to another model")
    shape = (1,) * target.prepend_axis_num + tuple(target.local_shape)
    out = target.data.detach().view(shape)
    exact = held.get(tuple(target.global_offset))
    if exact is not None and tuple(exact.shape) == shape:
        out.copy_(exact)
        return
    filled = 0
    for offset, piece in held.items():
        low = [max(a, b) for a, b in zip(target.global_offset, offset, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(target.global_offset, shape, offset, piece.shape, strict=True)]
        if any(begin >= end for begin, end in zip(low, high, strict=True)):
            continue
        to = tuple(slice(b - o, e - o) for b, e, o in zip(low, high, target.global_offset, strict=True))
        of = tuple(slice(b - o, e - o) for b, e, o in zip(low, high, offset, strict=True))
        out[to].copy_(piece[of])
        filled += out[to].numel()
    if filled != out.numel():
        raise SnapshotError(f"{target.key}: the snapshot has {filled} of {out.numel()} elements")


def _assembled(parts: Parts, pieces: dict[str, dict[tuple[int, ...], torch.Tensor]], common: Any) -> dict[str, Any]:
    """The state dict that Megatron's own load would return (for optimizers whose state is not the live tensors)."""
    with device.emulation():
        state, local, factories = load_preprocess(checkpoint.collect(parts, loading=True))
    sharded, _ = extract_sharded_base(state)
    for value in nested_values(sharded):
        if isinstance(value, ShardedTensor):
            value.data = torch.empty(value.local_shape, dtype=value.dtype)
            _fill(value, pieces)
    loaded: dict[str, Any] = common
    merge(loaded, local)
    merge(loaded, _data_of(sharded))
    return dict(apply_factory_merges(loaded, factories))


def _data_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _data_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_data_of(item) for item in value]
    return value.data


def restore_plain(parts: Parts, common: dict[str, Any]) -> TrainState:
    """What is not a tensor: parameter groups, the optimizer's step, the schedule, the training state."""
    if parts.optimizer is not None:
        inner = getattr(parts.optimizer, "chained_optimizers", [parts.optimizer])
        saved = (
            [common["optimizer"]] if len(inner) == 1 else [common["optimizer"][index] for index in range(len(inner))]
        )
        for one, values in zip(inner, saved, strict=True):
            _restore_groups(one, values.get("optimizer", values))
    if parts.schedule is not None and "schedule" in common:
        parts.schedule.load_state_dict(common["schedule"])
    parts.state = TrainState.from_json(common["train_state"])
    return parts.state


def _restore_groups(optimizer: Any, saved: dict[str, Any]) -> None:
    saved_by_kind = {_kind(group): group for group in saved["param_groups"]}
    for group in optimizer.optimizer.param_groups:
        values = saved_by_kind.get(_kind(group))
        if values is None:
            raise SnapshotError(f"the snapshot has no parameter group like {_kind(group)}; it belongs to another model")
        group.update({key: value for key, value in values.items() if key != "params"})
    step = saved["state"].get("common_step")
    for state in optimizer.optimizer.state.values():
        if step is not None:
            state["step"] = deepcopy(step)


def _kind(group: dict[str, Any]) -> tuple[Any, ...]:
    """What tells Megatron's parameter groups apart, whatever their order and the parameters in them."""
    return tuple(group.get(key) for key in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))
