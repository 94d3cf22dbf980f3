"""The coordinator: its lock, its stand-by, its loops that crash, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.coordinator import Coordinator, LoopRunner
from planner.epoch import next_epoch, read_epoch
from planner.errors import BadInputError, FencedError
from planner.events import Action
from planner.store import ClusterStore
from tests.support.redis import await_that


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def _start(store: ClusterStore, folder: Path, processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    assert store.secret is not None
    (folder / "secret").write_text(store.secret)
    log = (folder / f"coordinator-{len(processes)}.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "planner.cli", "coordinator", "--state-dir", str(folder)],
        env={**os.environ, "PLANARIA_URL": store.url},
        stdout=log,
        stderr=log,
    )
    log.close()
    processes.append(process)
    return process


def _owner(store: ClusterStore) -> int | None:
    lock = store.coordinator()
    return None if lock is None else lock.pid


def test_a_stand_by_takes_over_from_one_that_was_killed_with_a_higher_token(
    store: ClusterStore, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    first = _start(store, tmp_path, processes)
    await_that(lambda: _owner(store) == first.pid, 30.0, "the first is active")
    second = _start(store, tmp_path, processes)
    before = store.coordinator()
    assert before is not None
    await_that(lambda: (tmp_path / "coordinator-1.log").exists(), 5.0)
    time.sleep(1.0)  # long enough for the second to have tried
    assert _owner(store) == first.pid
    epoch = read_epoch(tmp_path)
    first.send_signal(signal.SIGKILL)
    await_that(lambda: _owner(store) == second.pid, 20.0, "the second took over")
    after = store.coordinator()
    assert after is not None
    assert after.token > before.token
    assert read_epoch(tmp_path) > epoch
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=15) == 0
    assert store.coordinator() is None, "it gave the lock back"
    actions = [event.action for event in store.last_events(500)]
    assert actions.count(Action.COORDINATOR_STARTED) == 2
    assert Action.COORDINATOR_STOPPED in actions


def test_a_coordinator_leaves_at_once_while_redis_is_away(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    from planner.auth import new_secret
    from planner.redis_server import start_redis
    from tests.support.redis import end_server

    server = start_redis(tmp_path / "redis")
    store = ClusterStore(server.url, new_secret(), patience=5.0)
    process = _start(store, tmp_path, processes)
    await_that(lambda: _owner(store) == process.pid, 30.0, "active")
    end_server(server)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=15) == 0
    store.close()


class _Once:
    """A loop that raises in its second round."""

    built = 0

    def __init__(self, store: ClusterStore, state_dir: Path) -> None:
        type(self).built += 1
        self.rounds = 0

    def tick(self, now: float) -> None:
        self.rounds += 1
        if self.rounds == 2:
            raise ZeroDivisionError("the second round")


class _Never(_Once):
    built = 0

    def tick(self, now: float) -> None:
        raise RuntimeError("never works")


class _Overtaken(_Once):
    def tick(self, now: float) -> None:
        raise FencedError("overtaken")


def test_a_loop_that_raises_is_told_with_its_traceback_and_goes_on(store: ClusterStore, tmp_path: Path) -> None:
    runner = LoopRunner("once", lambda: _Once, store, tmp_path, threading.Event())
    pauses = [runner.round() for _ in range(3)]
    assert pauses[1] > pauses[0] == pauses[2]
    assert _Once.built == 1, "one crash does not lose the loop's state"
    (event,) = store.last_events()
    assert event.action is Action.LOOP_CRASHED
    assert event.details["loop"] == "once"
    assert "ZeroDivisionError" in event.details["traceback"]


def test_a_loop_that_never_works_rests_longer_each_time_and_is_built_anew(store: ClusterStore, tmp_path: Path) -> None:
    runner = LoopRunner("never", lambda: _Never, store, tmp_path, threading.Event())
    pauses = [runner.round() for _ in range(9)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0
    assert _Never.built == 3
    missing = LoopRunner("missing", lambda: getattr(sys, "no_such_class"), store, tmp_path, threading.Event())  # noqa: B009
    assert missing.round() == 0.5
    overtaken = LoopRunner("overtaken", lambda: _Overtaken, store, tmp_path, threading.Event())
    overtaken.round()
    assert overtaken.fenced


def test_redis_that_restarted_gets_a_new_epoch_and_the_loops_go_on(tmp_path: Path) -> None:
    from planner.auth import new_secret
    from planner.redis_server import start_redis
    from tests.support.redis import end_server

    server = start_redis(tmp_path / "redis")
    store = ClusterStore(server.url, new_secret(), patience=20.0)
    coordinator = Coordinator(store, tmp_path, [("once", lambda: _Once)])
    thread = threading.Thread(target=coordinator.run)
    thread.start()
    try:
        await_that(lambda: store.fence() is not None, 10.0)
        before = store.fence()
        assert before is not None
        time.sleep(1.2)
        end_server(server)
        server = start_redis(tmp_path / "redis", password=server.password, port=server.port)
        await_that(lambda: (store.fence() or 0) > before, 20.0, "a higher token")
        assert store.coordinator() is not None
    finally:
        coordinator.stop.set()
        thread.join(20.0)
        store.close()
        end_server(server)
    assert not thread.is_alive()


def test_epochs_grow_durably_and_a_damaged_file_is_never_guessed_at(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path) for _ in range(3)] == [1, 2, 3]
    for text in ('{"epoch": "x"}', "{", '{"epoch": -1}', "[]"):
        (tmp_path / "epoch.json").write_text(text)
        with pytest.raises(BadInputError, match=r"epoch\.json"):
            next_epoch(tmp_path)
