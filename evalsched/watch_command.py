"""``planaria watch``: each checkpoint of a directory is evaluated as it becomes complete, on resident engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalsched.commands import preemptible, table, task_list
from evalsched.conductor import Conductor
from evalsched.engine import EngineSettings
from evalsched.evaluate import PRIVATE_TOKEN, busy_folder, ledger_url
from evalsched.ledger import Ledger
from evalsched.local import LocalFleet, device
from evalsched.recording import check_settings
from evalsched.report_command import check_gate
from evalsched.report_data import read_report, results_files
from evalsched.runs import Run, RunSpec
from evalsched.task_names import refuse_unknown
from evalsched.types import EvalSettings, digest_of
from evalsched.watching import Candidate, Sizes, complete, in_order, look
from planner.errors import BadInputError, ExitCode, one_line
from planner.events import TrialState
from planner.files import write_json

LOOK_SECONDS = 2.0
"""Between two looks at the directory; a foreign checkpoint must be unchanged over one such pause."""
AT_ONCE = 2
"""Checkpoints under way: one that runs, one whose requests are being recorded."""


def watch_command(
    directory: Path,
    tasks: str,
    limit: float | None,
    order: str,
    workers: int,
    output: Path | None,
    include_path: Path | None,
    once: bool,
    state_dir: Path | None,
) -> int:
    """Evaluate what is there and what appears; with ``once`` only what is there. Returns the exit code.

    1: a checkpoint could not be evaluated, or a verdict must not be believed.

    Raises:
        BadInputError: no such directory, an unknown order or task.
        GateRegressError: with ``once``, where the newest checkpoint regresses against the one before.
        PreemptedError: told to end.
    """
    if not directory.is_dir():
        raise BadInputError(f"{directory}: no such directory; name the folder that checkpoints appear in")
    if order not in ("newest", "oldest"):
        raise BadInputError(f"--order {order}: it is newest or oldest")
    if include_path is not None and not include_path.is_dir():
        raise BadInputError(f"--include-path {include_path}: no such folder")
    settings = EvalSettings(
        tasks=task_list(tasks), limit=limit, include_path=(str(include_path.resolve()),) if include_path else ()
    )
    check_settings(settings)
    refuse_unknown(settings.tasks, "--tasks", settings.include_path)
    base = (output or directory).resolve()
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    with (
        preemptible(),
        busy_folder(base),
        Ledger(ledger_url(base, state_dir), PRIVATE_TOKEN) as ledger,
        LocalFleet(workers, threads) as fleet,
    ):
        watch = _Watch(directory.resolve(), output.resolve() if output else None, settings, order, fleet, ledger)
        return watch.run(once)


@dataclass
class _Export:
    candidate: Candidate
    process: subprocess.Popen[str]


@dataclass
class _State:
    queue: list[Candidate] = field(default_factory=list)
    taken: dict[Path, str] = field(default_factory=dict)
    """Checkpoint → fingerprint of the files that were (or are being) evaluated."""
    exports: list[_Export] = field(default_factory=list)
    runs: dict[str, tuple[Candidate, Run]] = field(default_factory=dict)
    looks: int = 0
    failed: int = 0


class _Watch:
    def __init__(
        self,
        directory: Path,
        output: Path | None,
        settings: EvalSettings,
        order: str,
        fleet: LocalFleet,
        ledger: Ledger,
    ) -> None:
        from evalsched.app import make_app

        self._directory, self._output, self._settings, self._order = directory, output, settings, order
        self._fleet = fleet
        self._conductor = Conductor(
            fleet.store, ledger, make_app(fleet.store.url), device=device(), kill_worker=fleet.kill
        )
        self._conductor.expected_workers = fleet.size
        self._before: dict[Path, Sizes] = {}
        self._state = _State()

    def run(self, once: bool) -> int:
        """Look, evaluate, look again."""
        next_look = 0.0
        try:
            while True:
                now = time.time()
                if now >= next_look:
                    self._look()
                    next_look = now + LOOK_SECONDS
                self._begin(now)
                self._conductor.tick(now)
                runs = [run for _, run in self._state.runs.values()]
                if not self._fleet.running and any(run.state is TrialState.RUNNING and run.open for run in runs):
                    self._fleet.start()
                self._fleet.watch(self._conductor, now)
                self._finish()
                if once and self._state.looks >= 2 and self._nothing_left():
                    return self._code()
                time.sleep(0.05)
        finally:
            self._conductor.close()
            for one in self._state.exports:
                one.process.kill()

    def _code(self) -> int:
        """The exit code: 1 where a checkpoint failed, else what the gate says of all results here, earlier ones too."""
        if self._state.failed:
            return int(ExitCode.FAILED)
        base = self._output or self._directory
        if results_files(base):
            check_gate(read_report(base))
        return int(ExitCode.DONE)

    def _nothing_left(self) -> bool:
        return not (self._state.queue or self._state.exports or self._state.runs)

    def _look(self) -> None:
        found = look(self._directory)
        for one in complete(found, self._before):
            fingerprint = digest_of(sorted((name, *size) for name, size in one.sizes.items()))
            megatron = one.path.with_name(one.path.name.removesuffix(".hf"))
            if self._state.taken.get(one.path) == fingerprint or (
                megatron != one.path and megatron in self._state.taken
            ):
                continue  # the second: our own export of a checkpoint that is taken already
            self._state.taken[one.path] = fingerprint
            if self._done_before(one, fingerprint):
                print(f"{one.path.name}: evaluated before, {self._target(one) / 'results.json'}", file=sys.stderr)
                continue
            self._state.queue.append(one)
        if self._state.looks == 1:
            for one in found:
                if one.problem:
                    print(f"{one.path.name}: not complete: {one.problem}", file=sys.stderr)
        self._state.queue = in_order(self._state.queue, self._order)
        self._before = {one.path: one.sizes for one in found}
        self._state.looks += 1

    # ------------------------------------------------------------------ beginning

    def _begin(self, now: float) -> None:
        for one in list(self._state.exports):
            if one.process.poll() is not None:
                self._state.exports.remove(one)
                self._exported(one, now)
        while self._state.queue and len(self._state.runs) + len(self._state.exports) < AT_ONCE:
            candidate = self._state.queue.pop(0)
            if candidate.layout == "megatron":
                self._export(candidate)
            else:
                self._evaluate(candidate, candidate.path, now)

    def _export(self, candidate: Candidate) -> None:
        program = [sys.executable, "-m", "planner.cli", "checkpoint", "export", str(candidate.path)]
        if candidate.path.with_name(candidate.path.name + ".hf").exists() or not os.access(
            candidate.path.parent, os.W_OK
        ):
            program += ["--output", str(self._target(candidate) / "export")]
        process = subprocess.Popen(
            program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._fleet.adopt(process.pid)
        self._state.exports.append(_Export(candidate, process))

    def _exported(self, one: _Export, now: float) -> None:
        said, complaint = one.process.communicate()
        if one.process.returncode != 0:
            last = (complaint.strip().splitlines() or [f"exit code {one.process.returncode}"])[-1]
            self._fail(one.candidate, f"cannot be exported: {last}")
            return
        self._evaluate(one.candidate, Path(said.strip().splitlines()[-1]), now)

    def _evaluate(self, candidate: Candidate, model: Path, now: float) -> None:
        spec = RunSpec(
            model=str(model), settings=self._settings, output=str(self._target(candidate)), created=now,
            step=candidate.step, engine=EngineSettings(exact=self._settings.exact),
        )  # fmt: skip
        self._state.runs[spec.id] = (candidate, self._conductor.add(spec))

    # ------------------------------------------------------------------ ending

    def _finish(self) -> None:
        for name, (candidate, run) in list(self._state.runs.items()):
            if not run.over:
                continue
            del self._state.runs[name]
            del self._conductor.runs[name]
            if run.outcome is None:
                if isinstance(run.error, BadInputError) and str(run.error).startswith(("--tasks", "task ")):
                    raise run.error
                self._fail(candidate, run.reason)
                continue
            write_json(self._target(candidate) / ".planaria" / "watch.json", self._mark(candidate))
            self._state.failed += int(run.outcome.exit_code != 0)
            print(f"{candidate.path.name}" + (f", step {candidate.step}" if candidate.step is not None else ""))
            print(table(run.outcome.metrics), flush=True)
            for task, reason in run.failed.items():
                print(f"FAILED: {task}: {reason}", file=sys.stderr)

    def _fail(self, candidate: Candidate, reason: str) -> None:
        self._state.failed += 1
        print(f"{candidate.path.name}: FAILED: {one_line(reason)}", file=sys.stderr, flush=True)

    def _target(self, candidate: Candidate) -> Path:
        """Where a checkpoint's results go."""
        name = candidate.path.name.removesuffix(".hf")
        folder = self._output / name if self._output else candidate.path.with_name(name + ".eval")
        (folder / ".planaria").mkdir(parents=True, exist_ok=True)
        return folder

    def _mark(self, candidate: Candidate) -> dict[str, Any]:
        return {"files": self._state.taken[candidate.path], "settings": self._settings.to_json()}

    def _done_before(self, candidate: Candidate, fingerprint: str) -> bool:
        folder = self._target(candidate)
        try:
            mark = json.loads((folder / ".planaria" / "watch.json").read_text())
        except (OSError, ValueError):
            return False
        same = mark == {"files": fingerprint, "settings": self._settings.to_json()}
        return same and (folder / "results.json").is_file()
