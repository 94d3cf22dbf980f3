"""Exports of published checkpoints by a resident process: the coordinator itself never loads torch.

Starting Python and torch takes longer than most exports, so the process stays for the next checkpoint
(:mod:`pretrain.export_server`) and ends when no job exports any more, or with the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner import manifest
from planner.errors import one_line
from pretrain.agent_processes import log_tail

LONGEST_SECONDS = 900.0
IDLE_SECONDS = 30.0
"""Seconds without a job that exports after which the process ends."""


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
    started: float


class Exporter:
    """Runs one export at a time, with one thread: training and evaluation need the cores."""

    def __init__(self, log: Path) -> None:
        """``log`` takes what the process writes besides its answers."""
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._running: _Running | None = None
        self._needed = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether an export runs."""
        return self._running is not None

    @property
    def pid(self) -> int | None:
        """The resident process, where there is one."""
        return self._child.pid if self._child is not None else None

    def keep(self, wanted: bool) -> None:
        """Have the process up before it is needed, or let it go when it was not needed for a while."""
        now = time.monotonic()
        if wanted:
            self._needed = now
            with contextlib.suppress(OSError):  # said when an export is due
                self._ensure()
        elif now - self._needed > IDLE_SECONDS:
            self.close()

    def start(self, job: str, step: int, checkpoint: str, target: Path) -> ExportResult | None:
        """Begin an export of a published checkpoint (folder or URL); a result at once where that can be said now."""
        if (target / manifest.NAME).exists() and not manifest.verify(target):
            return ExportResult(job, step, str(target), "", 0.0)
        if "://" not in checkpoint and not (Path(checkpoint) / manifest.NAME).exists():
            return ExportResult(job, step, None, f"{checkpoint}: not published any more", 0.0)
        request = json.dumps({"checkpoint": checkpoint, "step": step, "target": str(target)})
        try:
            child = self._ensure()
            assert child.stdin is not None
            child.stdin.write(request.encode() + b"\n")
            child.stdin.flush()
        except OSError as error:
            self.close()
            return ExportResult(job, step, None, f"the export cannot be started: {error}", 0.0)
        self._running = _Running(job, step, target, time.monotonic())
        return None

    def poll(self) -> ExportResult | None:
        """The result of the export that runs, once it has ended."""
        running, child = self._running, self._child
        if running is None or child is None:
            return None
        seconds = time.monotonic() - running.started
        answer = self._read(child)
        if answer is not None:
            self._running = None
            path = str(running.target) if answer.get("ok") else None
            return ExportResult(running.job, running.step, path, one_line(str(answer.get("reason", "")))[:500], seconds)
        code = child.poll()
        if code is None and seconds < LONGEST_SECONDS:
            return None
        reason = f"no export within {LONGEST_SECONDS:.0f} s"
        if code is not None:
            last = (log_tail(self._log).splitlines() or [""])[-1]
            reason = f"the exporter ended with code {code}: {one_line(last)}"[:500]
        self.close()
        return ExportResult(running.job, running.step, None, reason, seconds)

    def close(self) -> None:
        """End the process with what it does; an export is begun again by whoever reads the record next."""
        child, self._child, self._running = self._child, None, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _ensure(self) -> subprocess.Popen[bytes]:
        """The process; started (again) where there is none."""
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "pretrain.export_server"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self._pending = b""
        return self._child

    def _read(self, child: subprocess.Popen[bytes]) -> dict[str, Any] | None:
        """One answer, if it is there."""
        assert child.stdout is not None
        while b"\n" not in self._pending:
            if not select.select([child.stdout], [], [], 0)[0]:
                return None
            chunk = os.read(child.stdout.fileno(), 65536)
            if not chunk:
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
