"""Benchmarks that are built from public packages into the user's cache, and what is runnable now."""

from __future__ import annotations

from pathlib import Path

from evalsched.digests import cache_folder

HOW_TO_PREPARE = "`planaria tasks list` shows what can be prepared, `planaria tasks prepare NAME` does it"


def prepared_folder() -> Path:
    """Where prepared tasks lie, one folder each."""
    return cache_folder() / "tasks"
