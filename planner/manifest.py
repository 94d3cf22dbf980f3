"""The manifest: the list of a directory's files with sizes and hashes, whose presence is the commit point.

A checkpoint directory is *published* when its ``manifest.json`` is there and verifies. Unpublished
directories of our own are never read (DESIGN.md, Words and Contracts).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from planner.errors import BadInputError
from planner.files import fsync_dir, write_json

FORMAT = 1
NAME = "manifest.json"
_CHUNK = 4 << 20
_STEP_DIR = re.compile(r"^step-(\d{8})(\.hf)?$")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one file of a published directory."""

    file: str
    problem: str

    def to_json(self) -> dict[str, str]:
        """The shape of ``planaria checkpoint verify --json``'s ``errors``."""
        return {"file": self.file, "problem": self.problem}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a published directory holds. ``created`` is in seconds since the epoch."""

    job: str
    step: int
    consumed_samples: int
    incarnation: int
    created: float
    files: Mapping[str, Mapping[str, Any]]
    format: int = FORMAT
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document as written to disk."""
        own = {
            "format": self.format,
            "job": self.job,
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "incarnation": self.incarnation,
            "created": self.created,
            "files": {name: dict(entry) for name, entry in sorted(self.files.items())},
        }
        return own | dict(self.extra)


def step_dir_name(step: int, export: bool = False) -> str:
    """``step-00000050`` for a checkpoint, ``step-00000050.hf`` for its Hugging Face export."""
    return f"step-{step:08d}" + (".hf" if export else "")


def parse_step_dir(name: str) -> tuple[int, bool] | None:
    """(step, is an export) of a checkpoint directory's name, or None for any other name."""
    match = _STEP_DIR.match(name)
    return (int(match.group(1)), match.group(2) is not None) if match else None


def hash_file(path: Path) -> str:
    """The xxh3-128 of a file, read in a stream."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def list_files(folder: Path) -> list[str]:
    """Relative POSIX paths of all regular files below ``folder``, without the manifest itself, sorted."""
    found: list[str] = []
    for base, _, names in os.walk(folder):
        for name in names:
            relative = (Path(base) / name).relative_to(folder).as_posix()
            if relative != NAME:
                found.append(relative)
    return sorted(found)


def describe_files(folder: Path, names: Iterable[str], threads: int = 2) -> dict[str, dict[str, Any]]:
    """Sizes and hashes of files, read from disk: ``{path: {"bytes": int, "xxh3": hex}}``."""

    def entry(name: str) -> tuple[str, dict[str, Any]]:
        path = folder / name
        return name, {"bytes": path.stat().st_size, "xxh3": hash_file(path)}

    with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
        return dict(pool.map(entry, names))


def publish(
    folder: Path,
    *,
    job: str,
    step: int,
    consumed_samples: int,
    incarnation: int,
    created: float,
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """Make ``folder`` durable and commit it by writing its manifest last.

    Every file and folder is synced before the manifest is written, so a crash at any point leaves either
    no manifest or a true one.
    """
    names = list_files(folder)
    for name in names:
        with (folder / name).open("rb") as stream:
            os.fsync(stream.fileno())
    for base, _, _ in os.walk(folder):
        fsync_dir(Path(base))
    manifest = Manifest(
        job=job,
        step=step,
        consumed_samples=consumed_samples,
        incarnation=incarnation,
        created=created,
        files=describe_files(folder, names),
        extra=extra or {},
    )
    write_json(folder / NAME, manifest.to_json())
    fsync_dir(folder.parent)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a published directory.

    Raises:
        BadInputError: there is none, or it is not one of ours.
    """
    path = folder / NAME
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInputError(f"{folder}: not published (no {NAME})") from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: unreadable manifest ({error})") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: not a manifest (a JSON object is needed)")
    if data.get("format") != FORMAT:
        raise BadInputError(f"{path}: format {data.get('format')!r} is not known (this version reads {FORMAT})")
    try:
        files = {str(name): dict(entry) for name, entry in data["files"].items()}
        own = {key: data[key] for key in ("job", "step", "consumed_samples", "incarnation", "created")}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInputError(f"{path}: a field is missing or has the wrong shape ({error})") from error
    extra = {key: value for key, value in data.items() if key not in own and key not in ("files", "format")}
    return Manifest(**own, files=files, extra=extra)


def check_files(folder: Path, manifest: Manifest, *, hashes: bool = True) -> list[Problem]:
    """Every difference between what ``manifest`` says and what ``folder`` holds, by name of file."""
    problems: list[Problem] = []
    for name, entry in sorted(manifest.files.items()):
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            problems.append(Problem(name, "the manifest names a path outside the checkpoint"))
        elif not path.is_file():
            problems.append(Problem(name, "missing"))
        elif path.stat().st_size != entry.get("bytes"):
            problems.append(Problem(name, f"size {path.stat().st_size}, manifest says {entry.get('bytes')}"))
        elif hashes and (problem := _hash_problem(path, entry)):
            problems.append(Problem(name, problem))
    return problems


def _hash_problem(path: Path, entry: Mapping[str, Any]) -> str | None:
    if "xxh3" in entry:
        found, wanted = hash_file(path), entry["xxh3"]
    elif "sha256" in entry:
        import hashlib

        with path.open("rb") as stream:
            found, wanted = hashlib.file_digest(stream, "sha256").hexdigest(), entry["sha256"]
    else:
        return "the manifest holds no hash of it"
    return None if found == wanted else f"hash {found}, manifest says {wanted}"


def verify(folder: Path, *, hashes: bool = True) -> list[Problem]:
    """All problems of a directory that should be published; an empty list means it can be used.

    A missing or unreadable manifest is reported as a problem of the manifest, not raised.
    """
    try:
        manifest = read_manifest(folder)
    except BadInputError as error:
        return [Problem(NAME, str(error))]
    return check_files(folder, manifest, hashes=hashes)
