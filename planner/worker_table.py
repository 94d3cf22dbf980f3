"""What workers say of themselves and which shards are out, in Redis: the evaluation's half of the store.

Keys, all below ``planaria:``: ``workers`` (hash worker → JSON), ``dispatches`` (hash dispatch → JSON), ``runs``
(hash evaluation run → JSON) and ``claim:<dispatch>``. A *dispatch* is one sending of one shard to one worker;
its id is never reused, so a message that the broker delivers twice is claimed once. The shard stands in the
dispatch's record alone: the message only names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planner.leases import RenewStatus

_WORKERS = "planaria:workers"
_DISPATCHES = "planaria:dispatches"
_RUNS = "planaria:runs"
CLAIM_SECONDS = 7 * 24 * 3600
"""How long a claim is remembered: longer than any broker redelivers."""


@dataclass(frozen=True)
class WorkerRecord:
    """The last word of a worker. ``seen`` is the server's time of it."""

    worker: str
    seen: float
    facts: Mapping[str, Any]
    """State, resident model, lease, slots, process id, memory: see ``evalsched.worker``."""


class WorkerTable:
    """Workers and dispatches of a cluster.

    Args:
        call: runs ``function(client)`` with retries (``planner.redis_link.RedisLink.call``).
    """

    def __init__(self, call: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._call = call

    def now(self) -> float:
        """The server's clock, seconds since the epoch."""
        seconds, micros = self._call(lambda client: client.time())
        return float(seconds) + float(micros) / 1e6

    # ------------------------------------------------------------------ workers

    def beat(self, worker: str, facts: Mapping[str, Any]) -> None:
        """A worker lives and says how it stands; to be called about twice a second."""
        text = json.dumps({"seen": self.now(), "facts": dict(facts)})
        self._call(lambda client: client.hset(_WORKERS, worker, text))

    def workers(self) -> dict[str, WorkerRecord]:
        """All workers that said something and were not forgotten."""
        found = self._call(lambda client: client.hgetall(_WORKERS))
        records = {worker: json.loads(text) for worker, text in sorted(found.items())}
        return {worker: WorkerRecord(worker, float(one["seen"]), one["facts"]) for worker, one in records.items()}

    def forget(self, worker: str) -> None:
        """Drop a worker that is gone."""
        self._call(lambda client: client.hdel(_WORKERS, worker))

    def lease_state(self, lease: str, token: int) -> RenewStatus:
        """How a lease stands, without renewing it."""
        held, revoked = self._call(lambda client: client.hmget(f"planaria:lease:{lease}", "token", "revoked"))
        if held != str(token):
            return RenewStatus.LOST
        return RenewStatus.REVOKED if float(revoked or 0) > 0 else RenewStatus.RENEWED

    # ------------------------------------------------------------------ dispatches

    def put_dispatch(self, dispatch: str, record: Mapping[str, Any]) -> None:
        """Remember a dispatch, before its message is sent."""
        text = json.dumps(dict(record), check_circular=False)
        self._call(lambda client: client.hset(_DISPATCHES, dispatch, text))

    def dispatches(self) -> dict[str, dict[str, Any]]:
        """All dispatches that are out."""
        found = self._call(lambda client: client.hgetall(_DISPATCHES))
        return {dispatch: dict(json.loads(text)) for dispatch, text in found.items()}

    def drop_dispatches(self, dispatches: Iterable[str]) -> None:
        """Forget dispatches: what still comes from them is refused."""
        names = list(dispatches)
        if names:
            self._call(lambda client: client.hdel(_DISPATCHES, *names))

    def claim(self, dispatch: str, worker: str, delivery: str) -> dict[str, Any] | None:
        """A worker begins a dispatch: its record. None: it is not out any more, or another delivery began before."""
        key = f"planaria:claim:{dispatch}"
        mine = f"{worker}/{delivery}"

        def take(client: Any) -> Any:
            pipe = client.pipeline()
            pipe.hget(_DISPATCHES, dispatch)
            pipe.set(key, mine, nx=True, ex=CLAIM_SECONDS)
            pipe.get(key)
            return pipe.execute()

        record, _, holder = self._call(take)
        return dict(json.loads(record)) if record is not None and holder == mine else None

    def claimed(self, dispatch: str) -> bool:
        """Whether a worker began this dispatch."""
        return bool(self._call(lambda client: client.exists(f"planaria:claim:{dispatch}")))

    # ------------------------------------------------------------------ runs

    def put_run(self, run: str, record: Mapping[str, Any]) -> None:
        """Remember an evaluation run that is not at its end."""
        text = json.dumps(dict(record))
        self._call(lambda client: client.hset(_RUNS, run, text))

    def runs(self) -> dict[str, dict[str, Any]]:
        """All runs that were remembered and not dropped."""
        found = self._call(lambda client: client.hgetall(_RUNS))
        return {run: dict(json.loads(text)) for run, text in sorted(found.items())}

    def drop_run(self, run: str) -> None:
        """Forget a run."""
        self._call(lambda client: client.hdel(_RUNS, run))
