"""A job's folder: append-only line files whose committed length stands in the job's record.

A line is written before the record that speaks of it. A coordinator that died in between finds more in a file
than its record says, cuts the file back and writes the lines again from the same reports: none lost, none twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from planner.files import fsync_dir, write_json
from planner.pretrain_config import PretrainConfig


def checkpoint_folder(config: PretrainConfig, folder: Path) -> Path:
    """Where a job's checkpoints (or, where those are at a URL, its exports alone) are on this host."""
    named = config.checkpoint.dir
    return Path(named).expanduser() if named and "://" not in named else folder / "checkpoints"


def published_at(config: PretrainConfig, folder: Path) -> str:
    """The folder or URL in which a job's checkpoints are published; ``folder`` is the job's."""
    named = config.checkpoint.dir
    return named if named and "://" in named else str(checkpoint_folder(config, folder))


LINES = ("metrics.jsonl", "samples.jsonl", "events.jsonl")
FOLDERS = ("logs", "checkpoints", "reports")


class JobFolder:
    """``<state-dir>/jobs/<job id>/``; written by the supervisor alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self, config: Mapping[str, Any]) -> None:
        """Make the folder with its config; nothing happens where it is there."""
        for name in FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        for name in LINES:
            (self.path / name).touch()
        if not (self.path / "config.json").exists():
            write_json(self.path / "config.json", dict(config))
        fsync_dir(self.path)

    def sizes(self) -> dict[str, int]:
        """Bytes of each line file now."""
        return {name: _size(self.path / name) for name in LINES}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Cut each file back to its committed length."""
        for name in LINES:
            path, committed = self.path / name, sizes.get(name, 0)
            if _size(path) > committed:
                os.truncate(path, committed)

    def append(self, file: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines in one write."""
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        if not data:
            return
        with (self.path / file).open("ab") as stream:
            stream.write(data)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def finite(value: Any) -> Any:
    """``value`` with NaN and infinities as null, since JSON has neither."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value
