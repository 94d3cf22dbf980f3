"""Exports of published checkpoints, as subprocesses: the coordinator itself never loads torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from planner import manifest
from planner.errors import one_line
from planner.processes import ProcessId
from pretrain.agent_processes import log_tail

LONGEST_SECONDS = 900.0


@dataclass(frozen=True)
class ExportResult:
    """How an export ended; ``path`` is None where it failed."""

    job: str
    step: int
    path: str | None
    reason: str
    seconds: float


@dataclass
class _Running:
    job: str
    step: int
    target: Path
    log: Path
    child: subprocess.Popen[bytes]
    started: float


class Exporter:
    """Runs one export at a time, with one thread: training and evaluation need the cores."""

    def __init__(self) -> None:
        self._running: _Running | None = None

    @property
    def busy(self) -> bool:
        """Whether one runs."""
        return self._running is not None

    def start(self, job: str, step: int, checkpoint: Path, logs: Path) -> ExportResult | None:
        """Begin an export; a result at once where it is there already or cannot begin."""
        target = checkpoint.with_name(manifest.step_dir_name(step, export=True))
        if (target / manifest.NAME).exists() and not manifest.verify(target):
            return ExportResult(job, step, str(target), "", 0.0)
        if not (checkpoint / manifest.NAME).exists():
            return ExportResult(job, step, None, f"{checkpoint}: not published any more", 0.0)
        log = logs / f"export-{step:08d}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        program = [sys.executable, "-m", "planner.cli", "checkpoint", "export", str(checkpoint)]
        try:
            with log.open("wb") as stream:
                child = subprocess.Popen(
                    program, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            return ExportResult(job, step, None, f"the export cannot be started: {error}", 0.0)
        self._running = _Running(job, step, target, log, child, time.monotonic())
        return None

    def poll(self) -> ExportResult | None:
        """The result of the export that runs, once it has ended."""
        running = self._running
        if running is None:
            return None
        seconds = time.monotonic() - running.started
        code = running.child.poll()
        if code is None and seconds < LONGEST_SECONDS:
            return None
        if code is None:
            self.close()
            return ExportResult(running.job, running.step, None, f"no export within {LONGEST_SECONDS:.0f} s", seconds)
        self._running = None
        if code == 0:
            return ExportResult(running.job, running.step, str(running.target), "", seconds)
        last = one_line((log_tail(running.log).splitlines() or [f"exit code {code}"])[-1])
        return ExportResult(running.job, running.step, None, last[:500], seconds)

    def close(self) -> None:
        """End the export that runs; it is begun again by whoever reads the record next."""
        running, self._running = self._running, None
        if running is not None and ProcessId.of(running.child.pid) is not None:
            os.killpg(running.child.pid, signal.SIGKILL)
            running.child.wait()
