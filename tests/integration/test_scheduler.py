"""The scheduler with the real allocator and real workers (engine stubbed): exports, leases, kills, restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from evalsched.runs import RunSpec
from evalsched.types import EvalSettings
from planner.allocator_settings import SETTINGS_FILE
from planner.events import Action, TrialState
from planner.store import ClusterStore
from tests.support.lm_tasks import write_tasks
from tests.support.redis import await_that
from tests.support.scheduler_cluster import Coordinator, cluster, training
from tests.support.tiny_model import write_model

TASKS = ("choice_plain", "last_word", "rolling")
PATIENCE = 240.0
"""Seconds for what takes a few: lm-eval is imported meanwhile, on cores that other tests use too."""
pytestmark = pytest.mark.timeout(600)


class World:
    """What all tests share: tasks, a model, a cache of recordings."""

    def __init__(self, folder: Path) -> None:
        self.tasks = write_tasks(folder / "tasks", documents=12)
        self.model = write_model(folder / "model", seed=3)
        self.settings = EvalSettings(tasks=TASKS, include_path=(str(self.tasks),), bootstrap_iters=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("scheduler")
    old = os.environ.get("PLANARIA_CACHE")
    os.environ["PLANARIA_CACHE"] = str(folder / "cache")
    yield World(folder)
    if old is None:
        del os.environ["PLANARIA_CACHE"]
    else:
        os.environ["PLANARIA_CACHE"] = old


def ask(store: ClusterStore, world: World, output: Path) -> None:
    spec = RunSpec(
        model=str(world.model), settings=world.settings, output=str(output), created=0.0, target_seconds=0.05
    )
    store.send_request("evaluate", spec=spec.to_json())


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())["results"]


def test_a_published_export_becomes_a_report(store: ClusterStore, world: World, tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "j"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("")
    config = {"evaluate": {"tasks": ["stdlib_next_line"], "limit": 3}, "weight": 2.0}
    store.put_job("j", {"folder": str(folder), "config": config, "state": "running"})
    with cluster(store, tmp_path) as (coordinator, agent):
        store.tell(Action.EXPORT_PUBLISHED, job="j", step=50, path=str(world.model), evaluate=True)
        store.tell(Action.EXPORT_PUBLISHED, job="j", step=60, path=str(world.model), evaluate=False)
        await_that(coordinator.finished(), PATIENCE)
        (row,) = coordinator.rows
        report = coordinator.events(Action.REPORT_PUBLISHED)
        trials = [event.new for event in coordinator.events(Action.TRIAL_STATE)]
        assert len(agent.started) == 1
    assert (row["job"], row["step"], row["state"]) == ("j", 50, "done")
    assert trials == [TrialState.RECORDING, TrialState.RUNNING, TrialState.SCORING, TrialState.DONE]
    assert Path(report[0].details["path"]) == folder / "reports" / "step-00000050" / "results.json"
    assert (folder / "reports" / "report.html").is_file()


def test_training_takes_a_slot_back_in_the_middle_of_a_shard(store: ClusterStore, world: World, tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text("stop_probability: 0\nageing_seconds: 1.0e+9\n")  # worth no loan
    with cluster(store, tmp_path, slots=1, STUB_SECONDS="0.1") as (coordinator, agent):
        ask(store, world, tmp_path / "out")
        await_that(lambda: len(coordinator.events(Action.SHARD_COMPLETED)) >= 1, PATIENCE)
        asked = time.monotonic()
        store.set_demand("job:j", training(1))
        await_that(lambda: store.leases("job:j"), 20)
        freed = time.monotonic() - asked
        await_that(lambda: not agent.infer(), 5)
        store.drop_demand("job:j")
        for lease in store.leases("job:j"):
            store.release(lease)
        await_that(coordinator.finished(), PATIENCE)
        failed = coordinator.events(Action.SHARD_FAILED)
        ran = coordinator.events(Action.SHARD_COMPLETED)
    assert freed < 4.0
    assert failed == [], "a revocation is no failed attempt"
    assert len(agent.started) == 2
    assert sum(event.details["requests"] for event in ran) <= 12 * 6 + len(ran)
    assert set(metrics(tmp_path / "out")) == set(TASKS)


def test_a_killed_workers_shard_runs_elsewhere_at_once(store: ClusterStore, world: World, tmp_path: Path) -> None:
    with cluster(store, tmp_path, slots=2, STUB_SECONDS="0.1") as (coordinator, agent):
        ask(store, world, tmp_path / "out")
        await_that(lambda: len(coordinator.events(Action.SHARD_COMPLETED)) >= 1 and agent.infer(), PATIENCE)
        name, pid = next(iter(agent.infer().items()))
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        await_that(lambda: any(e.details["worker"] == name for e in coordinator.events(Action.WORKER_EXITED)), 20)
        noticed = time.monotonic() - killed
        await_that(coordinator.finished(), PATIENCE)
        failed = coordinator.events(Action.SHARD_FAILED)
    assert noticed < 3.0
    assert len(failed) <= 1
    assert set(metrics(tmp_path / "out")) == set(TASKS)


def test_a_scheduler_that_restarts_again_and_again_loses_nothing(
    store: ClusterStore, world: World, tmp_path: Path
) -> None:
    with cluster(store, tmp_path, slots=2, STUB_SECONDS="0.05") as (coordinator, agent):
        ask(store, world, tmp_path / "out")
        done = coordinator.finished()
        deadline = time.monotonic() + PATIENCE
        while not done() and time.monotonic() < deadline:
            time.sleep(1.0)
            if not any(row["state"] == "scoring" for row in coordinator.rows):
                coordinator.restart()
        assert done()
        (row,) = coordinator.rows
        failed = coordinator.events(Action.SHARD_FAILED)
        started = list(agent.started)
    assert row["state"] == "done"
    assert failed == []
    assert len(started) <= 2
    assert set(metrics(tmp_path / "out")) == set(TASKS)


def test_a_failed_trial_is_retried_when_asked(store: ClusterStore, world: World, tmp_path: Path) -> None:
    flag = tmp_path / "poison"
    flag.write_text("")
    with cluster(store, tmp_path, slots=1, STUB_REFUSE="5: what follows", STUB_ONLY_WHILE=str(flag)) as (
        coordinator,
        _,
    ):
        ask(store, world, tmp_path / "out")
        await_that(coordinator.finished(), PATIENCE)
        (row,) = coordinator.rows
        assert row["failed"] == ["choice_plain"]
        flag.unlink()
        store.send_request("retry", trial=row["run"])
        await_that(lambda: [one["failed"] for one in coordinator.rows] == [[]] and coordinator.finished()(), PATIENCE)
        store.send_request("retry", trial="no-such-trial")
        await_that(lambda: any("no-such-trial" in e.reason for e in coordinator.events(Action.MESSAGE_REFUSED)), 10)
    assert set(metrics(tmp_path / "out")) == set(TASKS)


def test_a_worker_started_by_hand_brings_its_slot(store: ClusterStore, world: World, tmp_path: Path) -> None:
    with cluster(store, tmp_path, slots=1) as (coordinator, agent):
        store.set_demand("job:j", training(1))
        await_that(lambda: store.leases("job:j"), 20)
        own = {"PLANARIA_URL": store.url, "PLANARIA_SECRET_FILE": str(tmp_path / "secret")}
        by_hand = subprocess.Popen(
            [sys.executable, "-m", "tests.support.stub_worker", "--kind", "infer", "--name", "mine"],
            env=os.environ | own, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            ask(store, world, tmp_path / "out")
            await_that(coordinator.finished(), PATIENCE)
            assert agent.started == []
            by_hand.terminate()
            assert by_hand.wait(10) == 4
        finally:
            by_hand.kill()
            by_hand.wait()
        assert store.leases("evaluation:") == []
    assert set(metrics(tmp_path / "out")) == set(TASKS)


def ready_by_hand(coordinator: Coordinator) -> list[Any]:
    return [one for one in coordinator.events(Action.WORKER_READY) if "byhand" in one.details["worker"]]


def test_celery_itself_starts_a_worker_that_fleet_tools_see(store: ClusterStore, world: World, tmp_path: Path) -> None:
    from evalsched.app import make_app

    with cluster(store, tmp_path, slots=1) as (coordinator, _):
        own = {"PLANARIA_URL": store.url, "PLANARIA_SECRET_FILE": str(tmp_path / "secret")}
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "evalsched.app",
            "worker",
            "-l",
            "WARNING",
            "-n",
            "byhand@here",
        ]
        process = subprocess.Popen(command, env=os.environ | own, stdin=subprocess.DEVNULL)
        try:
            ready = partial(ready_by_hand, coordinator)
            await_that(ready, PATIENCE)
            worker = ready()[0].details["worker"]
            inspect = make_app(store.url).control.inspect(timeout=20, limit=1)
            found = inspect.active_queues()
            assert found is not None
            assert [queue["name"] for queues in found.values() for queue in queues] == [f"planaria.infer.{worker}"]
            process.terminate()
            assert process.wait(60) == 4
        finally:
            process.kill()
            process.wait()
