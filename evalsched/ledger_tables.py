"""The ledger's tables, and between their rows and what they stand for."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

import sqlalchemy as sa

from evalsched.priors import Observation
from evalsched.types import Request, Response, Trial
from planner.events import TrialState

_text = json.encoder.encode_basestring_ascii

metadata = sa.MetaData()

meta = sa.Table(
    "planaria_meta",
    metadata,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.BigInteger, nullable=False),
)
request_sets = sa.Table(
    "request_sets",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("digest", sa.String(32), nullable=False, unique=True),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("count", sa.Integer, nullable=False),
)
requests = sa.Table(
    "requests",
    metadata,
    sa.Column("set_id", sa.Integer, sa.ForeignKey("request_sets.id"), primary_key=True),
    sa.Column("position", sa.Integer, primary_key=True),
    sa.Column("request_type", sa.String(24), nullable=False),
    sa.Column("doc_id", sa.Integer, nullable=False),
    sa.Column("idx", sa.Integer, nullable=False),
    sa.Column("occurrence", sa.Integer, nullable=False),
    sa.Column("arguments", sa.Text, nullable=False),
    sa.Column("context_tokens", sa.Integer, nullable=False),
    sa.Column("continuation_tokens", sa.Integer, nullable=False),
    sa.Column("digest", sa.String(32), nullable=False),
)
trials = sa.Table(
    "trials",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("key", sa.String(32), nullable=False, unique=True),
    sa.Column("key_parts", sa.Text, nullable=False),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("set_id", sa.Integer, sa.ForeignKey("request_sets.id"), nullable=False),
    sa.Column("model_path", sa.Text, nullable=False),
    sa.Column("job", sa.Text),
    sa.Column("step", sa.BigInteger),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("created", sa.Float(53), nullable=False),
    sa.Column("updated", sa.Float(53), nullable=False),
)
responses = sa.Table(
    "responses",
    metadata,
    sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.id"), primary_key=True),
    sa.Column("request_type", sa.String(24), primary_key=True),
    sa.Column("doc_id", sa.Integer, primary_key=True),
    sa.Column("idx", sa.Integer, primary_key=True),
    sa.Column("occurrence", sa.Integer, primary_key=True),
    sa.Column("value", sa.Text),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("generated_tokens", sa.Integer, nullable=False),
    sa.Column("flags", sa.Text, nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("seconds", sa.Float(53), nullable=False),
    sa.Column("worker", sa.Text, nullable=False),
    sa.Column("written", sa.Float(53), nullable=False),
)
scores = sa.Table(
    "scores",
    metadata,
    sa.Column("trial_id", sa.Integer, sa.ForeignKey("trials.id"), primary_key=True),
    sa.Column("metric", sa.String(255), primary_key=True),
    sa.Column("value", sa.Float(53)),
    sa.Column("stderr", sa.Float(53)),
    sa.Column("low", sa.Float(53)),
    sa.Column("high", sa.Float(53)),
    sa.Column("n", sa.Integer),
    sa.Column("higher_is_better", sa.Boolean),
)
shards = sa.Table(
    "shards",
    metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("quarantined", sa.Boolean, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("payload", sa.Text, nullable=False),
    sa.Column("updated", sa.Float(53), nullable=False),
)
verdicts = sa.Table(
    "verdicts",
    metadata,
    sa.Column("key", sa.String(32), primary_key=True),
    sa.Column("task", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("prompt", sa.Text, nullable=False),
    sa.Column("reply", sa.Text, nullable=False),
    sa.Column("tokens", sa.Integer, nullable=False),
    sa.Column("written", sa.Float(53), nullable=False),
)
observations = sa.Table(
    "observations",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("kind", sa.String(16), nullable=False, index=True),
    sa.Column("setting", sa.Text, nullable=False),
    sa.Column("measured", sa.Float(53), nullable=False),
    sa.Column("predicted", sa.Float(53), nullable=False),
    sa.Column("spread", sa.Float(53), nullable=False),
    sa.Column("default_value", sa.Float(53), nullable=False),
    sa.Column("features", sa.Text, nullable=False),
    sa.Column("written", sa.Float(53), nullable=False),
)


# ---------------------------------------------------------------- rows


def without_nul(value: Any) -> Any:
    return value.replace("\x00", "") if isinstance(value, str) else value  # PostgreSQL's text takes no NUL


def to_observation(row: sa.RowMapping) -> Observation:
    return Observation(
        kind=row["kind"], setting=row["setting"], default=row["default_value"], features=json.loads(row["features"]),
        measured=row["measured"], predicted=row["predicted"], spread=row["spread"],
    )  # fmt: skip


# Millions of rows pass through here; their usual shapes are spelt without setting up an encoder for each.


def _arguments_text(arguments: tuple[Any, ...]) -> str:
    """``json.dumps(list(arguments))``."""
    if all(type(one) is str for one in arguments):
        return f"[{', '.join(map(_text, arguments))}]"
    return json.dumps(arguments)


def _value_text(value: Any) -> str:
    """``json.dumps(value)``."""
    if type(value) is tuple and type(value[0]) is float and isfinite(value[0]):
        return f"[{value[0]!r}, {'true' if value[1] else 'false'}]"
    return json.dumps(value)


def request_row(set_id: int, position: int, r: Request) -> tuple[Any, ...]:
    arguments = _arguments_text(r.arguments)
    return (
        set_id, position, r.request_type, r.doc_id, r.idx, r.occurrence, arguments, r.context_tokens,
        r.continuation_tokens, r.digest,
    )  # fmt: skip


def to_request(task: str, row: sa.RowMapping) -> Request:
    own = {name: row[name] for name in ("request_type", "doc_id", "idx", "occurrence", "context_tokens", "digest")}
    return Request(
        task=task, arguments=tuple(json.loads(row["arguments"])), continuation_tokens=row["continuation_tokens"], **own
    )


def to_trial(row: sa.RowMapping) -> Trial:
    own = {
        name: row[name] for name in ("id", "key", "task", "model_path", "job", "step", "reason", "created", "updated")
    }
    return Trial(state=TrialState(row["state"]), requests=row["count"], responses=row["answered"] or 0, **own)


def response_row(trial_id: int, r: Response, worker: str, now: float) -> tuple[Any, ...]:
    value = None if r.value is None else _value_text(r.value)
    error = r.error.replace("\x00", "") if r.error else r.error  # PostgreSQL's text takes no NUL
    kind, _, doc_id, idx, occurrence = r.id
    return (
        trial_id, kind, doc_id, idx, occurrence, value, r.prompt_tokens, r.generated_tokens, " ".join(r.flags),
        error, r.seconds, worker, now,
    )  # fmt: skip


def to_response(task: str, row: sa.RowMapping) -> Response:
    identity = [row["request_type"], task, row["doc_id"], row["idx"], row["occurrence"]]
    own = {name: row[name] for name in ("prompt_tokens", "generated_tokens", "error", "seconds")}
    value = None if row["value"] is None else json.loads(row["value"])
    return Response.from_json({"id": identity, "value": value, "flags": row["flags"].split(), **own})
