"""Step time and speed of the demo's model on one and two ranks, and how long a rank takes from start to first step."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from planner.loading import load
from planner.pretrain_config import PretrainConfig
from planner.resources import configs_dir
from tests.bench.figures import Figure
from tests.support.ranks import RankRun, merged, run_ranks

WARM_UP_STEPS = 3


def measure(quick: bool) -> list[Figure]:
    """Run the shipped demo config for some steps, one compute thread per rank, nothing else on the machine."""
    base = load(PretrainConfig, configs_dir() / "pretrain" / "demo.yaml").to_json()
    steps = 12 if quick else 40
    changes: dict[str, Any] = {"steps": steps, "checkpoint": {"every_steps": steps}, "optimizer": {"warmup_steps": 2}}
    config = PretrainConfig.model_validate(merged(base, changes))
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="planaria-bench-") as folder:
        for ranks in (1, 2):
            started = time.time()
            run = run_ranks(config, ranks, Path(folder) / str(ranks))[0]
            figures += _figures(run, ranks, started)
    return figures


def _figures(run: RankRun, ranks: int, started: float) -> list[Figure]:
    told = run.of("step")[WARM_UP_STEPS:]
    seconds = [step["seconds"] for step in told]
    middle = statistics.median(seconds)
    saved = next(item for item in run.of("checkpoint") if item["what"] == "published")
    first = next(phase for phase in run.of("phase") if phase["phase"] == "first_step")
    where = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return [
        Figure(name=f"step, {where}", value=middle, unit="s", runs=len(seconds), low=min(seconds), high=max(seconds)),
        Figure(name=f"speed, {where}", value=told[0]["tokens"] / middle, unit="tokens/s"),
        Figure(name=f"process start to first step, {where}", value=first["time"] - started, unit="s"),
        Figure(name=f"first save and publication, {where}", value=saved["seconds"], unit="s"),
    ]
