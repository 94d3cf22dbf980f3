"""The text that every machine with Python has: the running interpreter's standard library, split in two.

Training reads :func:`training_files` (the data names ``stdlib`` and ``stdlib-held-out`` of a pretraining
config stand for the two halves); the ``stdlib_*`` tasks ask about :func:`held_out_files` only.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

HELD_OUT: tuple[str, ...] = (
    "argparse.py",
    "calendar.py",
    "configparser.py",
    "difflib.py",
    "email/message.py",
    "ftplib.py",
    "heapq.py",
    "http/cookies.py",
    "imaplib.py",
    "json/decoder.py",
    "logging/handlers.py",
    "mailbox.py",
    "optparse.py",
    "pprint.py",
    "shelve.py",
    "smtplib.py",
    "statistics.py",
    "tarfile.py",
    "textwrap.py",
    "urllib/request.py",
    "wave.py",
    "zipfile.py",
    "zipfile/__init__.py",
)
"""Held-out modules, relative to the library's folder; those that an interpreter does not have are left out."""

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "__pycache__",
     "encodings", "pydoc_data", "ensurepip", "lib-dynload"}
)  # fmt: skip
"""Tests (odd by design), tables (not prose or code) and what other packages installed."""

_MIN_BYTES = 1024
_MAX_BYTES = 400_000


def library_folder() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def held_out_files(library: Path | None = None) -> list[Path]:
    """The held-out modules' files, sorted by name."""
    folder = library or library_folder()
    return [folder / name for name in sorted(HELD_OUT) if (folder / name).is_file()]


def training_files(library: Path | None = None) -> list[Path]:
    """All other modules' files, sorted by relative name: UTF-8 text of 1 KiB to 400 kB."""
    folder = library or library_folder()
    held_out = set(held_out_files(folder))
    found: list[Path] = []
    for path in sorted(folder.rglob("*.py"), key=lambda p: p.relative_to(folder).as_posix()):
        parts = path.relative_to(folder).parts
        if _SKIPPED_FOLDERS.intersection(parts[:-1]) or parts[-1].startswith("_sysconfigdata") or path in held_out:
            continue
        if _MIN_BYTES <= path.stat().st_size <= _MAX_BYTES and _is_utf8(path):
            found.append(path)
    return found


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
