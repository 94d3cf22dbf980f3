"""Data sets in the user's Hugging Face cache, without the network.

``datasets`` keeps two things: what it built (``datasets/``), which it loads offline by itself, and the files as they
were downloaded (``hub/``, also by ``hf download`` or ``snapshot_download``), which offline it does not look at. Here it
does: a data set that is not built, or not in the configuration asked for, is built from its downloaded files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planner.errors import BadInputError

_PART = re.compile(r"^(.*)-(\d{5})-of-(\d{5})(\..*)$")
_NO_DATA = frozenset({"README.md", ".gitattributes", "LICENSE", "LICENSE.md", "dataset_infos.json"})


def _home() -> Path:
    return Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()


def hub_folder() -> Path:
    """Where downloaded files lie."""
    return Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub")


def built_folder() -> Path:
    """Where data sets lie as ``datasets`` built them."""
    return Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets")


def snapshot(name: str) -> Path | None:
    """The downloaded files of a data set: those of its main branch, else the newest; None where there is no data."""
    base = hub_folder() / f"datasets--{name.replace('/', '--')}"
    try:
        found = [base / "snapshots" / (base / "refs" / "main").read_text().strip()]
    except OSError:
        found = sorted((base / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in found if path.is_dir() and any(_data_files(path))), None)


def _data_files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name not in _NO_DATA)


def missing_parts(folder: Path) -> list[str]:
    """Files that must be there because others say ``-00000-of-00002``, and are not."""
    parts = [(path, match) for path in _data_files(folder) if (match := _PART.match(path.name))]
    wanted = {
        path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}{match[4]}")
        for path, match in parts
        for number in range(int(match[3]))
    }
    return sorted(str(path.relative_to(folder)) for path in wanted - {path for path, _ in parts})


def cached_datasets() -> set[str]:
    """Data sets that can be loaded offline, as ``owner/name`` or ``name``, in lower case."""
    names = [path.name.removeprefix("datasets--").replace("--", "/") for path in hub_folder().glob("datasets--*")]
    found = {name for name in names if snapshot(name) is not None}
    found |= {path.name.replace("___", "/") for path in built_folder().glob("*") if path.is_dir()}
    return {name.lower() for name in found if name not in ("json", "downloads", "text", "csv", "parquet", "generator")}


def install() -> None:
    """Let ``datasets.load_dataset`` fall back on downloaded files in this process."""
    import datasets

    real = datasets.load_dataset
    if getattr(real, "reads_snapshots", False):
        return

    def load_dataset(path: str, *arguments: Any, **named: Any) -> Any:
        try:
            return real(path, *arguments, **named)
        except (OSError, ValueError):
            folder = snapshot(path) if isinstance(path, str) else None
            if folder is None:
                raise
            if missing := missing_parts(folder):
                raise BadInputError(
                    f"{folder}: only a part of the data set is there, {missing[0]} is missing"
                ) from None
            return real(str(folder), *arguments, **named)

    load_dataset.reads_snapshots = True  # type: ignore[attr-defined]
    datasets.load_dataset = load_dataset
