"""``planaria checkpoint list | verify | export``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from planner import manifest
from planner.errors import BadInputError, ExitCode
from pretrain import published


def list_command(directory: Path, json_output: bool) -> int:
    """Print the published checkpoints of a folder (or of the job's folder that holds it), oldest first."""
    folder = _checkpoints(directory)
    latest = published.read_latest(folder)
    rows = [_row(step, path, path == latest) for step, path in published.published(folder)]
    if json_output:
        print(json.dumps(rows, indent=2))
        return ExitCode.DONE
    if not rows:
        print(f"{folder}: no published checkpoint", file=sys.stderr)
    for row in rows:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["created"]))
        marks = [mark for mark, on in (("latest", row["latest"]), ("exported", row["export"])) if on]
        print(f"{row['step']:>10}  {row['bytes'] / 1e6:>10.1f} MB  {made}  {row['path']}  {' '.join(marks)}".rstrip())
    return ExitCode.DONE


def _row(step: int, path: Path, latest: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "path": str(path), "job": None, "bytes": 0, "created": 0.0}
    try:
        said = manifest.read_manifest(path)
        row |= {"job": said.job, "created": said.created, "incarnation": said.incarnation}
        row |= {"consumed_samples": said.consumed_samples, "problem": None}
        row["bytes"] = sum(int(entry.get("bytes", 0)) for entry in said.files.values())
    except (BadInputError, TypeError, ValueError) as error:
        row["problem"] = str(error)
    export = path.with_name(manifest.step_dir_name(step, export=True))
    exported = (export / manifest.NAME).is_file()
    return row | {"latest": latest, "export": str(export) if exported else None}


def _checkpoints(directory: Path) -> Path:
    """The folder of checkpoints that the user meant.

    Raises:
        BadInputError: no directory.
    """
    if not directory.is_dir():
        raise BadInputError(f"{directory}: no such directory")
    below = directory / "checkpoints"
    return below if below.is_dir() and not published.step_dirs(directory) else directory


def verify_command(directory: Path, json_output: bool) -> int:
    """Check every byte of one checkpoint or export against its manifest; exit 1 when it is broken."""
    if not directory.is_dir():
        raise BadInputError(f"{directory}: no such directory; give a published step-XXXXXXXX directory")
    steps = [path.name for _, path in published.step_dirs(_checkpoints(directory))]
    if steps and not (directory / manifest.NAME).exists():
        raise BadInputError(f"{directory}: a folder of checkpoints; give one of them, for example {steps[-1]}")
    named = manifest.parse_step_dir(directory.resolve().name)
    problems = manifest.verify(directory) if named is None else list(published.examine(directory, named[0]))
    try:
        step: int | None = manifest.read_manifest(directory).step
    except BadInputError:
        step = named[0] if named else None
    if json_output:
        errors = [problem.to_json() for problem in problems]
        print(json.dumps({"path": str(directory), "ok": not problems, "step": step, "errors": errors}, indent=2))
    elif problems:
        for problem in problems:
            print(f"{directory}: {problem.file}: {problem.problem}")
    else:
        print(f"{directory}: step {step}, whole")
    return ExitCode.FAILED if problems else ExitCode.DONE


def export_command(directory: Path, output: Path | None) -> int:
    """Write the Hugging Face export of one published checkpoint and print its path."""
    from pretrain.export import export  # loads torch

    print(export(directory, output, created=time.time()))
    return ExitCode.DONE
