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

_BLOCK = 32 << 20


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
    """(bytes, xxh3-128) of a file as the disk holds it.

    Blocks are large enough that the disk is kept busy by one of them, and go past the page cache where the file system
    allows that, which saves a copy and leaves the cache to those who need it.
    """
    drop_cache(path)
    digest, size = xxhash.xxh3_128(), 0
    with _opened_directly(path) as fd, mmap.mmap(-1, _BLOCK) as buffer:
        end = os.fstat(fd).st_size
        while size < end:
            got = os.preadv(fd, [buffer], size)
            if got != min(_BLOCK, end - size):
                raise OSError(f"{path}: {got} bytes came at {size}, {min(_BLOCK, end - size)} are there")
            with memoryview(buffer) as view, view[:got] as block:
                digest.update(block)
            size += got
    return size, digest.hexdigest()


@contextlib.contextmanager
def _opened_directly(path: Path) -> Iterator[int]:
    """A descriptor that reads past the page cache, or an ordinary one where that cannot be (memory file systems)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


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
