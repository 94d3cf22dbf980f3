"""Shards that are out at workers: remembered before they are sent, taken back when their worker is gone."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable
from typing import Any

from evalsched.messages import RUN_SHARD, WARM, RunShard, Warm, infer_queue
from evalsched.runs import OutShard, Run, WaitingShard
from evalsched.types import Shard
from planner.errors import one_line
from planner.worker_table import WorkerTable

log = logging.getLogger("planaria.evaluation")


class Dispatches:
    """What is out, in memory and in Redis, and the Celery queues that it goes through."""

    def __init__(self, table: WorkerTable, app: Any) -> None:
        self._table, self._app = table, app
        self.out: dict[str, OutShard] = {}

    def restore(self) -> None:
        """What an earlier conductor had sent."""
        for name, record in self._table.dispatches().items():
            if "metric" in record:  # whoever waited for it is gone
                self._table.drop_dispatches([name])
                continue
            self.out[name] = OutShard(
                dispatch=name,
                run=record["run"],
                worker=record["worker"],
                shard=Shard.from_json(record["shard"]),
                sent=record["sent"],
                attempts=record["attempts"],
                check=record.get("check", False),
            )

    def send(self, run: Run, waiting: WaitingShard, worker: str, now: float, *, check: bool = False) -> OutShard | None:
        """Send a shard to a worker. None: the broker is away, and nothing is out."""
        assert run.model is not None
        out = OutShard(
            dispatch=uuid.uuid4().hex,
            run=run.id,
            worker=worker,
            shard=waiting.shard,
            sent=now,
            attempts=waiting.attempts,
            check=check,
        )
        record = {
            "run": run.id, "worker": worker, "shard": waiting.shard.to_json(), "sent": now,
            "attempts": waiting.attempts, "check": check,
        }  # fmt: skip
        message = RunShard(
            dispatch=out.dispatch,
            run=run.id,
            model=run.model.ref,
            engine=run.spec.engine.to_json(),
            singly=check,
        )
        self._table.put_dispatch(out.dispatch, record)
        self.out[out.dispatch] = out
        if not self.post(RUN_SHARD, message.wire(), infer_queue(worker)):
            self.drop([out.dispatch])
            return None
        return out

    def warm(self, run: Run, worker: str) -> None:
        """Let a worker load a run's model."""
        assert run.model is not None
        message = Warm(model=run.model.ref, engine=run.spec.engine.to_json())
        self.post(WARM, message.wire(), infer_queue(worker))

    def post(self, task: str, message: dict[str, Any], queue: str) -> bool:
        """Put a message into a queue; False where the broker is away."""
        try:
            self._app.send_task(task, args=[message], queue=queue, retry=False)
        except Exception as error:  # kombu raises what the transport raised
            log.warning("action=send queue=%s reason=%s", queue, one_line(error))
            return False
        return True

    def drop(self, dispatches: Iterable[str]) -> None:
        """Forget dispatches: what still comes from them is refused."""
        self._table.drop_dispatches([name for name in dispatches if self.out.pop(name, None) is not None])

    def drop_run(self, run: str, *, checks: bool = True) -> None:
        """Forget all dispatches of a run (with ``checks=False`` but those of its check)."""
        self.drop([name for name, one in self.out.items() if one.run == run and (checks or not one.check)])

    def of_run(self, run: str) -> list[OutShard]:
        """Dispatches of a run."""
        return [one for one in self.out.values() if one.run == run]

    def of_worker(self, worker: str) -> list[OutShard]:
        """Dispatches at a worker."""
        return [one for one in self.out.values() if one.worker == worker]

    def copies(self, out: OutShard) -> int:
        """How many times a shard is out, ``out`` itself not counted where it was dropped."""
        return sum(1 for one in self.out.values() if one.run == out.run and one.shard.id == out.shard.id)

    def forget_queue(self, worker: str) -> None:
        """Remove the queue of a worker that never comes back."""
        try:
            with self._app.connection_for_write() as connection:
                connection.default_channel.queue_delete(infer_queue(worker))
        except Exception as error:  # it only takes room
            log.info("action=queue.delete worker=%s reason=%s", worker, error)
