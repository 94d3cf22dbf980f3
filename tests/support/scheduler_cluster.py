"""The coordinator's allocator and scheduler in this process, with an agent that starts worker processes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evalsched.scheduler import EvaluationScheduler
from planner.events import Action
from planner.service import Allocator
from planner.store import ClusterStore, Demand
from tests.support.worker_agent import STUB, WorkerAgent


class Coordinator:
    """Allocator and scheduler, ticked by a thread, with a fence; ``restart`` drops the scheduler without a farewell."""

    def __init__(self, store: ClusterStore, state_dir: Path) -> None:
        self.store, self.state_dir = store, state_dir
        self._epoch = 1
        token = store.table.lock("test", self._epoch)
        store.fence = lambda: token
        self.allocator = Allocator(store, state_dir)
        self.scheduler = EvaluationScheduler(store, state_dir)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.05):
                with self._lock:
                    self.allocator.tick(time.time())
                    self.scheduler.tick(time.time())
        except BaseException as error:
            self._failure = error

    def restart(self) -> None:
        with self._lock:
            self.scheduler.close()
            self.scheduler = EvaluationScheduler(self.store, self.state_dir)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.scheduler.close()
        if self._failure is not None:
            raise self._failure

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list((self.store.document("evaluation") or {}).get("runs", []))

    def finished(self, count: int = 1) -> Callable[[], bool]:
        return lambda: sum(1 for row in self.rows if row["state"] in ("done", "failed")) >= count or self._failure

    def events(self, action: Action) -> list[Any]:
        return [
            one.payload
            for one in self.store.read_events("0-0", count=5000)
            if one.payload and one.payload.action is action
        ]


@contextlib.contextmanager
def cluster(
    store: ClusterStore, folder: Path, slots: int = 2, program: Sequence[str] = STUB, **environment: str
) -> Iterator[tuple[Coordinator, WorkerAgent]]:
    secret = folder / "secret"
    secret.write_text(str(store.secret))
    coordinator = Coordinator(store, folder)
    try:
        with WorkerAgent(store, "n1", slots, secret, environment, program) as agent:
            yield coordinator, agent
    finally:
        coordinator.close()


def training(slots: int) -> Demand:
    return Demand(
        holder="job:j", kind="pretrain", weight=1.0, min_slots=slots, max_slots=slots, feasible=(slots,),
        throughput={slots: 1e12}, transition_seconds=1.0,
    )  # fmt: skip
