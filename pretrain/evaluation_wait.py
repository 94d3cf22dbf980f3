"""Waiting for what follows a job: its exports, and the evaluations that its config asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from planner.errors import WorkFailedError
from planner.events import Action, TrialState
from planner.files import read_json_lines
from planner.manifest import step_dir_name
from planner.store import ClusterStore

OVER = frozenset({TrialState.DONE, TrialState.FAILED, TrialState.SKIPPED})
IDLE_SECONDS = 900.0
"""Seconds without any change after which nobody can still be at work."""
POLL_SECONDS = 0.3


def evaluated_steps(folder: Path) -> set[int]:
    """Steps of the job whose published export asks for an evaluation."""
    return {
        int(line["step"])
        for line in read_json_lines(folder / "events.jsonl")
        if line["action"] == Action.EXPORT_PUBLISHED and line.get("evaluate")
    }


def open_evaluations(store: ClusterStore, record: Mapping[str, Any]) -> set[int]:
    """Steps whose evaluation is not over."""
    folder = Path(record["folder"])
    runs = (store.document("evaluation") or {}).get("runs", [])
    states = {int(run["step"]): run.get("state") for run in runs if run.get("job") == record["id"]}
    return {
        step
        for step in evaluated_steps(folder)
        # A run that the summary has dropped is over when its results are there.
        if (states[step] not in OVER if step in states else not _results(folder, step).exists())
    }


def _results(folder: Path, step: int) -> Path:
    return folder / "reports" / step_dir_name(step) / "results.json"


def wait_until_evaluated(
    store: ClusterStore,
    job: str,
    *,
    evaluates: bool,
    stop: Callable[[], bool] = lambda: False,
    look: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> None:
    """Return when no export and no evaluation of the job is open, or ``stop()`` says so.

    Raises:
        WorkFailedError: nothing changed for :data:`IDLE_SECONDS`.
    """
    seen: object = None
    since = time.monotonic()
    while not stop():
        record = store.job(job) or {}
        look(record)
        exports = record.get("exports", [])
        waiting = open_evaluations(store, record) if evaluates else set()
        if not exports and not waiting:
            return
        now = (len(exports), sorted(waiting), str((store.document("evaluation") or {}).get("runs")))
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > IDLE_SECONDS:
            raise WorkFailedError(
                f"{job}: {len(exports)} exports and the evaluations of steps {sorted(waiting)} do not move for "
                f"{IDLE_SECONDS:.0f} s; planaria status shows who holds the slots"
            )
        time.sleep(POLL_SECONDS)
