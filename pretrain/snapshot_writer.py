"""Taking snapshots of one rank's shard, in the rank.

State changes only in the optimizer step, so the copy runs in a thread beside the next forward and backward pass and
:meth:`SnapshotWriter.finish` is called before the update after it; what it waits is the stall. The writer takes the
oldest buffer that nobody reads, and never waits for a reader.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.snapshot import (
    ALIGNMENT,
    BUFFERS,
    Buffer,
    Coordinate,
    Description,
    Mapping,
    SnapshotError,
    TensorEntry,
    awaited,
)

if TYPE_CHECKING:
    import torch


@dataclass
class Taken:
    """How one snapshot went. Seconds."""

    step: int
    begin_seconds: float
    """Stall when it was begun (listing the tensors)."""
    wait_seconds: float = 0.0
    """Stall before the next update (what of the copy was not finished)."""
    copy_seconds: float = 0.0
    nbytes: int = 0
    skipped: str = ""
    """Why nothing was taken; empty when it was."""

    @property
    def stall_seconds(self) -> float:
        """Training time that it cost."""
        return self.begin_seconds + self.wait_seconds


@dataclass
class _Flight:
    taken: Taken
    copied: Future[float]
    committed: Future[None]
    updates: int = 0


@dataclass
class SnapshotWriter:
    """Takes snapshots of one rank's shard.

    Call :meth:`begin` after an optimizer step, :meth:`finish` before every optimizer step, :meth:`close` at the
    end. All in one thread.
    """

    folder: Path
    """The job's folder (:func:`job_dir`)."""
    coordinate: Coordinate
    clock: Callable[[], float]
    """Monotonic seconds."""
    memory_bytes: int | None = None
    """Bound of this shard's buffers together; None: what the file system has free."""
    copy_threads: int = 1
    taken: list[Taken] = field(default_factory=list)
    """The last few snapshots, newest last."""
    _flight: _Flight | None = None
    _maps: dict[int, Mapping] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._buffers = [Buffer(self.folder, self.coordinate.name, index) for index in range(BUFFERS)]
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")

    def begin(self, source: Source) -> Taken:
        """Start copying; the live tensors must not change before :meth:`finish` returns.

        A snapshot that cannot be taken (no memory, every buffer being read) is skipped, with the reason in the
        result: a missing snapshot must not stop training.
        """
        started = self.clock()
        self.wait_committed()
        tensors, nbytes = _place(source)
        taken = Taken(step=source.step, begin_seconds=0.0, nbytes=nbytes)
        try:
            index, lock = self._choose(nbytes)
        except SnapshotError as error:
            taken.skipped = str(error)
        else:
            copied: Future[float] = Future()
            moment = _moment(tensor for _, tensor in tensors)
            committed = self._pool.submit(self._copy, index, lock, source, tensors, nbytes, copied, moment)
            self._flight = _Flight(taken, copied, committed)
        taken.begin_seconds = self.clock() - started
        self.taken = [*self.taken[-99:], taken]
        return taken

    def finish(self) -> float:
        """Wait until the tensors have been copied; returns the seconds waited. To be called before every update.

        From the second update on it also waits for the commit, so that at every moment the shards of all ranks
        have a step in common.
        """
        flight = self._flight
        if flight is None:
            return 0.0
        started = self.clock()
        try:
            flight.taken.copy_seconds = flight.copied.result()
        except SnapshotError as error:
            flight.taken.skipped = str(error)
            self.wait_committed()
        flight.updates += 1
        if flight.updates > 1:
            self.wait_committed()
        waited = self.clock() - started
        flight.taken.wait_seconds += waited
        return waited

    def wait_committed(self) -> None:
        """Wait until the snapshot in flight, if any, is committed or has failed (then its ``skipped`` says why)."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            try:
                flight.committed.result()
            except Exception as error:  # memory that is used up, a folder that is gone: training goes on without
                flight.taken.skipped = flight.taken.skipped or f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Finish what is in flight and unmap; the files stay for whoever recovers from them."""
        with contextlib.suppress(Exception):
            self.wait_committed()
        self._pool.shutdown()
        self._maps.clear()

    def _choose(self, nbytes: int) -> tuple[int, contextlib.ExitStack]:
        """The buffer to overwrite, locked: one that holds nothing, else the oldest that nobody reads or waits for."""
        held = [(self._buffers[index].describe(), index) for index in range(BUFFERS)]
        roomy = [(said, index) for said, index in held if self._fits(index, nbytes)]
        if not roomy:
            raise SnapshotError(f"{self.folder}: no room for {nbytes / 1e6:.0f} MB of snapshot")
        for said, index in sorted(roomy, key=lambda item: (item[0] is not None, item[0].step if item[0] else 0)):
            if said is not None and awaited(self.folder, said):
                continue
            stack = contextlib.ExitStack()
            if stack.enter_context(self._buffers[index].lock(exclusive=True)):
                return index, stack
            stack.close()
        raise SnapshotError("every buffer is being read or waits to be published")

    def _fits(self, index: int, nbytes: int) -> bool:
        """Whether buffer ``index`` has its memory already or can get it within the bound."""
        sizes = [buffer.data_path.stat().st_size if buffer.data_path.exists() else 0 for buffer in self._buffers]
        if sizes[index] == nbytes:
            return True
        total = sum(sizes) - sizes[index] + nbytes
        if self.memory_bytes is not None and total > self.memory_bytes:
            return False
        return shutil.disk_usage(self.folder).free + sizes[index] > nbytes

    def _copy(
        self,
        index: int,
        lock: contextlib.ExitStack,
        source: Source,
        tensors: list[tuple[TensorEntry, torch.Tensor]],
        nbytes: int,
        copied: Future[float],
        moment: Any,
    ) -> None:
        import torch

        with lock:
            started = self.clock()
            try:
                mapping = self._mapping(index, nbytes)
                with torch.no_grad(), _side_stream(moment) as beside:
                    if beside:
                        mapping.pin()
                    for entry, tensor in tensors:
                        mapping.tensor(entry).copy_(tensor, non_blocking=beside)
            except BaseException as error:
                copied.set_exception(SnapshotError(f"snapshot of step {source.step}: {error}"))
                raise
            copied.set_result(self.clock() - started)
            entries = tuple(entry for entry, _ in tensors)
            self._buffers[index].commit(source.describe(self.coordinate, entries, nbytes, mapping.hash()))

    def _mapping(self, index: int, nbytes: int) -> Mapping:
        """The buffer's memory, its old commit taken back; kept mapped from snapshot to snapshot."""
        self._buffers[index].invalidate()
        mapping = self._maps.get(index)
        if mapping is None or mapping.nbytes != nbytes:
            mapping = Mapping(self._buffers[index].data_path, nbytes, writable=True)
            self._maps[index] = mapping
        return mapping


def _moment(tensors: Iterable[torch.Tensor]) -> Any:
    """On a GPU: the point of the present stream after which the tensors hold what is to be copied; else None."""
    if not any(tensor.is_cuda for tensor in tensors):
        return None
    import torch

    return torch.cuda.current_stream().record_event()


@contextlib.contextmanager
def _side_stream(moment: Any) -> Iterator[bool]:
    """Copy on a stream of its own beside the next forward pass, and wait for its end; False where there is no GPU."""
    if moment is None:
        yield False
        return
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_event(moment)
    with torch.cuda.stream(stream):
        yield True
    stream.synchronize()


@dataclass(frozen=True)
class Source:
    """What a snapshot is taken of: live tensors with their places, and the plain state as of now."""

    job: str
    incarnation: int
    token: int
    step: int
    consumed_samples: int
    created: float
    persist: bool
    tensors: tuple[Any, ...]
    """Megatron ``ShardedTensor`` objects that refer to live tensors."""
    objects: tuple[dict[str, Any], ...]
    common: Any
    description: dict[str, Any]

    def describe(self, coordinate: Coordinate, entries: tuple[TensorEntry, ...], nbytes: int, xxh3: str) -> Description:
        """The description of the finished copy."""
        return Description(
            job=self.job,
            incarnation=self.incarnation,
            token=self.token,
            step=self.step,
            consumed_samples=self.consumed_samples,
            created=self.created,
            persist=self.persist,
            coordinate=coordinate,
            nbytes=nbytes,
            xxh3=xxh3,
            tensors=entries,
            objects=self.objects,
            common=self.common,
            description=self.description,
        )


def _place(source: Source) -> tuple[list[tuple[TensorEntry, torch.Tensor]], int]:
    """Where each tensor goes in the buffer, and how large that is."""
    from pretrain import plain

    placed = []
    offset = 0
    for sharded in source.tensors:
        data = sharded.data.detach()
        nbytes = data.numel() * data.itemsize
        entry = TensorEntry(
            key=sharded.key,
            dtype=plain.dtype_name(data.dtype),
            local_shape=tuple(sharded.local_shape),
            global_shape=tuple(sharded.global_shape),
            global_offset=tuple(sharded.global_offset),
            axis_fragmentations=sharded.axis_fragmentations,
            prepend_axis_num=sharded.prepend_axis_num,
            replica_id=_as_tuple(sharded.replica_id),
            allow_shape_mismatch=sharded.allow_shape_mismatch,
            offset=offset,
            nbytes=nbytes,
        )
        placed.append((entry, data.reshape(entry.local_shape)))
        offset = -(-(offset + nbytes) // ALIGNMENT) * ALIGNMENT
    return placed, offset


def _as_tuple(replica_id: Any) -> tuple[int, ...]:
    return (replica_id,) if isinstance(replica_id, int) else tuple(replica_id)
