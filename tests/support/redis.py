"""A real Redis for tests, one per session, flushed for each test; and agents that do nothing but answer for slots."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner.auth import new_secret
from planner.leases import RenewStatus
from planner.redis_server import RedisServer, start_redis
from planner.store import ClusterStore, NodeFacts


def await_that(condition: Callable[[], object], seconds: float = 20.0, what: str = "") -> None:
    """Wait until ``condition()`` is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        time.sleep(0.02)


def end_server(server: RedisServer) -> None:
    """SIGKILL a server of ours and reap it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(server.pid, 0)


@pytest.fixture(scope="session")
def redis_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for all tests of a run."""
    server = start_redis(tmp_path_factory.mktemp("redis"))
    yield server
    end_server(server)


@pytest.fixture
def store(redis_of_session: RedisServer) -> Iterator[ClusterStore]:
    """An empty cluster with a secret."""
    store = ClusterStore(redis_of_session.url, new_secret(), patience=20.0)
    store.link.call(lambda client: client.flushall())
    yield store
    store.close()


class SlotAgent:
    """What an agent does for the control plane, as a thread: heartbeats, renewals, confirmations.

    ``holds`` names slots that a process "still holds": they are not confirmed.
    """

    def __init__(self, store: ClusterStore, node: str, slots: int, *, beat: float = 0.1, kind: str = "agent") -> None:
        self.store = store
        self.facts = NodeFacts(
            name=node, address="127.0.0.1", slots=slots, boot=uuid.uuid4().hex, pid=os.getpid(), kind=kind
        )
        self.holds: set[str] = set()
        self.lost: list[str] = []
        self._beat = beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> SlotAgent:
        self.store.register_node(self.facts)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Fall silent, as a node does that dies."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        name = self.facts.name
        while not self._stop.wait(self._beat):
            if not self.store.heartbeat(name):
                self.store.register_node(self.facts)
            mine = self.store.leases(node=name)
            answers = self.store.table.renew([(lease.id, lease.token) for lease in mine])
            self.lost += [
                one.id for one, answer in zip(mine, answers, strict=True) if answer.status is RenewStatus.LOST
            ]
            marks = self.store.quarantine(name)
            self.store.confirm_free(name, {slot: mark for slot, mark in marks.items() if slot not in self.holds})


def drop_to_nobody(folder: Path) -> None:
    """Become an ordinary user in this (sub)process: as root a test of permissions proves nothing."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    os.environ["HOME"] = str(folder)
