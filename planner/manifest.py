"""The manifest: the list of a directory's files with sizes and hashes, whose presence is the commit point.

A checkpoint directory is *published* when its ``manifest.json`` is there and verifies. Unpublished
directories of our own are never read (DESIGN.md, Words and Contracts).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from planner.errors import BadInputError
from planner.files import fsync_dir, map_threads, write_json

FORMAT = 1
NAME = "manifest.json"
DESCRIPTION = "planaria.json"
"""A listed (so hashed) file of our own directories; it repeats the manifest's own fields, so that a flipped bit in
the manifest itself is found too."""
_OWN_FIELDS = ("job", "step", "consumed_samples", "incarnation", "created")
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

    def digest(self) -> str:
        """xxh3-128 of the content: the identity of what was published."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode())

    def own_fields(self) -> dict[str, Any]:
        """What the manifest says besides the files."""
        return {key: getattr(self, key) for key in _OWN_FIELDS}


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

    return dict(map_threads(entry, names, threads))


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a manifest says besides its files; the fields are those of :class:`Manifest`."""

    job: str
    step: int
    consumed_samples: int
    incarnation: int
    created: float
    extra: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] | None = None
    """Content of ``planaria.json``; None writes no such file."""

    def own_fields(self) -> dict[str, Any]:
        """What the manifest will say besides the files."""
        return {key: getattr(self, key) for key in _OWN_FIELDS}


DescribeFiles = Callable[[Path, Sequence[str]], dict[str, dict[str, Any]]]
"""(folder, relative names) → ``{name: {"bytes", "xxh3"}}``, as :func:`describe_files`."""


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
    described = Described(
        job=job,
        step=step,
        consumed_samples=consumed_samples,
        incarnation=incarnation,
        created=created,
        extra=extra or {},
    )
    return publish_described(folder, described)


def publish_described(folder: Path, described: Described, describe: DescribeFiles | None = None) -> Manifest:
    """:func:`publish` with the fields in one value and, if wanted, another way to read the files back."""
    manifest = prepare(folder, described, describe)
    commit(folder, manifest)
    return manifest


def prepare(folder: Path, described: Described, describe: DescribeFiles | None = None) -> Manifest:
    """Write ``planaria.json``, make every file and folder durable, hash them; the manifest that may be committed."""
    if described.description is not None:
        write_json(folder / DESCRIPTION, dict(described.description) | {"published": described.own_fields()})
    names = list_files(folder)
    for name in names:
        with (folder / name).open("rb") as stream:
            os.fsync(stream.fileno())
    for base, _, _ in os.walk(folder):
        fsync_dir(Path(base))
    return Manifest(files=(describe or describe_files)(folder, names), extra=described.extra, **described.own_fields())


def commit(folder: Path, manifest: Manifest) -> None:
    """Write a prepared manifest: from here on ``folder`` is published, and durably so, its own name included."""
    fsync_dir(folder.parent)
    write_json(folder / NAME, manifest.to_json())


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
        own = {key: data[key] for key in _OWN_FIELDS}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadInputError(f"{path}: a field is missing or has the wrong shape ({error})") from error
    for key, kind in (("job", str), ("step", int), ("consumed_samples", int), ("incarnation", int)):
        if not isinstance(own[key], kind) or isinstance(own[key], bool):
            raise BadInputError(f"{path}: {key}: {own[key]!r} is no {kind.__name__}")
    extra = {key: value for key, value in data.items() if key not in own and key not in ("files", "format")}
    return Manifest(**own, files=files, extra=extra)


def check_files(folder: Path, manifest: Manifest, *, hashes: bool = True, threads: int = 2) -> list[Problem]:
    """Every difference between what ``manifest`` says and what ``folder`` holds, by name of file."""
    if not manifest.files:
        return [Problem(NAME, "lists no files")]

    def check(item: tuple[str, Mapping[str, Any]]) -> Problem | None:
        name, entry = item
        problem = _file_problem(folder, name, entry, hashes)
        return Problem(name, problem) if problem else None

    problems = [problem for problem in map_threads(check, sorted(manifest.files.items()), threads) if problem]
    if DESCRIPTION in manifest.files and not any(problem.file == DESCRIPTION for problem in problems):
        problems += _manifest_problems(folder, manifest)
    return problems


def _manifest_problems(folder: Path, manifest: Manifest) -> list[Problem]:
    """Fields of the manifest that differ from what ``planaria.json`` repeats of them."""
    try:
        said = json.loads((folder / DESCRIPTION).read_text()).get("published")
    except (OSError, ValueError, AttributeError):
        return []
    if not isinstance(said, dict):
        return []
    return [
        Problem(NAME, f"{key} {value!r}, {DESCRIPTION} says {said[key]!r}")
        for key, value in manifest.own_fields().items()
        if key in said and said[key] != value
    ]


def _file_problem(folder: Path, name: str, entry: Mapping[str, Any], hashes: bool) -> str | None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        return "the manifest names a path outside the checkpoint"
    path = folder / name
    try:
        if not path.is_file():
            return "missing"
        if (size := path.stat().st_size) != entry.get("bytes"):
            return f"size {size}, manifest says {entry.get('bytes')}"
        return _hash_problem(path, entry) if hashes else None
    except (OSError, ValueError) as error:
        return f"cannot be read ({error})"


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
