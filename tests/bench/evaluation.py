"""Time to results, side by side with stock lm-eval's own vLLM class, every process on one core.

With one worker the whole of ``planaria eval`` (command, Redis, metric worker, infer worker) shares the one core that a
stock process has; with two workers the second has another. Stock lm-eval runs under the conditions of ``--exact``,
with its engine in its own process, which is the faster way. *Cold*: nothing is in the caches; *warm*: the requests were
recorded before, for another checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evalsched.types import EvalSettings
from tests.bench.figures import Figure
from tests.support.demo_model import write_demo_model
from tests.support.engine_host import EngineHost
from tests.support.fork_server import engine_server
from tests.support.lm_tasks import write_tasks
from tests.support.smollm import gguf_file, smollm

EIGHT = ("choice_plain", "choice_fewshot", "choice_mutual", "last_word", "rolling", "generate_filters",
         "generate_prefix", "choice_inputs")  # fmt: skip
LARGE = "choice_fewshot"
KILL_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is measured on: a model, tasks of two sizes, a scratch folder."""

    folder: Path
    model: Path
    name: str
    small: Path
    """Task files with few documents."""
    mixed: Path
    """The same with more, for eight tasks at once."""
    large: Path
    """The same with many, for one task."""

    def settings(self, tasks: Sequence[str], folder: Path) -> EvalSettings:
        return EvalSettings(tasks=tuple(tasks), include_path=(str(folder),), exact=True)


def measure(quick: bool) -> list[Figure]:
    """The figures; ``quick`` takes the demo's model instead of SmolLM2 where that is installed."""
    folder = Path(tempfile.mkdtemp(prefix="planaria-bench-"))
    real = not quick and gguf_file() is not None
    model = smollm() if real else write_demo_model(folder / "model", seed=1)
    bench = Bench(
        folder=folder, model=model, name="SmolLM2-135M" if real else "the demo's model",
        small=write_tasks(folder / "small", documents=5 if real else 24),
        mixed=write_tasks(folder / "mixed", documents=40 if real else 1200),
        large=write_tasks(folder / "large", documents=160 if real else 1200),
    )  # fmt: skip
    try:
        return [*_one_task(bench), *_killed(bench), *_eight_tasks(bench), *_swap(bench)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- running both


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a command took: seconds on the clock, and of its processors (itself and everything that it waited for)."""

    wall: float
    cpu: float

    def __add__(self, other: Spent) -> Spent:
        return Spent(wall=self.wall + other.wall, cpu=self.cpu + other.cpu)


def _ended(process: subprocess.Popen[Any], began: float) -> Spent:
    """Wait for a command and account for it."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Spent(wall=time.monotonic() - began, cpu=usage.ru_utime + usage.ru_stime)


def _stock(bench: Bench, name: str, settings: EvalSettings) -> tuple[Spent, dict[str, Any]]:
    """What one stock process on one core takes, and its results."""
    folder = bench.folder / "stock" / name
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(settings.to_json()))
    program = [sys.executable, "-m", "tests.support.stock_vllm", str(bench.model), str(folder)]
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["taskset", "-c", _cores(1), *program], stdout=log, stderr=log)
        spent = _ended(process, began)
    assert process.returncode == 0, (folder / "log").read_text()[-2000:]
    return spent, dict(json.loads((folder / "results.json").read_text())["results"])


def _cores(count: int) -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))[:count]))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One ``planaria eval``."""

    spent: Spent
    result: dict[str, Any]
    lines: list[tuple[float, str]]
    """Its progress on standard error, with the seconds since its start."""


def _command(bench: Bench, output: Path, settings: EvalSettings, workers: int) -> list[str]:
    return [
        sys.executable, "-m", "tests.support.pinned_eval", _cores(workers), "eval", str(bench.model),
        "--tasks", ",".join(settings.tasks), "--include-path", settings.include_path[0],
        *(["--exact"] if settings.exact else []),
        "--workers", str(workers), "--output", str(output), "--json",
    ]  # fmt: skip


def _environment(bench: Bench, cache: str) -> dict[str, str]:
    return os.environ | {"PLANARIA_CACHE": str(bench.folder / cache)}


def _ours(bench: Bench, settings: EvalSettings, workers: int = 1, *, cache: str, output: str) -> Run:
    began = time.monotonic()
    process = subprocess.Popen(
        _command(bench, bench.folder / output, settings, workers), env=_environment(bench, cache),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stdout is not None
    lines = [(time.monotonic() - began, line.strip()) for line in process.stderr]
    text = process.stdout.read()
    spent = _ended(process, began)
    assert process.returncode == 0, lines[-5:]
    return Run(spent=spent, result=json.loads(text), lines=lines)


def _same(run: Run, stock: dict[str, Any]) -> None:
    for task, values in stock.items():
        mine = {name: value for name, value in run.result["results"][task].items() if name in values}
        assert mine == values, f"{task}: {mine} is not {values}"


def _ratio(name: str, ours: Spent, other: Spent, bar: float) -> Figure:
    return Figure(
        name=name, value=ours.wall / other.wall, unit="×", bar=f"at most {bar} ×",
        reached=ours.wall <= bar * other.wall,
        note=f"{ours.wall:.1f} s against {other.wall:.1f} s; of CPU {ours.cpu:.1f} s against {other.cpu:.1f} s",
    )  # fmt: skip


# ---------------------------------------------------------------- figures


def _one_task(bench: Bench) -> list[Figure]:
    settings = bench.settings([LARGE], bench.large)
    stock, results = _stock(bench, "large", settings)
    cold = _ours(bench, settings, cache="one", output="one-cold")
    warm = _ours(bench, settings, cache="one", output="one-warm")
    both = _ours(bench, settings, 2, cache="two", output="two-cold")
    both_warm = _ours(bench, settings, 2, cache="two", output="two-warm")
    shared = _ours(bench, replace(settings, exact=False), cache="default", output="one-default")
    for run in (cold, warm, both, both_warm, shared):
        _same(run, results)
    what = f"one large task, {bench.name}"
    return [
        _ratio(f"{what}: one worker against one process (cold)", cold.spent, stock, 1.0),
        _ratio(f"{what}: one worker against one process (warm)", warm.spent, stock, 1.0),
        _ratio(f"{what}: one worker without --exact against one process (cold)", shared.spent, stock, 1.0),
        _ratio(f"{what}: two workers against one process (cold)", both.spent, stock, 0.65),
        _ratio(f"{what}: two workers against one process (warm)", both_warm.spent, stock, 0.65),
        _bookkeeping(f"{what}: recording and scoring against the whole trial (cold)", cold),
    ]


def _bookkeeping(name: str, run: Run) -> Figure:
    spent = run.result["timings"]["record_seconds"] + run.result["timings"]["score_seconds"]
    return Figure(
        name=name, value=100 * spent / run.spent.wall, unit="%", bar="at most 10 %",
        reached=spent <= 0.1 * run.spent.wall,
        note=f"{spent:.1f} s of {run.spent.wall:.1f} s",
    )  # fmt: skip


def _killed(bench: Bench) -> list[Figure]:
    """The command is killed when half of its requests are answered, and run again."""
    settings = bench.settings([LARGE], bench.large)
    full = _ours(bench, settings, cache="kill", output="kill-full")
    output = bench.folder / "kill-half"
    process = subprocess.Popen(
        _command(bench, output, settings, 1), env=_environment(bench, "kill"), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    while (answered := _answered(output)) < KILL_SHARE * full.result["requests"]:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1.0)  # its guard ends the fleet
    again = _ours(bench, settings, cache="kill", output="kill-half")
    _same(again, full.result["results"])
    figure = _ratio(
        f"one large task, {bench.name}: again after a kill at half, against a full run",
        again.spent,
        full.spent,
        0.6,
    )
    counts = f"{answered} of {full.result['requests']} requests were answered, {again.result['requests_run']} run"
    return [replace(figure, note=f"{figure.note}; {counts}")]


def _answered(output: Path) -> int:
    path = output / ".planaria" / "evaluation.sqlite"
    if not path.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            return int(connection.execute("select count(*) from responses").fetchone()[0])
    except sqlite3.Error:
        return 0


def _eight_tasks(bench: Bench) -> list[Figure]:
    settings = bench.settings(EIGHT, bench.small)
    stock = Spent(wall=0.0, cpu=0.0)
    results: dict[str, Any] = {}
    for task in EIGHT:
        spent, found = _stock(bench, task, replace(settings, tasks=(task,)))
        stock, results = stock + spent, results | found
    cold = _ours(bench, settings, cache="eight", output="eight")
    again = _ours(bench, settings, cache="eight", output="eight")
    warm = _ours(bench, settings, cache="eight", output="eight-warm")
    assert again.result["requests_run"] == 0
    for run in (cold, again, warm):
        _same(run, results)
    mix = _ours(bench, bench.settings(EIGHT, bench.mixed), cache="mix", output="mix")
    return [
        _ratio(f"eight tasks, {bench.name}: one worker against a process per task (cold)", cold.spent, stock, 0.5),
        _ratio(f"eight tasks, {bench.name}: one worker against a process per task (warm)", warm.spent, stock, 0.5),
        Figure(name="the same again: nothing is run", value=again.spent.wall, unit="s"),
        _bookkeeping(f"eight large tasks, {bench.name}: recording and scoring against the whole (cold)", mix),
        *_estimates(f"eight large tasks, {bench.name}", mix),
    ]


def _estimates(what: str, run: Run) -> list[Figure]:
    """How far the estimate of the seconds left was off, at the first tenth and from there to nine tenths."""
    said = [(at, *found) for at, line in run.lines if (found := _parsed(line)) is not None]
    later = [(at, left) for at, share, left in said if 0.10 <= share <= 0.90]
    errors = [left / (run.spent.wall - at) - 1.0 for at, left in later]
    worst = max(errors, key=abs)
    note = f"{later[0][1]:.0f} s said, {run.spent.wall - later[0][0]:.1f} s were left of {run.spent.wall:.0f} s"
    return [
        Figure(
            name=f"{what}: error of the estimate after the first tenth", value=100 * errors[0], unit="%",
            bar="within 30 %", reached=abs(errors[0]) <= 0.3, note=note,
        ),
        Figure(
            name=f"{what}: largest error from one tenth to nine tenths", value=100 * worst, unit="%", runs=len(errors),
            bar="within 30 %", reached=abs(worst) <= 0.3,
        ),
    ]  # fmt: skip


def _parsed(line: str) -> tuple[float, float] | None:
    """(share, seconds left) of a progress line."""
    words = line.replace(",", "").split()
    if not line.startswith("running") or "about" not in words:
        return None
    return float(words[1].rstrip("%")) / 100, float(words[words.index("about") + 1])


def _swap(bench: Bench) -> list[Figure]:
    other = bench.folder / "other"
    shutil.copytree(bench.model, other)
    began = time.monotonic()
    engines = engine_server()
    host = EngineHost(bench.folder, bench.model, engines)
    try:
        host.call("run", requests=[])
        start = time.monotonic() - began
        times: list[float] = []
        for target in (other, bench.model, other):
            began = time.monotonic()
            host.call("swap", model=str(target))
            times.append(time.monotonic() - began)
    finally:
        host.close()
        engines.close()
    swap = sorted(times)[1]
    return [
        Figure(
            name=f"swapping the next checkpoint in, {bench.name}, against starting an engine", value=start / swap,
            unit="×", bar="at least 10 × sooner", reached=start >= 10 * swap,
            note=f"{swap:.2f} s against {start:.1f} s",
        )
    ]  # fmt: skip
