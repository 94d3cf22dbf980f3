"""Time to results, side by side with stock lm-eval's own vLLM class; weights swapped against engines started.

Every process is pinned to one core: stock lm-eval and each worker alike.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalsched.evaluate import EvaluationResult, evaluate
from evalsched.types import EvalSettings
from tests.bench.figures import Figure
from tests.support.engine_host import EngineHost
from tests.support.lm_tasks import write_tasks
from tests.support.smollm import gguf_file, smollm
from tests.support.tiny_model import write_model

SMALL = ("choice_plain", "choice_fewshot", "choice_mutual", "last_word", "rolling", "generate_filters",
         "generate_prefix", "choice_inputs")  # fmt: skip


def measure(quick: bool) -> list[Figure]:
    """The figures; ``quick`` takes a tiny model and fewer documents."""
    folder = Path(tempfile.mkdtemp(prefix="planaria-bench-"))
    os.environ["PLANARIA_CACHE"] = str(folder / "cache")
    try:
        real = not quick and gguf_file() is not None
        model = smollm() if real else write_model(folder / "model", seed=1)
        name = "SmolLM2-135M" if real else "a tiny model"
        tasks = write_tasks(folder / "tasks", documents=24 if quick else 60)
        settings = EvalSettings(tasks=SMALL, include_path=(str(tasks),), exact=True, bootstrap_iters=0)
        return [
            *_eight_tasks(folder, model, name, settings),
            *_one_task(folder, model, name, settings),
            *_swap(folder, model, name),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _stock(folder: Path, model: Path, settings: EvalSettings) -> float:
    """Seconds of one stock process on one core."""
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings.to_json()))
    began = time.monotonic()
    command = ["taskset", "-c", "0", sys.executable, "-m", "tests.support.stock_vllm", str(model), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - began


def _ours(folder: Path, model: Path, settings: EvalSettings, workers: int) -> tuple[float, EvaluationResult]:
    began = time.monotonic()
    result = evaluate(model, settings=settings, workers=workers, output=folder)
    return time.monotonic() - began, result


def _same(ours: EvaluationResult, stock: Path, tasks: tuple[str, ...]) -> None:
    theirs = json.loads((stock / "results.json").read_text())["results"]
    for task in tasks:
        assert ours.results[task] == theirs[task], f"{task}: {ours.results[task]} is not {theirs[task]}"


def _eight_tasks(folder: Path, model: Path, name: str, settings: EvalSettings) -> list[Figure]:
    stock = 0.0
    for task in SMALL:
        stock += _stock(folder / "stock" / task, model, replace(settings, tasks=(task,)))
    cold, result = _ours(folder / "cold", model, settings, 1)
    for task in SMALL:
        _same(result, folder / "stock" / task, (task,))
    shutil.rmtree(folder / "cold")
    warm, _ = _ours(folder / "cold", model, settings, 1)
    again, second = _ours(folder / "cold", model, settings, 1)
    assert second.requests_run == 0
    overhead = warm - (result.timings.get("run_seconds", 0.0))
    return [
        _ratio(f"eight tasks, {name}: one worker against a process per task (cold)", cold, stock, 0.5),
        _ratio("the same with its recordings in the cache (warm)", warm, stock, 0.5),
        Figure(name="the same again: nothing is run", value=again, unit="s"),
        Figure(name="outside the run itself (warm): record, start, score", value=overhead, unit="s"),
    ]  # fmt: skip


def _one_task(folder: Path, model: Path, name: str, settings: EvalSettings) -> list[Figure]:
    one = replace(settings, tasks=("choice_fewshot",))
    stock = _stock(folder / "large", model, one)
    alone, result = _ours(folder / "alone", model, one, 1)
    _same(result, folder / "large", ("choice_fewshot",))
    both, _ = _ours(folder / "both", model, one, 2)
    return [
        _ratio(f"one large task, {name}: one worker against one process", alone, stock, 1.0),
        _ratio(f"one large task, {name}: two workers against one process", both, stock, 0.65),
    ]


def _ratio(name: str, ours: float, stock: float, bar: float) -> Figure:
    return Figure(
        name=name, value=ours / stock, unit="×", bar=f"at most {bar} ×", reached=ours <= bar * stock,
        note=f"{ours:.1f} s against {stock:.1f} s",
    )  # fmt: skip


def _swap(folder: Path, model: Path, name: str) -> list[Figure]:
    other = folder / "other"
    shutil.copytree(model, other)
    began = time.monotonic()
    host = EngineHost(folder, model)
    try:
        host.call("run", requests=[])
        start = time.monotonic() - began
        times: list[Any] = []
        for target in (other, model, other):
            began = time.monotonic()
            host.call("swap", model=str(target))
            times.append(time.monotonic() - began)
    finally:
        host.close()
    swap = sorted(times)[1]
    return [
        Figure(
            name=f"swapping the next checkpoint in, {name}, against starting an engine", value=start / swap, unit="×",
            bar="at least 10 × sooner", reached=start >= 10 * swap, note=f"{swap:.2f} s against {start:.1f} s",
        )
    ]  # fmt: skip


if __name__ == "__main__":
    for figure in measure("--full" not in sys.argv):
        print(figure)
