"""Recording and scoring on metric workers, which keep lm-eval imported; a subprocess where there is none.

:meth:`MetricDesk.call` blocks and is for the conductor's pool; the conductor's thread hands answers in by
:meth:`MetricDesk.note`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from evalsched.messages import METRIC_QUEUE, METRIC_WORK, Ended, Metric
from planner.errors import BadInputError, MissingServiceError, PlanariaError, WorkFailedError
from planner.worker_table import WorkerTable

log = logging.getLogger("planaria.evaluation")

COME_UP_SECONDS = 20.0
"""How long a call waits for a metric worker that is being started."""
LONGEST_SECONDS = 3600.0
POLL_SECONDS = 0.05


class NoMetricWorkerError(MissingServiceError):
    """No metric worker is there (any more)."""


@dataclass
class _Call:
    done: threading.Event = field(default_factory=threading.Event)
    answer: Ended | None = None


class MetricDesk:
    """Sends metric work and waits for its answer.

    Args:
        table: dispatches; a call's is remembered before it is sent.
        send: ``send(task, message, queue)``; False where the broker is away.
        alive: names of the metric workers that live now.
    """

    def __init__(
        self,
        table: WorkerTable,
        send: Callable[[str, dict[str, Any], str], bool],
        alive: Callable[[], list[str]],
    ) -> None:
        self._table, self._send, self._alive = table, send, alive
        self._calls: dict[str, _Call] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.expected = False
        """Whether a metric worker is there or on its way."""

    def close(self) -> None:
        """Let nobody wait any longer: whoever hands answers in is about to stop."""
        self._closed.set()

    def waits_for(self, dispatch: str) -> bool:
        """Whether somebody waits for this answer."""
        with self._lock:
            return dispatch in self._calls

    def note(self, message: Ended) -> bool:
        """Take an answer in; False where nobody waits for it."""
        with self._lock:
            call = self._calls.get(message.dispatch)
        if call is None:
            return False
        call.answer = message
        call.done.set()
        return True

    def call(self, what: Literal["record", "score"], job: Mapping[str, Any], run: str) -> dict[str, Any]:
        """Have ``what`` (``record`` or ``score``) done; its result.

        Raises:
            NoMetricWorkerError: nobody is there to do it, or whoever did it died.
            BadInputError, WorkFailedError: as the work itself raised.
        """
        self._await_worker()
        dispatch = uuid.uuid4().hex
        call = _Call()
        with self._lock:
            self._calls[dispatch] = call
        message = Metric(dispatch=dispatch, run=run, what=what, job=dict(job))
        try:
            self._table.put_dispatch(dispatch, {"run": run, "metric": what})
            if not self._send(METRIC_WORK, message.wire(), METRIC_QUEUE):
                raise NoMetricWorkerError("the broker is away")
            return self._result(self._wait(call))
        finally:
            with self._lock:
                del self._calls[dispatch]
            self._table.drop_dispatches([dispatch])

    def _await_worker(self) -> None:
        until = time.monotonic() + COME_UP_SECONDS
        while not self._alive():
            if not self.expected or time.monotonic() > until or self._closed.is_set():
                raise NoMetricWorkerError("no metric worker is there")
            time.sleep(POLL_SECONDS)

    def _wait(self, call: _Call) -> Ended:
        began, before = time.monotonic(), set(self._alive())
        while not call.done.wait(0.2):
            if self._closed.is_set():
                raise WorkFailedError("given up: the conductor ended")
            if not before & set(self._alive()):
                raise NoMetricWorkerError("the metric workers died")
            if time.monotonic() - began > LONGEST_SECONDS:
                raise WorkFailedError(f"not finished after {LONGEST_SECONDS:.0f} s")
        assert call.answer is not None
        return call.answer

    @staticmethod
    def _result(answer: Ended) -> dict[str, Any]:
        if answer.outcome == "done" and answer.result is not None:
            return answer.result
        kind: type[PlanariaError] = BadInputError if answer.bad_input else WorkFailedError
        raise kind(answer.reason or answer.outcome)
