"""``planaria demo``: the whole story on this machine in a few minutes.

A small Llama learns from the standard library's source on two slots, loses a rank to SIGKILL in the middle, heals and
goes on; every checkpoint it publishes is evaluated meanwhile on the third slot.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from planner.cluster import state_home
from planner.errors import ExitCode, WorkFailedError
from planner.events import TERMINAL, JobState
from planner.files import read_json_lines
from planner.overview import overview
from planner.pretrain_config import PretrainConfig
from planner.resources import configs_dir
from planner.stack import start_stack, stop_stack
from planner.store import ClusterStore
from pretrain.commands import EXIT_OF, STACK_PATIENCE, Asked, final_record, preemptible, send
from pretrain.demo_view import DemoView
from pretrain.evaluation_wait import open_evaluations
from pretrain.submission import read_config

SLOTS = 3
LIMIT_SECONDS = 3600.0
"""After this long something is stuck."""
LOOK_SECONDS = 0.25


def run(*, state_dir: Path | None, json_output: bool) -> int:
    """Run the demo and print its summary: a table, or with ``--json`` one document."""
    began = time.monotonic()
    settings = demo_config()
    folder = state_dir or state_home() / "demo" / time.strftime("%Y%m%d-%H%M%S")
    console = Console(stderr=True)
    stack = start_stack(folder, slots=SLOTS, remember=state_dir is None)
    store = ClusterStore(stack.url, stack.secret, patience=STACK_PATIENCE)
    try:
        with preemptible() as asked, DemoView(console) as view:
            view.say(f"state in {stack.state_dir}" + (f", dashboard {stack.dashboard}" if stack.dashboard else ""))
            job = send(store, settings)
            _watch(store, job, view, asked)
        record = final_record(store, job)
    finally:
        store.close()
        stop_stack(stack.state_dir)
    document = summary(record, stack.state_dir, time.monotonic() - began)
    if json_output:
        print(json.dumps(document))
    else:
        print_summary(Console(), document, record)
    return exit_code(record, document, settings)


def demo_config() -> PretrainConfig:
    """``configs/pretrain/demo.yaml`` with one SIGKILL in the middle, between two checkpoints."""
    path = configs_dir() / "pretrain" / "demo.yaml"
    plain = read_config(path, [])
    at = plain.steps // 2 + max(1, plain.checkpoint.every_steps // 2)
    fault = f"faults=[{{at_step: {at}, rank: 1, kind: sigkill}}]"
    return read_config(path, [fault])


def _watch(store: ClusterStore, job: str, view: DemoView, asked: Asked) -> None:
    """Show what happens until training, exports and evaluations are over.

    Raises:
        WorkFailedError: it takes longer than :data:`LIMIT_SECONDS`.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    position = store.end_of("events")
    while time.monotonic() < deadline:
        entries = store.read_events(position, block=LOOK_SECONDS)
        position = entries[-1].id if entries else position
        record = store.job(job) or {}
        view.show(overview(store), record, [entry.payload for entry in entries if entry.payload is not None])
        state = JobState(record["state"])
        if asked.stop and not asked.sent:
            asked.sent = True
            store.send_request("preempt", job=job)
        if state in TERMINAL and (
            state != JobState.DONE or asked.stop or not (record["exports"] or open_evaluations(store, record))
        ):
            return
    raise WorkFailedError(f"{job}: the demo is not done after {LIMIT_SECONDS:.0f} s; see its logs")


# ---------------------------------------------------------------- the summary


def summary(record: Mapping[str, Any], state_dir: Path, seconds: float) -> dict[str, Any]:
    """What ``planaria demo --json`` prints."""
    folder = Path(record["folder"])
    return {
        "state_dir": str(state_dir),
        "report": str(folder / "reports" / "report.html"),
        "checkpoints": checkpoints(folder),
        "faults": [
            {key: fault[key] for key in ("step", "rank", "kind", "recovered_seconds")} for fault in record["faults"]
        ],
        "ettr": record["ettr"],
        "seconds": seconds,
        "job": record["id"],
        "state": record["state"],
        "step": record["step"],
        "loss": record["loss"],
        "ettr_losses": record["ettr_losses"],
    }


def checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Every published checkpoint of a job with its results, oldest first."""
    found: dict[int, dict[str, Any]] = {}
    for line in read_json_lines(folder / "events.jsonl"):
        if line["action"] == "checkpoint.published" and line.get("path"):
            step = int(line["step"])
            results = folder / "reports" / f"step-{step:08d}" / "results.json"
            found[step] = {"step": step, "path": line["path"], "results": results_of(results)}
    return [found[step] for step in sorted(found)]


def results_of(path: Path) -> dict[str, dict[str, float]]:
    """Task → metric → value of an lm-eval results file; the filter is named only where there is one."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool) and "," in name
        }
        for task, metrics in document.get("results", {}).items()
    }


def exit_code(record: Mapping[str, Any], document: Mapping[str, Any], settings: PretrainConfig) -> int:
    """0 where training is done, the fault was healed and every checkpoint is evaluated."""
    state = JobState(record["state"])
    if state != JobState.DONE:
        return EXIT_OF[state]
    healed = len(document["faults"]) == len(settings.faults) and all(
        fault["recovered_seconds"] is not None for fault in document["faults"]
    )
    tasks = set(settings.evaluate.tasks)
    evaluated = all(tasks <= entry["results"].keys() for entry in document["checkpoints"])
    if healed and evaluated:
        return ExitCode.DONE
    print("planaria: demo: " + ("not every checkpoint was evaluated" if healed else "the fault was not healed"),
          file=sys.stderr)  # fmt: skip
    return ExitCode.FAILED


def print_summary(console: Console, document: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """The table of results, the fault, where the time went, the report's path."""
    tasks = sorted({task for entry in document["checkpoints"] for task in entry["results"]})
    columns = [(task, name) for task in tasks for name in _main_metrics(document["checkpoints"], task)]
    table = Table(title="Each checkpoint, evaluated while training went on", title_justify="left")
    table.add_column("step", justify="right")
    for task, name in columns:
        table.add_column(f"{task}\n{name}", justify="right")
    for entry in document["checkpoints"]:
        table.add_row(str(entry["step"]), *(_cell(entry["results"].get(task, {}), name) for task, name in columns))
    console.print(table)
    for fault in document["faults"]:
        recovered = fault["recovered_seconds"]
        how = "not recovered" if recovered is None else f"the next step was done {recovered:.2f} s later"
        console.print(f"rank {fault['rank']} was lost to {fault['kind']} at step {fault['step']}; {how}")
    loss, ettr = document["loss"], document["ettr"]
    console.print(
        f"{record['state']} at step {document['step']}"
        + ("" if loss is None else f", loss {loss:.4f}")
        + ("" if ettr is None else f", ETTR {ettr:.1%}")
        + f", {document['seconds']:.0f} s in all"
    )
    lost = {name: value for name, value in (document["ettr_losses"] or {}).items() if value >= 0.05}
    if lost:
        console.print(
            "time not spent on steps kept: " + ", ".join(f"{name} {value:.1f} s" for name, value in lost.items())
        )
    console.print(f"report: {document['report']}", soft_wrap=True)


def _main_metrics(entries: list[dict[str, Any]], task: str) -> list[str]:
    """Metrics of a task that have an error bar, or else all of them."""
    names = dict.fromkeys(name for entry in entries for name in entry["results"].get(task, {}))
    plain = [name for name in names if "_stderr" not in name]
    return [name for name in plain if _stderr_name(name) in names] or plain


def _stderr_name(name: str) -> str:
    metric, comma, filter_ = name.partition(",")
    return f"{metric}_stderr{comma}{filter_}"


def _cell(metrics: Mapping[str, float], name: str) -> str:
    if name not in metrics:
        return "–"
    error = metrics.get(_stderr_name(name))
    return f"{metrics[name]:.3f}" + ("" if error is None else f" ± {error:.3f}")
