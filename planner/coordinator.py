"""The coordinator: takes the lock, then runs the cluster's three loops; a second one stands by.

Everything that must outlive it is in Redis, the ledger and the jobs' folders, so it may be killed at any instant. What
it grants carries its fencing token: one that was overtaken while it slept can change nothing any more.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from planner.cluster import connect, default_state_dir
from planner.epoch import next_epoch
from planner.errors import BadInputError, FencedError, MissingServiceError, PlanariaError, one_line
from planner.events import Action
from planner.leases import LockTakenError, RedisRestartedError
from planner.store import ClusterStore

LOCK_TTL = 5.0
"""Seconds until a stand-by takes over from a coordinator that fell silent."""
TICK_SECONDS = 0.2
"""Seconds between two ticks of a loop."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Seconds that a crashed loop rests: doubling from the first to the longest."""
CRASHES_UNTIL_REBUILT = 3
LOOPS = (
    ("allocator", "planner.service:Allocator"),
    ("supervisor", "pretrain.supervisor:Supervisor"),
    ("node checks", "pretrain.nodechecks:NodeChecks"),
    ("scheduler", "evalsched.scheduler:EvaluationScheduler"),
)


class Loop(Protocol):
    """One of the coordinator's loops; built as ``Loop(store, state_dir)``."""

    def tick(self, now: float) -> None:
        """One round; ``now`` in seconds since the epoch."""


LoopFactory = Callable[[ClusterStore, Path], Loop]


class LoopRunner:
    """Ticks one loop in a thread of its own; a crash is an event and a pause, never the end."""

    def __init__(
        self, name: str, factory: Callable[[], LoopFactory], store: ClusterStore, state_dir: Path, stop: threading.Event
    ) -> None:
        self.name = name
        self.fenced = False
        """The loop learned that another coordinator took over."""
        self._factory = factory
        self._store = store
        self._state_dir = state_dir
        self._stop = stop
        self._loop: Loop | None = None
        self._crashes = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            pause = self.round()
            self._stop.wait(pause)
        self._close()

    def round(self) -> float:
        """Build the loop if need be, tick it once; returns the seconds to wait before the next round."""
        try:
            if self._loop is None:
                self._loop = self._factory()(self._store, self._state_dir)
            self._loop.tick(self._store.clock.time())
        except FencedError:
            self.fenced = True
            return TICK_SECONDS
        except Exception as error:
            return self._crashed(error)
        self._crashes = 0
        # A loop that waits for its own messages inside a tick is ticked again at once.
        return float(getattr(self._loop, "pause_seconds", TICK_SECONDS))

    def _crashed(self, error: Exception) -> float:
        self._crashes += 1
        pause = min(FIRST_PAUSE * 2.0 ** (self._crashes - 1), LONGEST_PAUSE)
        if self._stop.is_set():
            return 0.0
        trace = traceback.format_exc()
        print(f"{self.name} crashed ({self._crashes} in a row):\n{trace}", flush=True)
        try:
            self._store.tell(
                Action.LOOP_CRASHED,
                reason=one_line(f"{type(error).__name__}: {error}")[:500],
                loop=self.name,
                crashes=self._crashes,
                pause_seconds=pause,
                traceback=trace[-4000:],
            )
        except PlanariaError as failure:
            print(f"the crash could not be told: {one_line(failure)}", flush=True)
        if self._crashes % CRASHES_UNTIL_REBUILT == 0:
            self._close()
        return pause

    def _close(self) -> None:
        close = getattr(self._loop, "close", None)
        self._loop = None
        if close is not None:
            try:
                close()
            except Exception:
                print(f"{self.name} did not close:\n{traceback.format_exc()}", flush=True)


class Coordinator:
    """Lock, loops, and standing by.

    Args:
        store: with the cluster secret.
        state_dir: holds the epoch, the ledger and the jobs' folders; shared with stand-bys.
        loops: name and a function that loads the loop's class (late, so that an error in one is that loop's crash).
    """

    def __init__(
        self, store: ClusterStore, state_dir: Path, loops: Sequence[tuple[str, Callable[[], LoopFactory]]]
    ) -> None:
        self.store = store
        self.state_dir = state_dir
        self.owner = f"{socket.gethostname().replace(':', '-')}:{os.getpid()}:{secrets.token_hex(4)}"
        self.stop = threading.Event()
        self._loops = loops
        self._token: int | None = None

    def run(self) -> None:
        """Stand by, be active, stand by again …, until :attr:`stop` is set."""
        self.store.fence = lambda: self._token
        while not self.stop.is_set():
            if self._take():
                self._active()
            else:
                self.stop.wait(LOCK_TTL / 10)

    def _take(self) -> bool:
        """Take the lock if nobody holds it."""
        lock = self.store.coordinator()
        if lock is not None and lock.owner != self.owner and lock.expires > self.store.server_time():
            return False
        try:
            self._token = self.store.table.lock(self.owner, next_epoch(self.state_dir), LOCK_TTL)
        except LockTakenError:
            return False
        return True

    def _active(self) -> None:
        self.store.tell(Action.COORDINATOR_STARTED, reason="took the lock", owner=self.owner, token=self._token)
        print(f"active as {self.owner} with token {self._token}", flush=True)
        ended = threading.Event()
        runners = [LoopRunner(name, factory, self.store, self.state_dir, ended) for name, factory in self._loops]
        for runner in runners:
            runner.thread.start()
        why = self._keep_lock(runners)
        ended.set()
        for runner in runners:
            runner.thread.join(timeout=5.0)
        self._give_up(why)
        if any(runner.thread.is_alive() for runner in runners):
            # A loop that hangs must not go on beside another coordinator's: its token is void, but its thread is not.
            print("a loop does not end; this coordinator leaves", flush=True)
            os._exit(1)

    def _keep_lock(self, runners: Sequence[LoopRunner]) -> str:
        """Prolong the lock until told to stop or overtaken; returns why it ended."""
        while not self.stop.wait(LOCK_TTL / 5):
            try:
                assert self._token is not None
                self.store.table.keep(self.owner, self._token, LOCK_TTL)
            except RedisRestartedError:
                if not self._take():
                    return "overtaken while Redis restarted"
                print(f"Redis restarted: new epoch, token {self._token}", flush=True)
                for runner in runners:
                    runner.fenced = False
            except FencedError:
                return "overtaken"
            except MissingServiceError as error:
                print(f"waiting for Redis: {one_line(error)}", flush=True)
        return "told to stop"

    def _give_up(self, why: str) -> None:
        token, self._token = self._token, None
        print(f"no longer active: {why}", flush=True)
        if token is None:
            return
        try:
            self.store.table.unlock(self.owner, token)
            self.store.tell(Action.COORDINATOR_STOPPED, reason=why, owner=self.owner, token=token)
        except PlanariaError:
            return  # overtaken, or Redis is gone: the lock ends by itself


def coordinator_command(*, state_dir: Path | None, url: str | None, load: Callable[[str], Any]) -> int:
    """``planaria coordinator``: runs until SIGTERM or SIGINT.

    Args:
        load: turns ``module:Class`` into the class; given by the front door, which alone may load other rooms.
    """
    store, address = connect(url, state_dir, daemon=True)
    folder = (state_dir or address.state_dir or default_state_dir()).expanduser().absolute()
    if store.secret is None:
        raise BadInputError(f"--state-dir {folder}: no file 'secret' there; give the state directory of planaria up")
    coordinator = Coordinator(store, folder, [(name, partial(load, target)) for name, target in LOOPS])
    try:
        return _run_until_signalled(coordinator)
    finally:
        store.close()


def _run_until_signalled(coordinator: Coordinator) -> int:
    """Run in a thread while this one waits for a signal: a handler that touches locks itself could deadlock."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            coordinator.run()
        except BaseException as error:
            failure.append(error)

    reader, writer = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: os.write(writer, b"."))
    thread = threading.Thread(target=run, name="coordinator")
    thread.start()
    while thread.is_alive():
        if select.select([reader], [], [], 0.2)[0]:
            coordinator.stop.set()
            coordinator.store.link.give_up()
            thread.join()
    if failure and not (coordinator.stop.is_set() and isinstance(failure[0], MissingServiceError)):
        raise failure[0]
    return 0
