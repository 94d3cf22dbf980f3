"""Digests of what answers depend on: a model's weights, its tokenizer, folders of task files.

Hashes of files are remembered by path, size, modification and change time, so that a second look at a
large checkpoint costs a ``stat`` per file. A digest is always of content: the same weights in another
folder have the same digest, other weights in the same folder another one.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evalsched.types import digest_of
from planner.errors import BadInputError
from planner.files import write_json
from planner.manifest import NAME as MANIFEST_NAME
from planner.manifest import hash_file

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
MODEL_FILES = ("config.json", "generation_config.json", "*.index.json", "adapter_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "tokenization_*.py",
)
_TASK_SUFFIXES = frozenset({".yaml", ".yml", ".py", ".jinja", ".j2"})


def cache_folder() -> Path:
    """The user's cache: ``PLANARIA_CACHE``, else ``$XDG_CACHE_HOME/planaria``, else ``~/.cache/planaria``."""
    if own := os.environ.get("PLANARIA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "planaria"


class FileHashes:
    """xxh3-128 of files, remembered in one JSON file by (size, mtime, ctime, inode).

    A lost or broken memory costs time only. Writers replace it whole; the last one wins.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_folder() / "file-hashes.json"
        self._known: dict[str, list[Any]] = self._read()
        self._changed = False

    def _read(self) -> dict[str, list[Any]]:
        try:
            data = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def of(self, path: Path) -> str:
        """The hash of one file's content."""
        resolved = path.resolve()
        stat = resolved.stat()
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        known = self._known.get(str(resolved))
        if known and known[:4] == mark:
            return str(known[4])
        digest = hash_file(resolved)
        self._known[str(resolved)] = [*mark, digest]
        self._changed = True
        return digest

    def save(self) -> None:
        """Keep what was learned; an unwritable cache is no error."""
        if not self._changed:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._read() | self._known)
        self._changed = False


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in found if path.name != MANIFEST_NAME)


def _digest_files(folder: Path, paths: Iterable[Path], hashes: FileHashes | None) -> str:
    memory = hashes or FileHashes()
    found = {path.relative_to(folder).as_posix(): memory.of(path) for path in paths}
    memory.save()
    return digest_of(found)


def model_digest(folder: Path, hashes: FileHashes | None = None) -> str:
    """The digest of a Hugging Face model directory's weights and configuration.

    Raises:
        BadInputError: there is no such directory, or no weights in it.
    """
    if not folder.is_dir():
        raise BadInputError(f"{folder}: no such model directory")
    weights = _matching(folder, WEIGHTS)
    if not weights:
        raise BadInputError(f"{folder}: no weights there (looked for {', '.join(WEIGHTS)}); name a Hugging Face folder")
    return _digest_files(folder, [*weights, *_matching(folder, MODEL_FILES)], hashes)


def tokenizer_digest(folder: Path, hashes: FileHashes | None = None) -> str:
    """The digest of a tokenizer's files, chat template included.

    Raises:
        BadInputError: there is no tokenizer in ``folder``.
    """
    files = _matching(folder, TOKENIZER_FILES) if folder.is_dir() else []
    if not files:
        raise BadInputError(f"{folder}: no tokenizer there (looked for {', '.join(TOKENIZER_FILES[:3])} …)")
    return _digest_files(folder, files, hashes)


def task_files_digest(folder: Path, hashes: FileHashes | None = None) -> str:
    """The digest of a folder's task definitions (YAML, Python, templates), by relative name and content."""
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in _TASK_SUFFIXES and path.is_file() and "__pycache__" not in path.parts
    ]
    return _digest_files(folder, files, hashes)
