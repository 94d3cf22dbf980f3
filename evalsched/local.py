"""A private fleet for ``planaria eval``: a Redis of its own and N workers as subprocesses, gone with their owner."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalsched.conductor import Conductor
from evalsched.guard import Guard
from evalsched.nursery import Birth, Child, Nursery
from evalsched.recording import OFFLINE
from planner.auth import new_secret
from planner.errors import MissingServiceError, one_line
from planner.processes import end_groups
from planner.redis_server import RedisServer, start_redis
from planner.scratch import scratch_environment
from planner.store import ClusterStore

WORKER = (sys.executable, "-m", "planner.cli", "worker")
PRELOADED = OFFLINE | {"TQDM_DISABLE": "1"}
"""What lm-eval's libraries read when they are imported, which in the nursery is before they are a metric worker's."""
FRUITLESS_STARTS = 3
"""Workers that may end one after another without having served, before that is called the machine's fault."""


def device() -> str:
    """What engines run on here, without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "cpu"
    return "cuda" if shutil.which("nvidia-smi") and Path("/dev/nvidia0").exists() else "cpu"


@dataclass
class _Process:
    name: str
    number: int
    process: subprocess.Popen[bytes] | Child
    log: Path


class LocalFleet:
    """Starts workers, starts them again when they die, ends them.

    Args:
        workers: how many.
        threads: compute threads of each, on CPU.
        program: what a worker is started with; ``--kind`` and ``--name`` follow.
        metric: start a metric worker too, which keeps lm-eval imported between recording and scoring.
        cores: on CPU, cores that workers are pinned to in turn; not pinned when left out.
    """

    def __init__(
        self,
        workers: int,
        threads: int,
        program: Sequence[str] = WORKER,
        *,
        metric: bool = True,
        cores: Sequence[int] | None = None,
    ) -> None:
        self.metric = metric
        self._metric: subprocess.Popen[bytes] | Child | None = None
        self._program = tuple(program)
        self._nursery: Nursery | None = None
        self._cores = cores
        self.folder = Path(tempfile.mkdtemp(prefix="planaria-eval-"))
        self._guard = Guard(self.folder)
        self._scratch = self.folder / "tmp"
        self._scratch.mkdir()
        self._threads = threads
        self._count = workers
        self._processes: dict[str, _Process] = {}
        self._started = 0
        self._fruitless = 0
        self._secret = new_secret()
        (self.folder / "secret").write_text(self._secret)
        (self.folder / "secret").chmod(0o600)
        self._redis = self._start_redis()
        self.store = ClusterStore(self._redis.url, self._secret)

    def _start_redis(self) -> RedisServer:
        try:
            server = start_redis(self.folder / "redis")
        except BaseException:
            self._guard.close()
            raise
        self._guard.add(server.pid)
        return server

    def start(self) -> None:
        """Start the workers that are not there yet."""
        if self.metric and self._metric is None:
            self._metric = self._begin("metric", f"local-metric-{os.getpid()}", 0)
        taken = {one.number for one in self._processes.values()}
        for number in range(self._count):
            if number not in taken:
                self._spawn(number)

    @property
    def size(self) -> int:
        """How many workers it has when all are there."""
        return self._count

    @property
    def running(self) -> bool:
        """Whether any worker was started."""
        return self._started > 0

    def _spawn(self, number: int) -> None:
        self._started += 1
        name = f"local-{number}-{self._started}"
        self._processes[name] = _Process(name, number, self._begin("infer", name, number), self._log(name))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _begin(self, kind: str, name: str, number: int) -> subprocess.Popen[bytes] | Child:
        """Start a worker: from the nursery on CPU, else (or with another program) by itself."""
        if self._program != WORKER or device() != "cpu":
            return self._popen(kind, name, number)
        own = self._environment(number)
        if self._nursery is not None and not self._nursery.alive:
            self._nursery.close()
            self._nursery = None
        if self._nursery is None:
            self._nursery = Nursery(own | PRELOADED, self._log("nursery"), self._guard.add)
        cores = [self._cores[number % len(self._cores)]] if self._cores else None
        return self._nursery.start(
            Birth(name=name, kind=kind, environment=self._own(number), log=str(self._log(name)), cores=cores)
        )

    def _popen(self, kind: str, name: str, number: int) -> subprocess.Popen[bytes]:
        with self._log(name).open("wb") as stream:
            process = subprocess.Popen(
                [*self._program, "--kind", kind, "--name", name],
                env=self._environment(number),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        self._guard.add(process.pid)
        return process

    def _environment(self, number: int) -> dict[str, str]:
        return os.environ | self._own(number)

    def _own(self, number: int) -> dict[str, str]:
        own = {
            "PLANARIA_URL": self.store.url,
            "PLANARIA_SECRET_FILE": str(self.folder / "secret"),
            "PLANARIA_PRIVATE_PARENT": str(os.getpid()),
            "OMP_NUM_THREADS": str(self._threads),
        }
        own |= scratch_environment(self._scratch)
        if device() == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            devices = visible.split(",") if visible else [str(index) for index in range(self._count)]
            own["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
        return own

    def watch(self, conductor: Conductor, now: float) -> None:
        """Notice workers that died, tell the conductor, start others in their place.

        Raises:
            MissingServiceError: they die again and again without having served.
        """
        conductor.desk.expected = self._metric is not None and self._metric.poll() is None
        for name, one in list(self._processes.items()):
            code = one.process.poll()
            if code is None:
                continue
            served = name in conductor.served
            _end([one.process])  # what it started
            reason = _why(code, one.log if one.log.exists() else self._log("nursery"))
            conductor.worker_gone(name, reason, now, orderly=code == 4)
            del self._processes[name]
            self._fruitless = 0 if served else self._fruitless + 1
            if self._fruitless >= FRUITLESS_STARTS:
                raise MissingServiceError(f"workers do not come up: {reason}")
            if not conductor.idle:
                self._spawn(one.number)

    def kill(self, worker: str, reason: str) -> None:
        """End a worker that hangs."""
        if one := self._processes.get(worker):
            _end([one.process])

    def adopt(self, pid: int) -> None:
        """Let ``pid``, the leader of its session, not outlive the fleet."""
        self._guard.add(pid)

    def processes(self) -> dict[str, int]:
        """Process ids by worker."""
        return {name: one.process.pid for name, one in self._processes.items()}

    def close(self) -> None:
        """End everything; leaves no process and no file."""
        every = [one.process for one in self._processes.values()] + ([self._metric] if self._metric else [])
        _end(every)
        self.store.close()
        if self._nursery is not None:
            self._nursery.close()
        self._guard.close()
        for process in every:
            if isinstance(process, subprocess.Popen):
                process.wait()

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _end(processes: Sequence[subprocess.Popen[bytes] | Child]) -> None:
    """End workers and what they started; one that is not born yet is not born any more."""
    end_groups([process.pid for process in processes if process.pid])
    for process in processes:
        process.kill()


def _why(code: int, log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{how}; last line: {one_line(lines[-1])[:300]}" if lines else how
