"""Hashing what the disk holds, not what the page cache remembers, and comparing it with what was written."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from planner.errors import WorkFailedError
from planner.files import fsync_dir, map_threads

_BLOCK = 4 << 20
_PROBES = 64
"""Places of a file where the page cache is asked."""


class NotWhatWasWrittenError(WorkFailedError):
    """A file read back from storage differs from what was written to it."""


def drop_cache(path: Path) -> None:
    """Make a file durable and drop it from the page cache, so that the next read comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # dirty pages cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def hash_from_disk(path: Path) -> tuple[int, str]:
    """(bytes, xxh3-128) of a file as the disk holds it; the page cache is left to those who need it."""
    drop_cache(path)
    digest, size = xxhash.xxh3_128(), 0
    with _opened(path) as fd, mmap.mmap(-1, _BLOCK) as buffer:
        end = os.fstat(fd).st_size
        while size < end:
            got = os.preadv(fd, [buffer], size)
            if got != min(_BLOCK, end - size):
                raise OSError(f"{path}: {got} bytes came at {size}, {min(_BLOCK, end - size)} are there")
            with memoryview(buffer) as view, view[:got] as block:
                digest.update(block)
            size += got
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return size, digest.hexdigest()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor whose reads come from the disk: ahead of the reader, or past a cache that would not let go.

    Reading ahead is what the kernel does best. Memory file systems have no disk behind them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _cached(fd):
            with contextlib.suppress(OSError):
                direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                os.close(fd)
                fd = direct
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        yield fd
    finally:
        os.close(fd)


def _cached(fd: int) -> bool:
    """Whether the page cache still answers for a part of the file (``RWF_NOWAIT`` reads nothing that is not there)."""
    size = os.fstat(fd).st_size
    for offset in range(0, size, max(1, size // _PROBES)):
        try:
            if os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT):
                return True
        except BlockingIOError:
            continue
        except OSError:  # the file system cannot say
            return True
    return False


def describe_from_disk(
    folder: Path, names: Sequence[str], *, threads: int = 2, written: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """Sizes and hashes for a manifest, read back from the disk by several threads.

    Args:
        folder: the directory to be published.
        names: relative paths.
        threads: files read at a time.
        written: xxh3 of files as they were written; each must come back the same.

    Raises:
        NotWhatWasWrittenError: one does not; names it.
    """
    hashed = map_threads(lambda name: hash_from_disk(folder / name), names, threads)
    found = dict(zip(names, hashed, strict=True))
    for base, _, _ in os.walk(folder):
        fsync_dir(Path(base))
    for name, (size, digest) in found.items():
        wanted = (written or {}).get(name)
        if wanted is not None and wanted != digest:
            raise NotWhatWasWrittenError(f"{folder / name}: {size} bytes with hash {digest} came back, wrote {wanted}")
    return {name: {"bytes": size, "xxh3": digest} for name, (size, digest) in found.items()}
