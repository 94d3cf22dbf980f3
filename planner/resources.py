"""Where the shipped data rooms (``tasks/``, ``configs/``) are, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def tasks_dir() -> Path:
    """The folder of benchmark tasks that travel with the package."""
    return _ROOT / "tasks"


def configs_dir() -> Path:
    """The folder of runnable YAML files that travel with the package."""
    return _ROOT / "configs"
