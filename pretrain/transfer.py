"""Training state from a data-parallel peer to a rank that joins, streamed tensor by tensor and checked by hash.

Each rank that joins receives from the nearest rank with its own tensor and pipeline coordinates that holds the state
(:func:`planner.transfer.plan_transfers`); so a lost model-parallel group is rebuilt shard by shard from its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import distributed as dist

from planner.errors import WorkFailedError
from pretrain import plain, snapshot_state
from pretrain.checkpoint import Parts
from pretrain.published import Fence
from pretrain.state import TrainState


class TransferError(WorkFailedError):
    """What arrived is not what was sent, or belongs to another model."""


def send(parts: Parts, receivers: Sequence[int]) -> int:
    """Send this rank's state to ``receivers`` (global ranks), one after the other; returns the bytes sent."""
    tensors = _ordered(parts)
    source = snapshot_state.source(parts, fence=Fence("", parts.state.incarnation, 0), created=0.0, persist=False)
    head = {"keys": [_name(one) for one in tensors], "common": source.common, "hash": _digest(tensors)}
    total = 0
    for receiver in receivers:
        dist.send_object_list([head], dst=receiver)
        for tensor in tensors:
            dist.send(tensor.data.detach().contiguous(), dst=receiver)
            total += tensor.data.nbytes
    return total


def receive(parts: Parts, sender: int) -> tuple[TrainState, int]:
    """Fill this rank's live objects from ``sender`` (a global rank); returns the training state and the bytes.

    Raises:
        TransferError: the sender's model is another one, or the hash differs.
    """
    box: list[Any] = [None]
    dist.recv_object_list(box, src=sender)
    head = box[0]
    tensors = _ordered(parts)
    names = [_name(one) for one in tensors]
    if names != head["keys"]:
        odd = sorted(set(map(str, names)) ^ set(map(str, head["keys"])))
        raise TransferError(f"rank {sender} sends other tensors than this rank holds, for example {odd[:3]}")
    with torch.no_grad():
        for tensor in tensors:
            buffer = torch.empty_like(tensor.data, memory_format=torch.contiguous_format)
            dist.recv(buffer, src=sender)
            tensor.data.detach().copy_(buffer)
    if _digest(tensors) != head["hash"]:
        raise TransferError(f"the state from rank {sender} arrived damaged: its hash differs")
    state = snapshot_state.restore_plain(parts, plain.decode(head["common"]))
    return state, sum(tensor.data.nbytes for tensor in tensors)


def _ordered(parts: Parts) -> list[ShardedTensor]:
    return sorted(snapshot_state.targets(parts), key=_name)


def _name(tensor: ShardedTensor) -> tuple[Any, ...]:
    return (tensor.key, tuple(tensor.global_offset), tuple(tensor.data.shape), str(tensor.data.dtype))


def _digest(tensors: Iterable[ShardedTensor]) -> str:
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        raw = tensor.data.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(memoryview(raw))
    return digest.hexdigest()
