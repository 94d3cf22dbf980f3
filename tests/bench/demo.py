"""The demo as a user runs it: its time, a killed rank to the next step, a checkpoint to its report."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from planner.files import read_json_lines
from tests.bench.figures import Figure

LIMIT_SECONDS = 900


def _run(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "planner.cli", "demo", "--json", "--state-dir", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} exited {result.returncode}: {result.stderr[-500:]}")
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def publication_to_report(job: Path) -> list[float]:
    """Seconds from each checkpoint's publication to its ``results.json``, for all checkpoints that have both."""
    delays = []
    for event in read_json_lines(job / "events.jsonl"):
        if event["action"] == "checkpoint.published":
            results = job / "reports" / f"step-{event['step']:08d}" / "results.json"
            if results.exists():
                delays.append(results.stat().st_mtime - event["time"])
    return delays


def measure(quick: bool) -> list[Figure]:
    """One demo (the real one, quick or not), read from its own events."""
    del quick
    with tempfile.TemporaryDirectory(prefix="demo-bench-") as parent:
        folder = Path(parent) / "state"
        document = _run(folder)
        job = folder / "jobs" / document["job"]
        delays = publication_to_report(job)
        steps = [line["seconds"] for line in read_json_lines(job / "metrics.jsonl")]
    healed = document["faults"][0]["recovered_seconds"]
    first, last = (
        document["checkpoints"][index]["results"]["stdlib_bits_per_byte"]["bits_per_byte"] for index in (0, -1)
    )
    seconds = float(document["seconds"])
    return [
        Figure(name="demo, once installed", value=seconds, unit="s", bar="at most 360 s", reached=seconds <= 360),
        Figure(name="step", value=median(steps), unit="s", runs=len(steps), low=min(steps), high=max(steps)),
        Figure(name="kill to next step finished", value=healed, unit="s"),
        Figure(
            name="publication to report",
            value=median(delays),
            unit="s",
            runs=len(delays),
            low=min(delays),
            high=max(delays),
        ),
        Figure(name="ETTR of the demo's job", value=float(document["ettr"]), unit=""),
        Figure(name="bits per byte, first to last checkpoint", value=first - last, unit="bits fewer"),
    ]
