"""Which workers there are, what they hold, and which of them are silent or stand still."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.worker_table import WorkerRecord, WorkerTable

SILENT_SECONDS = 10.0
"""A worker that serves says something each half second; after a lease's length without a word it is taken for dead.
Its agent (or its owner, in a private fleet) sees a death at once; silence is for whatever they cannot see."""
SILENT_LOADING_SECONDS = 60.0
"""The same while it imports and loads, which can keep the interpreter busy for seconds."""
DEAF_SECONDS = 15.0
"""A worker without work that takes nothing of what was sent to it for this long has lost its way to the broker, however
alive it says it is: a broker's client can hang where its connection broke at a bad moment."""
STUCK_SECONDS = 180.0
"""An engine that makes no step for this long (and ten times the shard's estimate) hangs."""


@dataclass(frozen=True)
class Missing:
    """A worker that is to be taken for dead."""

    worker: str
    reason: str


class Roster:
    """The live workers, as they last described themselves."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table
        self.records: dict[str, WorkerRecord] = {}
        self.served: set[str] = set()
        """Workers that were ready at least once."""
        self.gone: set[str] = set()
        """Workers that were given up: what they still say is not listened to."""
        self.sent_model: dict[str, str] = {}
        """Digest of the model that each worker was last sent."""
        self.sent_group: dict[str, str] = {}
        """Prefix group of the shard that each worker was last sent."""
        self._idle_since: dict[str, float] = {}

    def refresh(self, expected: Iterable[str]) -> list[Missing]:
        """Read what workers say; returns those that are dead. ``expected``: workers that have shards."""
        found = self._table.workers()
        now = self._table.now()
        self.records = {}
        missing: list[Missing] = []
        for name, record in found.items():
            if name in self.gone:
                self._table.forget(name)
                continue
            patient = record.facts.get("state") in ("starting", "loading")
            silent = now - record.seen
            if silent > (SILENT_LOADING_SECONDS if patient else SILENT_SECONDS):
                missing.append(Missing(name, f"not a word for {silent:.1f} s"))
                continue
            self.records[name] = record
            if record.facts.get("state") != "starting":
                self.served.add(name)
        missing += [Missing(name, "it is not there any more") for name in sorted(set(expected) - found.keys())]
        return missing

    def deaf(self, oldest: Mapping[str, float], now: float) -> list[Missing]:
        """Workers that say they have nothing to do and take nothing; ``oldest``: when the first message that is still
        out was sent to each."""
        idle = {name for name, one in self.records.items() if _is_idle(one)}
        self._idle_since = {name: self._idle_since.get(name, now) for name in idle}
        waits = {name: now - max(self._idle_since[name], oldest[name]) for name in idle & oldest.keys()}
        return [
            Missing(name, f"it took nothing of what was sent to it for {seconds:.0f} s")
            for name, seconds in sorted(waits.items())
            if seconds > DEAF_SECONDS
        ]

    def give_up(self, worker: str) -> bool:
        """Take a worker for dead; False where that was done before."""
        if worker in self.gone:
            return False
        self.gone.add(worker)
        self.records.pop(worker, None)
        self.sent_model.pop(worker, None)
        self.sent_group.pop(worker, None)
        self._table.forget(worker)
        return True

    def live(self) -> list[str]:
        """Workers that take shards, by name."""
        states = ("ready", "busy", "loading")
        return [
            name
            for name, one in self.records.items()
            if one.facts.get("kind") == "infer" and one.facts.get("state") in states
        ]

    def metric(self) -> list[str]:
        """Metric workers, by name."""
        return [name for name, one in self.records.items() if one.facts.get("kind") == "metric"]

    def model_of(self, worker: str) -> str | None:
        """Digest of the model that a worker holds or was last sent."""
        record = self.records.get(worker)
        return self.sent_model.get(worker) or (record.facts.get("model") if record else None)


def _is_idle(record: WorkerRecord) -> bool:
    return record.facts.get("state") == "ready" and not record.facts.get("dispatch")


def stands_still(record: WorkerRecord, begun: float, estimate: float, now: float) -> float | None:
    """Seconds that a worker's engine made no step for, where that is too long; ``begun``: of its present shard."""
    still = now - max(float(record.facts.get("progress", 0.0)), begun)
    return still if still > max(STUCK_SECONDS, 10 * estimate) else None
