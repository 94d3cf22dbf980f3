"""The snapshot tier: training state in shared host memory, outside the rank and outliving it.

A rank owns one *shard* (its tensor and pipeline coordinates) with two buffers. Each buffer is a file in memory
with raw tensors and, once the copy is whole and hashed, a JSON description beside it whose presence is the
commit. :class:`pretrain.snapshot_writer.SnapshotWriter` fills them.

Light: torch is loaded where tensors are touched alone, so that an agent can look after snapshots without it.

Readers (persister, peer sender, recovery) hold a shared lock on the buffer they read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from planner.errors import PlanariaError
from planner.files import write_atomic, write_json

if TYPE_CHECKING:
    import torch

FORMAT = 1
BUFFERS = 2
ALIGNMENT = 64
_HASH_CHUNK = 8 << 20


class SnapshotError(PlanariaError):
    """A snapshot cannot be taken or used; training goes on with the tiers that are left."""


@dataclass(frozen=True)
class Coordinate:
    """Which part of the model a shard holds: its place in the layout that wrote it."""

    tensor: int
    pipeline: int
    tensor_rank: int
    pipeline_rank: int
    replica: int = 0
    """Data-parallel rank, where optimizer state is sharded over replicas; else 0."""
    replicas: int = 1

    @property
    def name(self) -> str:
        """Unique file stem of this shard within its layout."""
        return (
            f"t{self.tensor_rank}of{self.tensor}-p{self.pipeline_rank}of{self.pipeline}"
            f"-r{self.replica}of{self.replicas}"
        )

    @property
    def layout(self) -> tuple[int, int, int]:
        """Shards of one layout belong together."""
        return self.tensor, self.pipeline, self.replicas


@dataclass(frozen=True)
class TensorEntry:
    """One local tensor of a shard: its place in the global tensor, and where its bytes are in the buffer."""

    key: str
    dtype: str
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    prepend_axis_num: int
    replica_id: tuple[int, ...]
    allow_shape_mismatch: bool
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Description:
    """What one committed buffer holds."""

    job: str
    incarnation: int
    step: int
    consumed_samples: int
    created: float
    persist: bool
    """Whether the persister is to make a checkpoint of it."""
    coordinate: Coordinate
    nbytes: int
    xxh3: str
    tensors: tuple[TensorEntry, ...]
    objects: tuple[dict[str, Any], ...]
    """Sharded objects: key, global_shape, global_offset, replica_id, data (encoded)."""
    common: Any
    """The unsharded state, encoded."""
    description: dict[str, Any]
    """Content of the checkpoint's ``planaria.json``."""
    token: int = 0
    """Fencing token of the lease under which it was taken."""

    def to_json(self) -> dict[str, Any]:
        """The document."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        own["coordinate"] = vars(self.coordinate)
        own["tensors"] = [vars(entry) for entry in self.tensors]
        return {"format": FORMAT} | own

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Description:
        """The description that :meth:`to_json` wrote.

        Raises:
            SnapshotError: another format or shape.
        """
        try:
            if data.pop("format") != FORMAT:
                raise SnapshotError("a snapshot of another format")
            data["coordinate"] = Coordinate(**data["coordinate"])
            data["tensors"] = tuple(TensorEntry(**_tuples(entry)) for entry in data["tensors"])
            data["objects"] = tuple(data["objects"])
            return cls(**data)
        except (KeyError, TypeError, AttributeError) as error:
            raise SnapshotError(f"not a snapshot's description ({error})") from error


def _tuples(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


def job_dir(memory_dir: Path, job: str) -> Path:
    """The folder of a job's snapshots on this node."""
    return memory_dir / f"planaria-snapshots-{os.getuid()}" / job


def remove_job(memory_dir: Path, job: str) -> None:
    """Give the memory of a job's snapshots back; for the agent, when the job is over."""
    folder = job_dir(memory_dir, job)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def leave_drill(folder: Path, step: int, kind: str) -> None:
    """Leave word for the persister that an injected fault is to hit the checkpoint of ``step``."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / f"drill-{step}-{kind}").touch(mode=0o600)


def take_drill(folder: Path, step: int, kind: str) -> bool:
    """Whether such word was left; it is taken away."""
    try:
        (folder / f"drill-{step}-{kind}").unlink()
    except OSError:
        return False
    return True


def relabel(folder: Path, *, incarnation: int, token: int, at_most: int) -> None:
    """Make a node's snapshots up to a step those of a new incarnation that goes on from there; newer ones go.

    A buffer that is being read keeps its bytes: only the description changes, and its reader finds its right to
    publish gone.
    """
    for found in find(folder):
        for shard in found.shards:
            said = shard.description
            with shard.buffer.lock(exclusive=False) as free:
                if not free:  # it is being overwritten
                    continue
                if said.step > at_most:
                    shard.buffer.invalidate()
                elif (said.incarnation, said.token) != (incarnation, token):
                    shard.buffer.commit(replace(said, incarnation=incarnation, token=token))


_SETTLED = "settled"
_SETTLED_KEPT = 8


def settle(folder: Path, found: SnapshotSet) -> None:
    """Note that a marked snapshot is published or given up, so that its buffers may be used again (the persister)."""
    kept = [*_read_settled(folder), [[found.step, shard.description.created] for shard in found.shards]]
    write_json(folder / _SETTLED, {"settled": kept[-_SETTLED_KEPT:]}, mode=0o600)


def _read_settled(folder: Path) -> list[list[list[float]]]:
    try:
        return list(json.loads((folder / _SETTLED).read_text())["settled"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def awaited(folder: Path, said: Description) -> bool:
    """Whether a shard is marked for the persister, which has not come to an end with it."""
    return said.persist and not any([said.step, said.created] in shards for shards in _read_settled(folder))


# ---------------------------------------------------------------- one buffer


class Buffer:
    """One buffer of a shard: a memory file, its description, and the lock between its writer and its readers."""

    def __init__(self, folder: Path, stem: str, index: int) -> None:
        self.data_path = folder / f"{stem}.{index}.bin"
        self.text_path = folder / f"{stem}.{index}.json"

    def describe(self) -> Description | None:
        """What it holds, or None where nothing is committed."""
        try:
            return Description.from_json(json.loads(self.text_path.read_text()))
        except (OSError, ValueError, SnapshotError):
            return None

    @contextlib.contextmanager
    def lock(self, *, exclusive: bool) -> Iterator[bool]:
        """Hold the buffer; yields whether it was free. Never waits."""
        fd = os.open(self.data_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    def invalidate(self) -> None:
        """Take the commit back before the bytes change."""
        self.text_path.unlink(missing_ok=True)

    def commit(self, description: Description) -> None:
        """Make the content valid; the last thing that a copy does."""
        write_atomic(self.text_path, json.dumps(description.to_json()), mode=0o600)


class Mapping:
    """A buffer's memory as a flat byte tensor; pages are there before the first copy."""

    def __init__(self, path: Path, nbytes: int, *, writable: bool) -> None:
        self.nbytes = nbytes
        self._pinned = False
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC if writable else os.O_RDONLY | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            if writable and os.fstat(fd).st_size != nbytes:
                os.ftruncate(fd, 0)
                if nbytes:
                    os.posix_fallocate(fd, 0, nbytes)
            elif os.fstat(fd).st_size < nbytes:
                raise SnapshotError(f"{path}: {os.fstat(fd).st_size} bytes, its description says {nbytes}")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(fd, max(1, nbytes), flags=flags, prot=protection) if nbytes else None
        finally:
            os.close(fd)

    def view(self) -> memoryview:
        """All bytes."""
        return memoryview(self._map)[: self.nbytes] if self._map is not None else memoryview(bytearray())

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """One tensor of the buffer, sharing its memory; read-only mappings give tensors that must not be written."""
        import torch

        from pretrain import plain

        dtype = plain.named_dtype(entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.local_shape, dtype=dtype)
        import warnings

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.offset)
        return flat.reshape(entry.local_shape)

    def pin(self) -> None:
        """Let a GPU write into this memory without a detour (once: a rank's buffers keep their size for its life)."""
        import torch

        if not self._pinned and self.nbytes:
            address = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, self.nbytes, 0)))
            self._pinned = True

    def hash(self) -> str:
        """xxh3-128 of all bytes."""
        digest = xxhash.xxh3_128()
        view = self.view()
        for start in range(0, self.nbytes, _HASH_CHUNK):
            digest.update(view[start : start + _HASH_CHUNK])
        return digest.hexdigest()


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Shard:
    """One committed buffer, found by a reader."""

    buffer: Buffer
    description: Description


@dataclass(frozen=True)
class SnapshotSet:
    """Shards of one step and one layout."""

    step: int
    incarnation: int
    shards: tuple[Shard, ...]

    @property
    def complete(self) -> bool:
        """Whether every coordinate of the layout is there."""
        layout = self.shards[0].description.coordinate.layout
        return len({shard.description.coordinate for shard in self.shards}) == layout[0] * layout[1] * layout[2]


def find(folder: Path) -> list[SnapshotSet]:
    """All snapshots in a job's folder, newest first (by step, then incarnation); some may be incomplete."""
    groups: dict[tuple[int, int, tuple[int, int, int]], dict[Coordinate, Shard]] = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        if path.name.startswith("."):
            continue
        stem, _, index = path.name.removesuffix(".json").rpartition(".")
        if not stem or not index.isdigit():
            continue
        buffer = Buffer(folder, stem, int(index))
        said = buffer.describe()
        if said is not None:
            group = groups.setdefault((said.step, said.incarnation, said.coordinate.layout), {})
            other = group.get(said.coordinate)
            if other is None or other.description.created <= said.created:  # of two of one step the later counts
                group[said.coordinate] = Shard(buffer, said)
    return [
        SnapshotSet(step, incarnation, tuple(group.values()))
        for (step, incarnation, _), group in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


@contextlib.contextmanager
def opened(shard: Shard) -> Iterator[Mapping]:
    """Hold one shard against being overwritten, and map it.

    Raises:
        SnapshotError: it was overwritten or is being overwritten now.
    """
    with shard.buffer.lock(exclusive=False) as free:
        said = shard.buffer.describe() if free else None
        if said is None or (said.step, said.incarnation, said.xxh3) != (
            shard.description.step,
            shard.description.incarnation,
            shard.description.xxh3,
        ):
            raise SnapshotError(f"{shard.buffer.data_path}: step {shard.description.step} was overwritten meanwhile")
        yield Mapping(shard.buffer.data_path, shard.description.nbytes, writable=False)


def verify(shard: Shard, mapping: Mapping) -> None:
    """Compare a shard's bytes with its hash.

    Raises:
        SnapshotError: they differ.
    """
    found = mapping.hash()
    if found != shard.description.xxh3:
        raise SnapshotError(
            f"{shard.buffer.data_path}: hash {found}, description says {shard.description.xxh3} "
            f"(step {shard.description.step})"
        )
