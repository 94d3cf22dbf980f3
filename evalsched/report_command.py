"""``planaria report`` and ``planaria retry``."""

from __future__ import annotations

import difflib
import json
import os
import sys
from pathlib import Path
from typing import Literal

from evalsched.report_data import ReportData, read_report
from evalsched.reports import report_folder, to_html, to_json, to_markdown, write_report
from planner.cluster import connect, default_state_dir, last_up
from planner.errors import BadInputError, GateRegressError, one_line


def report_command(
    job_or_dir: str, format_: Literal["html", "md", "json"], state_dir: Path | None, url: str | None
) -> int:
    """Print the report of a job or folder, and keep it beside the results (``report.html``, ``.md``, ``.json``).

    On a terminal HTML is not printed, only the path of the file.

    Raises:
        BadInputError: no such job or folder, or nothing in it to report.
        GateRegressError: see :func:`check_gate`; the report is printed and kept all the same.
    """
    data = read_report(find_folder(job_or_dir, state_dir))
    try:
        path: Path | None = write_report(data.folder, data)
    except OSError as error:
        path = None
        print(f"{report_folder(data)}: not writable, the report is printed only ({one_line(error)})", file=sys.stderr)
    if format_ == "json":
        print(json.dumps(to_json(data)))
    elif format_ == "md":
        print(to_markdown(data))
    elif path is not None and sys.stdout.isatty():
        print(path)
    else:
        print(to_html(data))
    if path is not None:
        print(f"report: {path}", file=sys.stderr)
    check_gate(data)
    return 0


def check_gate(data: ReportData) -> None:
    """Say where the gate says that the newest checkpoint regresses against the one before.

    Raises:
        GateRegressError: it does; the message has the reasons.
    """
    if data.gates and data.gates[-1].verdict == "regress":
        raise GateRegressError(f"gate: {data.evaluated[-1].label} regresses: {'; '.join(data.gates[-1].reasons)}")


def retry_command(trial: str, state_dir: Path | None, url: str | None) -> int:
    """Ask the coordinator to put a failed trial (or the run that it belongs to) back into the queue.

    Raises:
        MissingServiceError: there is no cluster to ask.
    """
    store, _ = connect(url, state_dir)
    try:
        store.send_request("retry", trial=trial)
    finally:
        store.close()
    print(f"trial {trial}: asked to be run again; `planaria status` shows it")
    return 0


def find_folder(job_or_dir: str, state_dir: Path | None) -> Path:
    """The folder of a job id, or the folder that was named.

    Raises:
        BadInputError: neither is there; the nearest job ids are named.
    """
    named = Path(job_or_dir).expanduser()
    if named.is_dir():
        return named
    if named.name == "results.json" and named.is_file():
        return named.parent
    jobs: dict[str, Path] = {}
    for base in _state_dirs(state_dir):
        if (base / "jobs").is_dir():
            for folder in sorted((base / "jobs").iterdir()):
                jobs.setdefault(folder.name, folder)
    if job_or_dir in jobs:
        return jobs[job_or_dir]
    near = difflib.get_close_matches(job_or_dir, list(jobs), n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "give a job id (planaria status lists them) or a folder"
    raise BadInputError(f"{job_or_dir}: no such job or folder; {hint}")


def _state_dirs(state_dir: Path | None) -> list[Path]:
    if state_dir is not None:
        return [state_dir.expanduser()]
    own = os.environ.get("PLANARIA_STATE_DIR")
    found = [Path(own).expanduser()] if own else []
    remembered = last_up()
    return [*found, *([remembered] if remembered else []), default_state_dir()]
