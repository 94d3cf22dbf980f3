"""Checkpoint tiers of real jobs under real agents: what is handed over is published, and memory outlives its ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.events import JobState
from planner.manifest import parse_step_dir, verify
from planner.processes import marked
from planner.stack import Stack, stop_stack
from planner.store import ClusterStore
from pretrain import published, snapshot
from tests.support.cluster import Cluster, cluster, cluster_of_module
from tests.support.ranks import tiny
from tests.support.redis import await_that, redis_of_session

__all__ = ["cluster", "cluster_of_module", "redis_of_session"]

PLANARIA = [sys.executable, "-m", "planner.cli"]
SETTINGS = {"every_steps": 6, "snapshot_every_steps": 2, "export": True}
STEPS = 24


class Up:
    """A stack that ``planaria up`` started, and jobs handed in by ``planaria submit``."""

    def __init__(self, folder: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PLANARIA_")}
        self.environment = {**clean, "XDG_STATE_HOME": str(folder / "xdg"), "OMP_NUM_THREADS": "1"}
        self.state_dir = folder / "state"
        done = self.run("up", "--state-dir", str(self.state_dir), "--slots", "2")
        assert done.returncode == 0, done.stderr
        stack = Stack.load(self.state_dir)
        assert stack is not None
        self.stack = stack
        self.store = ClusterStore(stack.url, stack.secret)
        self.memory = stack.shm / f"node-{stack.node}"

    def run(self, *arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """``planaria`` with these arguments."""
        return subprocess.run(
            [*PLANARIA, *arguments], env=self.environment, capture_output=True, text=True, timeout=seconds
        )

    def submit(self, **changes: Any) -> str:
        """Hand a tiny job in; its id."""
        config = tiny(workers={"min": 2, "max": 2}, **changes)
        path = self.state_dir.parent / "job.yaml"
        path.write_text(yaml.safe_dump(config.to_json()))
        done = self.run("submit", str(path))
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def record(self, job: str) -> dict[str, Any]:
        """The job's record."""
        return self.store.job(job) or {}

    def wait(self, job: str, state: JobState, seconds: float = 180) -> dict[str, Any]:
        """Wait until the job is over; it must be in this state."""
        over = {JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.PREEMPTED}
        await_that(lambda: self.record(job).get("state") in over, seconds, f"{job} is over")
        assert self.record(job)["state"] == state, self.record(job)["reason"]
        return self.record(job)

    def folder(self, job: str) -> Path:
        """The job's folder."""
        return self.state_dir / "jobs" / job

    def lines(self, job: str, file: str) -> list[dict[str, Any]]:
        """Lines of one of its files."""
        return [json.loads(line) for line in (self.folder(job) / file).read_text().splitlines()]

    def events(self, job: str, action: str) -> list[dict[str, Any]]:
        """Its events of one kind."""
        return [event for event in self.lines(job, "events.jsonl") if event["action"] == action]

    def losses(self, job: str) -> dict[int, float]:
        """Step → loss; the last line of a step counts."""
        return {line["step"]: line["loss"] for line in self.lines(job, "metrics.jsonl")}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    made = Up(tmp_path_factory.mktemp("up"))
    yield made
    made.store.close()
    stop_stack(made.state_dir)


def _steps(folder: Path) -> list[int]:
    return [step for step, _ in published.published(folder / "checkpoints")]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_killed_ranks_resume_from_memory_and_every_checkpoint_is_published_and_exported(up: Up) -> None:
    calm = up.submit(name="calm", steps=STEPS, checkpoint=SETTINGS)
    up.wait(calm, JobState.DONE)
    faults = [{"at_step": 17, "rank": rank, "kind": "sigkill"} for rank in (0, 1)]
    hit = up.submit(name="hit", steps=STEPS, checkpoint=SETTINGS, faults=faults)
    record = up.wait(hit, JobState.DONE)
    assert len(record["fired"]) == 2
    (loaded,) = up.events(hit, "checkpoint.loaded")
    assert loaded["step"] in (14, 16), "the newest whole snapshot, not the checkpoint of step 12"
    assert "host memory" in loaded["reason"]
    calm_losses, losses = up.losses(calm), up.losses(hit)
    assert sorted(losses) == list(range(1, STEPS + 1))
    for step, loss in calm_losses.items():
        assert losses[step] == pytest.approx(loss, abs=1e-5), f"loss of step {step}"
    for job in (calm, hit):
        await_that(lambda job=job: len(up.events(job, "export.published")) == 4, 60, f"exports of {job}")
        assert _steps(up.folder(job)) == [6, 12, 18, 24]
        assert all(not verify(path) for _, path in published.published(up.folder(job) / "checkpoints"))
        told = up.events(job, "checkpoint.published")
        assert [event["step"] for event in told] == [6, 12, 18, 24]
        assert not up.events(job, "checkpoint.failed")
        assert not up.events(job, "checkpoint.refused")
        exports = published.published(up.folder(job) / "checkpoints", exports=True)
        assert [step for step, _ in exports] == [6, 12, 18, 24]
    assert any("rank" not in event for event in up.events(hit, "checkpoint.published")), "none came by the persister"
    await_that(lambda: not snapshot.job_dir(up.memory, "any").parent.exists(), 30, "finished jobs give memory back")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_preemption_publishes_the_last_step_within_the_grace_period(up: Up) -> None:
    """R13, by SIGTERM to the ranks: what is handed over last is on the disk before they are gone."""
    settings = {**SETTINGS, "export": False}
    job = up.submit(name="long", steps=5000, checkpoint=settings)
    await_that(lambda: any("rank" not in e for e in up.events(job, "checkpoint.published")), 120, "the persister works")
    began = time.monotonic()
    for rank in up.record(job)["ranks"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank["pid"], signal.SIGTERM)
    record = up.wait(job, JobState.PREEMPTED)
    seconds = time.monotonic() - began
    newest, refused = published.newest_verified(up.folder(job) / "checkpoints")
    assert newest is not None
    assert not refused
    parsed = parse_step_dir(newest.name)
    assert parsed is not None
    assert parsed[0] == record["step"]
    assert seconds < tiny().health.grace_seconds, f"{seconds:.1f} s"
    await_that(lambda: not snapshot.job_dir(up.memory, "any").parent.exists(), 30, "memory is given back")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_stays_in_memory_when_the_agent_is_killed_and_the_stack_goes_down(up: Up) -> None:
    up.submit(name="torn", steps=5000, checkpoint=SETTINGS)
    root = snapshot.job_dir(up.memory, "any").parent
    await_that(lambda: root.is_dir() and any(snapshot.find(job) for job in root.iterdir()), 120, "a snapshot is there")
    up.stack.processes["agent"].kill(signal.SIGKILL)
    assert up.run("down", "--state-dir", str(up.state_dir)).returncode == 0
    assert not marked(up.stack.id)
    assert not [path for path in Path("/dev/shm").iterdir() if up.stack.id in path.name]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_node_is_replaced_from_the_copy_that_another_node_keeps(cluster: Cluster) -> None:
    """Node, ranks and their memory are gone; the job goes on elsewhere from a snapshot newer than any checkpoint."""
    for node, switch in (("n1", "s1"), ("n2", "s2")):
        cluster.start_agent(node, 1, "127.0.0.1", real=True, PLANARIA_SWITCH=switch)
    one = {"workers": {"min": 1, "max": 1}}
    settings = {"every_steps": 1000, "snapshot_every_steps": 1, "export": False}
    job = cluster.submit(tiny(**one, steps=4000, checkpoint=settings))
    cluster.wait_step(3, seconds=120)
    (node,) = {rank["node"] for rank in cluster.record()["ranks"]}
    other = {"n1": "n2", "n2": "n1"}[node]
    shm = Path(cluster.environment["PLANARIA_SHM"])
    copies = snapshot.job_dir(shm / f"node-{other}", job) / f"peer-{node}"
    await_that(lambda: any(found.complete for found in snapshot.find(copies)), 60, "a copy lies on the other node")
    before = snapshot.find(copies)[0].step
    agent = cluster.agents.pop(node)
    agent.kill()
    agent.wait()
    for pid in cluster.rank_pids().values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(shm / f"node-{node}")
    await_that(lambda: cluster.events("checkpoint.loaded"), 120, "the job goes on on the other node")
    loaded = cluster.events("checkpoint.loaded")[0]
    assert loaded["step"] >= before
    (fetched,) = cluster.events("snapshot.fetched")
    assert f"copy of {node}" in fetched["reason"]
    assert {rank["node"] for rank in cluster.record()["ranks"]} == {other}
    cluster.store.send_request("cancel", job=job)
    cluster.wait_state(JobState.CANCELLED, seconds=60)
    await_that(lambda: not snapshot.job_dir(shm / f"node-{other}", job).exists(), 30, "copies are given back")
