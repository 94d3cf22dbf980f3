"""Atomic writes (write, fsync, rename, fsync the folder) and append-only JSON lines."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def map_threads(function: Callable[[ItemT], ResultT], items: Iterable[ItemT], threads: int) -> list[ResultT]:
    """``function`` of every item, in order, by several threads; with one thread or one item in the calling one."""
    listed = list(items)
    if threads <= 1 or len(listed) <= 1:
        return [function(item) for item in listed]
    with ThreadPoolExecutor(max_workers=threads) as pool:
        return list(pool.map(function, listed))


def fsync_dir(folder: Path) -> None:
    """Make a folder's entries durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data`` so that a reader or a crash sees the old file or the new one, never a part.

    The temporary file stands beside the target and begins with a dot; it is removed if anything fails.
    """
    raw = data.encode() if isinstance(data, str) else data
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Replace ``path`` atomically by ``value`` as indented JSON."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=False) + "\n", mode)


def append_json_line(path: Path, value: Any) -> None:
    """Append one JSON document as a line, in a single write so that lines of several writers never mix.

    If a crash cut the line before it, the new line starts on a fresh one: only the cut line is lost.
    """
    line = (json.dumps(value) + "\n").encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        os.write(fd, line)
    finally:
        os.close(fd)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of a JSON-lines file; a line that a crash cut is left out."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        for raw in stream:
            if not raw.strip() or not raw.endswith(b"\n"):
                continue
            try:
                yield json.loads(raw)
            except ValueError:
                continue
