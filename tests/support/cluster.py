"""A cluster for tests: real Redis, real coordinator, real agents whose ranks do arithmetic (or train, on request).

One per module: starting one takes longer than most tests do. Each test hands in jobs of its own; what it breaks it
mends (:meth:`Cluster.ensure_agent`), and what it leaves running is cancelled after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from planner.auth import new_secret
from planner.events import TERMINAL, JobState
from planner.pretrain_config import PretrainConfig
from planner.processes import marked
from planner.redis_server import RedisServer
from planner.scratch import remove_scratch
from planner.store import ClusterStore
from tests.support.redis import await_that

ROOT = Path(__file__).resolve().parents[2]

PLAIN: dict[str, Any] = {
    "name": "plain",
    "workers": {"min": 2, "max": 2},
    "model": {"layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "heads": 2, "seq_length": 32},
    "data": {"train": ["stdlib"]},
    "batch": {"global": 8, "micro": 2},
    "optimizer": {"lr": 1.0e-3},
    "steps": 12,
    "checkpoint": {"every_steps": 4, "export": False},
    "health": {"grace_seconds": 5.0},
}


def plain(**changes: Any) -> PretrainConfig:
    """A config for ranks that do arithmetic."""
    return PretrainConfig.model_validate({**PLAIN, **changes})


@dataclass
class Cluster:
    """The running parts; everything is ended at the end of the module."""

    store: ClusterStore
    state_dir: Path
    mark: str
    environment: dict[str, str]
    coordinator: subprocess.Popen[bytes] | None = None
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    job: str = ""
    """The job that was handed in last."""
    count: int = 0

    def _start(self, name: str, *program: str, **environment: str) -> subprocess.Popen[bytes]:
        log = (self.state_dir / f"{name}.log").open("ab")
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", *program],
                env={**self.environment, **environment},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def start_coordinator(self) -> None:
        """Start one (again) and wait until it has the lock."""
        self.coordinator = process = self._start(
            "coordinator", "planner.cli", "coordinator", "--state-dir", str(self.state_dir)
        )
        await_that(
            lambda: (lock := self.store.coordinator()) and lock.pid == process.pid, 30, "a coordinator is active"
        )

    def start_agent(
        self, node: str, slots: int, address: str = "127.0.0.1", *, real: bool = False, **environment: str
    ) -> None:
        """Start an agent with a state directory of its own and wait until its slots are free."""
        folder = self.state_dir / f"agent-{node}"
        folder.mkdir(exist_ok=True)
        secret = str(self.state_dir / "secret")
        if real:
            program = ["planner.cli", "agent", "--node", node, "--slots", str(slots), "--address", address]
            program += ["--state-dir", str(folder), "--secret-file", secret]
            environment = {"PLANARIA_TRAIN_PYTHON": str(self._yielding_python()), **environment}
        else:
            program = ["tests.support.plain_agent", node, str(slots), address, str(folder), secret]
        self.agents[node] = process = self._start(f"agent-{node}", *program, **environment)
        await_that(
            lambda: any(n.name == node and n.pid == process.pid for n in self.store.nodes()), 30, f"node {node} is up"
        )
        await_that(lambda: not self.store.quarantine(node), 20, f"slots of {node} are free")

    def _yielding_python(self) -> Path:
        """An interpreter for ranks that leaves the cores to who watches them: they train as long as a test lasts."""
        path = self.state_dir / "python"
        if not path.exists():
            path.write_text(f'#!/bin/sh\nexec chrt --idle 0 {sys.executable} "$@"\n')
            path.chmod(0o755)
        return path

    def ensure_agent(self, node: str, slots: int, address: str = "127.0.0.1", *, real: bool = False) -> None:
        """Start an agent unless one of that name runs."""
        running = self.agents.get(node)
        if running is None or running.poll() is not None:
            self.start_agent(node, slots, address, real=real)

    def end_agent(self, node: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal an agent and wait until it is gone."""
        process = self.agents.pop(node)
        process.send_signal(number)
        process.wait(timeout=30)

    def settle(self) -> None:
        """Cancel what still runs, and wait until its slots are free."""
        for job, record in self.store.jobs().items():
            if record["state"] not in TERMINAL:
                self.store.send_request("cancel", job=job)
                self.wait_state(job=job, seconds=30)
        await_that(lambda: not self.store.leases("job:"), 20, "all slots are given back")
        for node in self.agents:
            await_that(lambda node=node: not self.store.quarantine(node), 20, f"slots of {node} are free")

    def submit(self, config: PretrainConfig, job: str = "") -> str:
        """Hand a job in, past the command."""
        self.count += 1
        self.job = job = job or f"job-{self.count}"
        self.store.send_request("submit", job=job, config=config.to_json())
        await_that(lambda: self.store.job(job), 20, "the job is taken")
        return job

    def record(self, job: str = "") -> dict[str, Any]:
        """The job's record."""
        return self.store.job(job or self.job) or {}

    def folder(self, job: str = "") -> Path:
        """The job's folder."""
        return self.state_dir / "jobs" / (job or self.job)

    def wait_state(self, *states: JobState, job: str = "", seconds: float = 60.0) -> dict[str, Any]:
        """Wait until the job is in one of these states (or over)."""
        wanted = set(states) | TERMINAL
        await_that(lambda: self.record(job).get("state") in wanted, seconds, f"{job or self.job} in {sorted(wanted)}")
        return self.record(job)

    def wait_step(self, step: int, job: str = "", seconds: float = 60.0) -> None:
        """Wait until a step is complete."""
        await_that(lambda: self.record(job).get("step", 0) >= step, seconds, f"step {step} of {job or self.job}")

    def lines(self, file: str, job: str = "") -> list[dict[str, Any]]:
        """Whole lines of one of the job's files; of a job that runs, the last may be in the middle of being written."""
        whole, _, _ = (self.folder(job) / file).read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def events(self, action: str, job: str = "") -> list[dict[str, Any]]:
        """Events of one action."""
        return [event for event in self.lines("events.jsonl", job) if event["action"] == action]

    def rank_pids(self, job: str = "") -> dict[int, int]:
        """Rank → process id of the present incarnation."""
        return {rank["rank"]: rank["pid"] for rank in self.record(job)["ranks"] if not rank["gone"]}

    def kept(self, job: str = "") -> dict[int, tuple[list[int], float]]:
        """Step → (sample ids, loss) of steps that stand in both files; a step that stands twice has its last lines.

        A job that still trains writes between the two readings, so that the file read last may be a step ahead.
        """
        losses = {line["step"]: line["loss"] for line in self.lines("metrics.jsonl", job)}
        samples = {line["step"]: line["ids"] for line in self.lines("samples.jsonl", job)}
        return {step: (samples[step], losses[step]) for step in sorted(samples.keys() & losses.keys())}

    def log(self, name: str) -> str:
        """What a process said."""
        return (self.state_dir / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def cluster_of_module(redis_of_session: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a coordinator and no agent yet."""
    folder = tmp_path_factory.mktemp("cluster")
    secret = new_secret()
    (folder / "secret").write_text(secret)
    store = ClusterStore(redis_of_session.url, secret, patience=20.0)
    store.link.call(lambda client: client.flushall())
    mark = f"test-{os.getpid()}-{folder.name}"
    environment = {**os.environ, "PLANARIA_URL": store.url, "PLANARIA_STACK": mark, "OMP_NUM_THREADS": "1"}
    environment |= {"PLANARIA_SHM": str(folder / "shm"), "PYTHONPATH": str(ROOT)}
    made = Cluster(store, folder, mark, environment)
    try:
        made.start_coordinator()
        yield made
    finally:
        own = [*made.agents.values(), *([made.coordinator] if made.coordinator else [])]
        for process in own:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        for left in marked(mark):
            left.kill(signal.SIGKILL)
        for run_dir in folder.glob("*/nodes/*"):
            remove_scratch(run_dir)  # an agent that was killed leaves it to the next
        store.close()


@pytest.fixture
def cluster(cluster_of_module: Cluster) -> Iterator[Cluster]:
    """The module's cluster; nothing runs in it before and after the test."""
    yield cluster_of_module
    cluster_of_module.settle()


def left_over(cluster: Cluster) -> list[int]:
    """Processes of the cluster besides coordinator and agents with their nurseries."""
    own = {process.pid for process in cluster.agents.values()}
    own |= {cluster.coordinator.pid} if cluster.coordinator else set()
    return [process.pid for process in marked(cluster.mark) if process.pid not in own and not _is_nursery(process.pid)]


def _is_nursery(pid: int) -> bool:
    """Whether a process is what forks an agent's ranks (not a rank that it forked, which leads its own session)."""
    with contextlib.suppress(OSError):
        program = b"pretrain.nursery" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return program and b"pretrain.nursery" not in Path(f"/proc/{parent}/cmdline").read_bytes()
    return False
