"""Hashing what the disk holds, not what the page cache remembers, and comparing it with what was written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from planner.errors import WorkFailedError
from planner.files import fsync_dir, map_threads

_CHUNK = 2 << 20


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
    """(bytes, xxh3-128) of a file as the disk holds it."""
    drop_cache(path)
    digest, size = xxhash.xxh3_128(), 0
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        # The kernel reads ahead while a part is hashed; reader threads and explicit prefetching measured no faster.
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := stream.readinto(buffer):
            digest.update(view[:count])
            size += count
    return size, digest.hexdigest()


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
