"""What every benchmark gives back: figures with their bars, printed with the machine's description.

A benchmark is a module of this folder with ``measure(quick: bool) -> list[Figure]``; ``python -m tests.bench.run``
runs all of them (or the ones named) and writes JSON and a table to ``bench-results/``.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured figure: ``value`` in ``unit``, ``bar`` in words, and whether it was ``reached``."""

    name: str
    value: float
    unit: str
    bar: str = ""
    reached: bool | None = None
    runs: int = 1
    low: float | None = None
    high: float | None = None
    note: str = ""


def machine() -> dict[str, Any]:
    """The machine a figure was measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def to_json(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """The figures as plain data."""
    return [asdict(figure) for figure in figures]


def table(figures: Sequence[Figure]) -> str:
    """The figures as a Markdown table."""
    lines = ["| figure | measured | spread | bar | reached |", "| --- | --- | --- | --- | --- |"]
    for figure in figures:
        spread = (
            ""
            if figure.low is None or figure.high is None
            else f"{figure.low:.4g} to {figure.high:.4g} ({figure.runs} runs)"
        )
        reached = {True: "yes", False: "**no**", None: ""}[figure.reached]
        note = f" ({figure.note})" if figure.note else ""
        lines.append(
            f"| {figure.name}{note} | {figure.value:.4g} {figure.unit} | {spread} | {figure.bar} | {reached} |"
        )
    return "\n".join(lines)
