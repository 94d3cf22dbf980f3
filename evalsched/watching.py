"""Which checkpoints of a directory are complete, in what order they are evaluated: pure, over listings.

A checkpoint counts as complete when it is published (its manifest is there), or, for a foreign directory, when every
file that its index names is there and no size changed between two looks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evalsched.models import ModelFacts
from planner import manifest
from planner.errors import BadInputError

Layout = Literal["huggingface", "megatron"]
Sizes = Mapping[str, tuple[int, int]]
"""Relative path → (bytes, modification time in nanoseconds)."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A directory that looks like a checkpoint."""

    path: Path
    layout: Layout
    step: int | None
    """From its manifest or the last number in its name."""
    published: bool
    sizes: Sizes
    changed: float
    """When its newest file changed, seconds since the epoch."""
    problem: str = ""
    """Why it is not complete."""


def look(directory: Path) -> list[Candidate]:
    """Checkpoints directly below ``directory`` (or the directory itself, where it is one).

    An export beside its Megatron checkpoint stands for both.
    """
    found = [one for path in _folders(directory) if (one := examine(path)) is not None]
    exported = {one.path.name.removesuffix(".hf") for one in found if one.layout == "huggingface"}
    return [one for one in found if one.layout == "huggingface" or one.path.name not in exported]


def _folders(directory: Path) -> list[Path]:
    if (directory / "config.json").is_file() or (directory / "megatron").is_dir():
        return [directory]
    names = (path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(names)


def examine(path: Path) -> Candidate | None:
    """What ``path`` is, or None where it is no checkpoint in any layout (yet)."""
    if (path / "megatron").is_dir():
        layout: Layout = "megatron"
    elif (path / "config.json").is_file():
        layout = "huggingface"
    else:
        return None
    published = (path / manifest.NAME).is_file()
    problem = ""
    if layout == "megatron" and not published:
        problem = "not published yet (no manifest)"
    elif layout == "huggingface":
        try:
            ModelFacts.read(path)
        except BadInputError as error:
            problem = str(error)
    sizes = _sizes(path)
    newest = max((changed for _, changed in sizes.values()), default=0) / 1e9
    return Candidate(
        path=path, layout=layout, step=step_of(path), published=published, sizes=sizes, changed=newest, problem=problem
    )


def _sizes(path: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for file in path.rglob("*"):
        try:
            stat = file.stat()
        except OSError:
            continue
        if file.is_file() and ".planaria" not in file.parts:
            found[file.relative_to(path).as_posix()] = (stat.st_size, stat.st_mtime_ns)
    return found


def step_of(path: Path) -> int | None:
    """The training step of a checkpoint: its manifest's, else the last number in its name."""
    try:
        return manifest.read_manifest(path).step
    except BadInputError:
        numbers = re.findall(r"\d+", path.name)
        return int(numbers[-1]) if numbers else None


def complete(now: Sequence[Candidate], before: Mapping[Path, Sizes]) -> list[Candidate]:
    """Those that can be evaluated: published, or whole and unchanged since the look before."""
    return [one for one in now if not one.problem and (one.published or before.get(one.path) == one.sizes)]


def in_order(candidates: Sequence[Candidate], order: str) -> list[Candidate]:
    """Newest first, or oldest first; by step where every one has a step, else by time of change."""
    by_step = all(one.step is not None for one in candidates)
    ordered = sorted(candidates, key=lambda one: ((one.step or 0) if by_step else one.changed, one.path.name))
    return ordered[::-1] if order == "newest" else ordered
