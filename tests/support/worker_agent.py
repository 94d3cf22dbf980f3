"""An agent for tests of the scheduler: answers for slots and starts workers on leases, their engine stubbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.messages import StartWorker, StopWorker, WorkerExited
from planner.store import ClusterStore
from tests.support.redis import SlotAgent

STUB = (sys.executable, "-m", "tests.support.stub_worker")


class WorkerAgent(SlotAgent):
    """Carries out ``start_worker`` and ``stop_worker`` on top of what :class:`SlotAgent` does."""

    def __init__(
        self,
        store: ClusterStore,
        node: str,
        slots: int,
        secret_file: Path,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = STUB,
    ) -> None:
        super().__init__(store, node, slots)
        self._secret_file = secret_file
        self._environment = dict(environment or {})
        self._program = tuple(program)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.started: list[str] = []
        self._slots: dict[str, list[str]] = {}
        self._after = "0-0"
        self._work = threading.Thread(target=self._carry_out, daemon=True)

    def __enter__(self) -> WorkerAgent:
        super().__enter__()
        self._work.start()
        return self

    def stop(self) -> None:
        """End the workers too."""
        super().stop()
        self._work.join()
        for process in self.processes.values():
            process.kill()
            process.wait()

    def infer(self) -> dict[str, int]:
        """Process ids of the infer workers that live."""
        return {name: process.pid for name, process in self.processes.items() if name in self.started}

    def _carry_out(self) -> None:
        while not self._stop.is_set():
            for entry in self.store.read_commands(self.facts.name, self._after, block=0.05):
                self._after = entry.id
                self._do(entry.payload)
            self._reap()

    def _do(self, command: Any) -> None:
        if isinstance(command, StartWorker):
            if command.worker in self.processes:
                return
            own = {
                "PLANARIA_URL": self.store.url, "PLANARIA_SECRET_FILE": str(self._secret_file),
                "PLANARIA_NODE": self.facts.name, "PLANARIA_LEASE": command.lease or "",
                "PLANARIA_LEASE_TOKEN": str(command.lease_token),
            }  # fmt: skip
            program = [*self._program, "--kind", command.worker_kind]
            self.processes[command.worker] = subprocess.Popen(
                [*program, "--name", command.worker],
                env=os.environ | self._environment | own, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            if command.worker_kind == "infer":
                self.started.append(command.worker)
            self._slots[command.worker] = [f"{self.facts.name}/{slot}" for slot in command.slots]
            self.holds |= set(self._slots[command.worker])
        elif isinstance(command, StopWorker) and command.worker in self.processes:
            self.processes[command.worker].send_signal(signal.SIGTERM if command.grace_seconds > 0 else signal.SIGKILL)

    def _reap(self) -> None:
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is None:
                continue
            del self.processes[name]
            self.holds -= set(self._slots[name])
            report = WorkerExited(
                time=time.time(), worker=name, pid=process.pid, exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None, asked=False, tail="",
            )  # fmt: skip
            self.store.send_report(self.facts.name, report)
