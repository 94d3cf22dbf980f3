"""Workers of a private fleet by fork, on a CPU-only host: what they import is imported once for all of them.

Importing lm-eval and vLLM takes longer than many an evaluation, and most of it is the same: torch, transformers and
what they need. The nursery imports lm-eval, forks the metric worker off, imports the engine, and forks infer workers
off, also those that take a dead one's place, which then cost no import at all. It has one thread of Python, holds no
secret that its workers do not hold, and never has an engine or a device itself. With a GPU workers start one by one: a
forked CUDA is of no use.

``python -m evalsched.nursery`` reads commands as JSON lines on standard input (:class:`Nursery` writes them) and tells
births and ends as JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from planner.forked import live

END_SECONDS = 1.0
"""How long the nursery may take to end by itself; while it imports it hears nothing."""
LOST = 1
"""Exit code of a worker of which nobody can say any more how it ended: its nursery died."""


@dataclass(frozen=True, kw_only=True)
class Birth:
    """What a worker is to be started with."""

    name: str
    kind: str
    environment: Mapping[str, str]
    log: str
    cores: Sequence[int] | None = None
    """Cores that it is pinned to; None: those of the nursery."""


# ---------------------------------------------------------------------- the owner's end


class Child:
    """A worker, with the part of ``subprocess.Popen`` that the fleet uses. ``pid`` is 0 until it is born."""

    def __init__(self, nursery: Nursery, name: str) -> None:
        self._nursery, self._name = nursery, name
        self.pid = 0
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit code (minus the signal), or None while it is to be born or lives."""
        self._nursery.hear()
        return self.code

    def kill(self) -> None:
        """End it, at once or as soon as it is born."""
        self._nursery.hear()
        if not self.pid and self.code is None:
            self._nursery.tell({"forget": self._name})
        self.end()

    def end(self) -> None:
        """Kill it if it was born and not heard of since."""
        if self.pid and self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """Starts the nursery, asks it for workers, hears of their ends.

    Args:
        environment: of the nursery: what must be set before the imports.
        log: file for what it prints.
        born: told the process id of each worker.
    """

    def __init__(self, environment: Mapping[str, str], log: Path, born: Callable[[int], None]) -> None:
        self._born = born
        self._children: dict[str, Child] = {}
        self._heard = b""
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evalsched.nursery"], env=dict(environment), stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=stream, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        born(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether it can still give birth."""
        return self._process.poll() is None

    def start(self, birth: Birth) -> Child:
        """Ask for a worker; it is born once what it needs is imported."""
        child = self._children[birth.name] = Child(self, birth.name)
        self.tell({"start": asdict(birth)})
        return child

    def tell(self, command: Mapping[str, Any]) -> None:
        """Send a command; a nursery that is gone hears nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self) -> None:
        """Take in what it said. Where it is gone, all its workers count as ended: they end with it."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return
        gone = not self.alive
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._process.stdout.fileno(), 65536):
                self._heard += piece
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            said = json.loads(line)
            child = self._children[said["name"]]
            if "pid" in said:
                child.pid = said["pid"]
                self._born(child.pid)
            else:
                child.code = said["code"]
        for child in self._children.values() if gone else ():
            child.end()
            child.code = LOST if child.code is None else child.code

    def close(self) -> None:
        """End it and all its workers."""
        self.hear()
        for child in self._children.values():
            child.end()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


# ---------------------------------------------------------------------- the nursery


class _Ward:
    """The nursery's own end: one thread, no locks."""

    def __init__(self, commands: int, reports: int) -> None:
        self._commands, self._reports = commands, reports
        self._read = b""
        self._waiting: list[Birth] = []
        self._alive: dict[int, str] = {}
        self._closed = False

    def serve(self) -> None:
        """Import, fork, reap, until the owner closes the commands."""
        _import_for_metrics()
        self._hear(0.0)
        self._bear("metric")
        _import_engine()
        gc.freeze()
        while not self._closed:
            self._hear(0.1)
            self._bear("metric", "infer")
            self._reap()
        for pid in self._alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._alive:
            self._reap()
            time.sleep(0.01)

    def _hear(self, seconds: float) -> None:
        while select.select([self._commands], [], [], seconds)[0]:
            piece = os.read(self._commands, 65536)
            if not piece:
                self._closed = True
                return
            self._read += piece
            *lines, self._read = self._read.split(b"\n")
            for line in lines:
                self._understand(json.loads(line))
            seconds = 0.0

    def _understand(self, command: Mapping[str, Any]) -> None:
        if "start" in command:
            self._waiting.append(Birth(**command["start"]))
            return
        forgotten = [one for one in self._waiting if one.name == command["forget"]]
        self._waiting = [one for one in self._waiting if one not in forgotten]
        for one in forgotten:
            self._say(name=one.name, code=-signal.SIGKILL)
        for pid, name in self._alive.items():
            if name == command["forget"]:  # it was born meanwhile
                os.kill(pid, signal.SIGKILL)

    def _bear(self, *kinds: str) -> None:
        for birth in [one for one in self._waiting if one.kind in kinds]:
            self._waiting.remove(birth)
            pid = os.fork()
            if pid == 0:
                os.close(self._commands)
                os.close(self._reports)
                live(birth.log, partial(_be_worker, birth), append=False)
            self._alive[pid] = birth.name
            self._say(name=birth.name, pid=pid)

    def _reap(self) -> None:
        while self._alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if name := self._alive.pop(pid, None):
                self._say(name=name, code=os.waitstatus_to_exitcode(status))

    def _say(self, **report: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._reports, json.dumps(report).encode() + b"\n")


def _import_for_metrics() -> None:
    for name in (
        "celery.concurrency.thread", "celery.worker.consumer", "kombu.transport.redis", "planner.cli", "evalsched.app",
        "evalsched.worker", "torch", "transformers.models.auto.tokenization_auto",
    ):  # fmt: skip
        import_module(name)
    from evalsched.metric_work import preload

    preload()


def _import_engine() -> None:
    from evalsched.residency import preload

    preload()


def _be_worker(birth: Birth) -> None:
    os.environ.update(birth.environment)
    os.environ["PLANARIA_PRIVATE_PARENT"] = str(os.getppid())
    if birth.cores:
        os.sched_setaffinity(0, set(birth.cores))
    from planner.cli import main

    sys.argv = ["planaria", "worker", "--kind", birth.kind, "--name", birth.name]
    main()


def main() -> None:
    """Keep standard input and output for the owner: what imports print goes to the log."""
    commands, reports = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    _Ward(commands, reports).serve()


if __name__ == "__main__":
    main()
