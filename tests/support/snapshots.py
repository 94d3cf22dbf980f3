"""Small snapshots without a model, for tests of what comes after the copy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from pretrain import plain, snapshot
from pretrain.snapshot import Coordinate
from pretrain.snapshot_writer import SnapshotWriter, Source


def tensors(step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """Two tensors whose values depend on the step."""
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(rows, 4, generator=generator), "bias": torch.randn(rows, generator=generator)}


def source(
    step: int,
    *,
    job: str = "job",
    incarnation: int = 1,
    persist: bool = False,
    rows: int = 8,
    part: tuple[int, int] = (0, 1),
) -> Source:
    """What a rank would snapshot at ``step``; ``part`` is (shard, shards), cut along the first axis."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    sharded: list[Any] = [
        ShardedTensor.from_rank_offsets(name, value, (0, *part), replica_id=(0, 0, 0))
        for name, value in tensors(step, rows).items()
    ]
    return Source(
        job=job,
        incarnation=incarnation,
        token=0,
        step=step,
        consumed_samples=step * 4,
        created=time.time(),
        persist=persist,
        tensors=tuple(sharded),
        objects=(),
        common=plain.encode({"train_state": {"step": step}}),
        description={"format": 1},
    )


def writer(memory: Path, job: str = "job", shard: int = 0, shards: int = 1) -> SnapshotWriter:
    """A writer of one shard (of several: tensor-parallel ranks)."""
    return SnapshotWriter(snapshot.job_dir(memory, job), Coordinate(shards, 1, shard, 0), clock=time.monotonic)


def take(memory: Path, step: int, **fields: Any) -> SnapshotWriter:
    """Commit one snapshot and return its writer."""
    made = writer(memory, fields.get("job", "job"))
    taken = made.begin(source(step, **fields))
    assert not taken.skipped, taken.skipped
    made.finish()
    made.wait_committed()
    return made
