"""Writing and reading Megatron's distributed checkpoint format, without its helper processes.

``megatron.core.dist_checkpointing.save`` hands the bytes to a spawned manager process and forked writers.
The spawn imports the whole program again (4 to 12 s for the first save of a process, measured), a fork of a
threaded process may dead-lock, and a writer killed in mid-save leaves every rank waiting on a queue. Here
the same planner, file layout and metadata are used, but the files are written by threads of the calling
process, and an error on any rank is raised on every rank.

Plans and global metadata are never cached: reports of cached plans writing the first save's tensors again
are public (cases.md, C3).
"""

from __future__ import annotations

import inspect
import io
import os
import queue
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, _split_by_size_and_type
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _write_item
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from planner.errors import WorkFailedError, one_line
from planner.files import map_threads

COMMON = "common.pt"
_WRITE_BUFFER = 1 << 20
"""Records begin with small pieces; larger ones go to the kernel directly."""
_SERIALIZATION: dict[str, Any] = {}
if "serialization_format" in inspect.signature(_write_item).parameters:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    _SERIALIZATION["serialization_format"] = SerializationFormat.TORCH_SAVE


_write: Callable[..., WriteResult] = _write_item
"""Takes the transforms first in the torch versions that have them, which its types do not say."""


class SaveFailedError(WorkFailedError):
    """A save failed on at least one rank; raised on all of them, with each rank's reason."""


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Silence the deprecation notices of torch's checkpoint API that Megatron's code sets off."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch.*|megatron.*")
        yield


@contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Run the body on every rank of the default group, then let each know whether one of them failed.

    Without this a rank that fails alone leaves the others waiting in the next collective.

    Raises:
        SaveFailedError: on every rank, if the body raised on any; names each rank that failed and why.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as problem:
        error = problem
    own = None if error is None else f"{type(error).__name__}: {one_line(error)}"
    reasons: list[str | None] = [own]
    if dist.get_world_size() > 1:
        reasons = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, own)
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    if failed:
        raise SaveFailedError(f"{doing} failed on {'; '.join(failed)}") from error


class _ThreadWriter(FileSystemWriterAsync):  # type: ignore[misc]
    """Megatron's storage writer with the files written by threads of this process.

    ``results_queue`` is an ordinary queue here: the original one belongs to a spawned manager process.
    """

    def prepare_write_data(self, plan: Any, planner: Any) -> None:
        """Sort the planned items into one bucket per file; nothing is copied."""
        self.write_buckets = []
        for index, items in enumerate(_split_by_size_and_type(self.thread_count, plan.items)):
            if not items:
                continue
            name = f"{plan.storage_data.prefix}{index}{DEFAULT_SUFFIX}"
            resolved = [(item, planner.resolve_data(item)) for item in items]
            as_bytes = [pair for pair in resolved if pair[0].type == WriteItemType.BYTE_IO]
            as_tensors = [pair for pair in resolved if pair[0].type != WriteItemType.BYTE_IO]
            self.write_buckets.append((os.path.join(self.checkpoint_dir, name), name, (as_bytes, as_tensors)))

    def write_now(self) -> dict[str, str]:
        """Write and sync all planned buckets; the hash of each file. Results go where the finalisation looks."""
        buckets = self.write_buckets or []
        written = map_threads(self._write_bucket, buckets, len(buckets))
        self.results_queue: queue.Queue[Any] = queue.Queue()
        self.results_queue.put({index: results for index, (results, _) in enumerate(written)})
        return {bucket[1]: digest for bucket, (_, digest) in zip(buckets, written, strict=True)}

    def _write_bucket(self, bucket: Any) -> tuple[list[WriteResult], str]:
        path, storage_key, (as_bytes, as_tensors) = bucket
        transforms: Any = [self.transforms] if hasattr(self, "transforms") else []
        results = []
        with HashingStream(path) as stream:
            for item, data in as_bytes:
                results.append(_write(*transforms, stream, data, item, storage_key, **_SERIALIZATION))
            for item, tensor in as_tensors:
                results.append(_write(*transforms, stream, _on_host(tensor), item, storage_key, **_SERIALIZATION))
            return results, stream.sync()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU and owning its storage: a view would drag the whole storage into the file."""
    tensor = tensor.detach().cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize else tensor.clone()


class HashingStream(io.RawIOBase):
    """A file that hashes what is written through it, so that the read-back has something to be compared with."""

    def __init__(self, path: str) -> None:
        self._inner = open(path, "wb", buffering=_WRITE_BUFFER)  # noqa: SIM115 - closed in close()
        self._digest = xxhash.xxh3_128()
        self._at = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """Write all of ``data``."""
        self._digest.update(data)
        written = self._inner.write(data)
        self._at += written
        return written

    def tell(self) -> int:
        """Bytes written so far."""
        return self._at

    def sync(self) -> str:
        """Make the bytes durable; their xxh3-128."""
        self._inner.flush()
        os.fsync(self._inner.fileno())
        return str(self._digest.hexdigest())

    def close(self) -> None:
        """Close the file."""
        try:
            self._inner.close()
        finally:
            super().close()


class ThreadedSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """The ``torch_dist`` format, saved synchronously and in process."""

    def __init__(self, thread_count: int = 1) -> None:
        super().__init__("torch_dist", 1, thread_count=thread_count)
        self.written: dict[str, str] = {}
        """xxh3 of each shard file that this rank wrote, as it was handed to the kernel."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Plan, write and finalise (collective); an error on one rank is raised on all."""
        writer, tensors = _ThreadWriter(str(checkpoint_dir), thread_count=self.thread_count), {}
        with agreed("planning the save"):
            grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
            tensors = mcore_to_pyt_state_dict(grouped, False)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        (_, metadata, wrapper), *_ = save_state_dict_async_plan(tensors, writer, None, 0, planner=planner)
        with agreed("writing the shards"):
            self.written = writer.write_now()
        results = wrapper.gather_object(writer.retrieve_write_results())
        with agreed("writing the checkpoint's metadata"):
            if wrapper.is_coordinator:
                writer.finish(metadata, results)


def write_dist(
    state_dict: dict[str, Any],
    folder: Path,
    *,
    thread_count: int = 1,
    validate: bool = True,
) -> None:
    """Save a sharded state dict into ``folder`` (which rank 0 has made) as ``dist_checkpointing.save`` would.

    Collective over the default process group. The order is Megatron's: ``common.pt``, shards, ``.metadata``,
    ``metadata.json`` last.

    Raises:
        SaveFailedError: on every rank, naming each rank that failed and why.
    """
    with quiet_torch():
        sharded, common = save_preprocess(state_dict, validate)
    write_parts(sharded, common, folder, thread_count=thread_count)


def write_parts(sharded: Any, common: dict[str, Any], folder: Path, *, thread_count: int = 1) -> dict[str, str]:
    """:func:`write_dist` for a state that is split into its sharded and its common part already.

    Returns:
        xxh3 of the data files that this rank wrote, by name in ``folder``.
    """
    strategy, common_hash = ThreadedSaveStrategy(thread_count), None
    with quiet_torch():
        with agreed(f"writing {COMMON}"):
            if dist.get_rank() == 0:
                with HashingStream(str(folder / COMMON)) as stream:  # torch's own writer hides why a disk refuses
                    torch.save(common, cast(IO[bytes], stream))
                    common_hash = stream.sync()
        strategy.save(sharded, folder)
        with agreed("finishing the save"):
            if dist.get_rank() == 0:
                save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    return strategy.written if common_hash is None else strategy.written | {COMMON: common_hash}


def read_common(folder: Path) -> dict[str, Any]:
    """The part of a checkpoint that is not sharded."""
    with quiet_torch():
        loaded: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
    return loaded


def read_dist(state_dict: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a sharded state dict from a checkpoint of any layout (collective)."""
    with quiet_torch():
        loaded: dict[str, Any] = dist_checkpointing.load(state_dict, str(folder))
    return loaded
