"""What workers said, in the order of their stream; nothing is passed before it was written down and acted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from evalsched.messages import ANSWERS, Answers, Ended, Left
from evalsched.metric_desk import MetricDesk
from evalsched.runs import OutShard, Run
from evalsched.types import Response
from planner.errors import one_line
from planner.events import Action
from planner.store import ClusterStore

READER = "evaluation.responses"
MESSAGES = 50
"""Most messages of a batch: they are read in pieces, which bounds memory."""

Heard = tuple[Answers | Ended | Left, list[Response]]
"""A message of a worker and the responses that it brings."""


@dataclass(frozen=True)
class Batch:
    """Messages to act on; ``last`` is the place of the newest one in the stream."""

    heard: Sequence[Heard]
    last: str


class Inbox:
    """Reads the stream of responses for one conductor.

    Args:
        store: cluster store.
        desk: takes what metric workers say.
        runs: by id; what is said of a run that is not prepared yet waits.
        out: dispatches that are out, by id; what is said of others is refused.
    """

    def __init__(
        self, store: ClusterStore, desk: MetricDesk, runs: Mapping[str, Run], out: Mapping[str, OutShard]
    ) -> None:
        self._store, self._desk, self._runs, self._out = store, desk, runs, out
        self._position = store.position(READER)

    def read(self) -> Batch | None:
        """The next messages, or None if there is nothing that can be acted on; the same again until :meth:`passed`."""
        entries = self._store.read_responses(self._position, count=MESSAGES)
        ready = entries[: self._can_be_taken(entries)]
        if not ready:
            return None
        return Batch([one for entry in ready if (one := self._understood(entry.payload)) is not None], ready[-1].id)

    def passed(self, batch: Batch) -> None:
        """Everything in it was written down and acted on: it is not read again."""
        self._position = batch.last
        self._store.save_position(READER, self._position)
        self._store.trim_responses(self._position)

    def _can_be_taken(self, entries: Sequence[Any]) -> int:
        """How many entries from the front can be acted on: a restored run must be prepared before its answers are.

        What metric workers say is handed on at once: preparing may wait for it.
        """
        blocked = len(entries)
        for number, entry in enumerate(entries):
            payload = entry.payload if isinstance(entry.payload, dict) else {}
            run = self._runs.get(str(payload.get("run")))
            if payload.get("kind") == "ended" and self._desk.waits_for(str(payload.get("dispatch"))):
                self._understood(payload)
            elif number < blocked and run is not None and run.prepared is None and not run.over:
                blocked = number
        return blocked

    def _understood(self, payload: Any) -> Heard | None:
        if payload is None:
            return None
        try:
            message: Answers | Ended | Left = ANSWERS.validate_python(payload)
            if isinstance(message, Ended) and self._desk.note(message):
                return None
            responses = [Response.from_json(one) for one in message.responses] if isinstance(message, Answers) else []
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            self._store.refuse("responses", str(payload)[:2000], one_line(error)[:300])
            return None
        if not isinstance(message, Left) and message.dispatch not in self._out:
            # A late word of a worker that was given up, or a second delivery: its shard is elsewhere by now.
            self._store.tell(
                Action.MESSAGE_REFUSED, source="responses", reason=f"dispatch {message.dispatch} is not out any more",
                worker=message.worker,
            )  # fmt: skip
            return None
        return message, responses
