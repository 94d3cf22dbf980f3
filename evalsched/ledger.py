"""The ledger: the durable record of trials, requests, responses and scores, in SQL.

SQLite (WAL) by default, PostgreSQL by URL, through SQLAlchemy Core; one conformance suite runs over both.
One writer, the active coordinator: every write carries its fencing token and happens in the same
transaction as the check of it, so that a writer that lost its right cannot write after its successor.

Requests are kept once per *request set* (a task's recorded requests), whatever the number of checkpoints
that answer them; responses per trial, upserted on the full key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from evalsched.judge import Verdict
from evalsched.ledger_tables import (
    meta,
    metadata,
    observations,
    request_row,
    request_sets,
    requests,
    response_row,
    responses,
    scores,
    shards,
    to_observation,
    to_request,
    to_response,
    to_trial,
    trials,
    verdicts,
    without_nul,
)
from evalsched.priors import Observation
from evalsched.types import Request, RequestId, Response, Trial, canonical_json
from planner.clock import Clock, SystemClock
from planner.errors import BadInputError, FencedError, MissingServiceError, one_line
from planner.events import TrialState

SCHEMA_VERSION = 1
_BATCH = 20_000
_IDENTITY = ("request_type", "doc_id", "idx", "occurrence")


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file."""
    return f"sqlite:///{path}"


class Ledger:
    """The record in one database. Opening one creates the schema where it is missing.

    ``token`` is the writer's fencing token; None opens it for reading only.

    Raises:
        MissingServiceError: the database cannot be reached or refuses us. Nothing was written.
        BadInputError: it holds another version's schema.
    """

    def __init__(self, url: str, token: int | None = None, clock: Clock | None = None) -> None:
        self._token = token
        self._clock = clock or SystemClock()
        try:
            parsed = _with_driver(url)
            wait = {"timeout": 30} if parsed.drivername == "sqlite" else {"connect_timeout": 5}
            self._engine = sa.create_engine(parsed, pool_pre_ping=True, connect_args=wait)
        except (SQLAlchemyError, ImportError) as error:
            raise BadInputError(f"ledger {_hidden(url)}: no usable database URL ({one_line(error)[:200]})") from error
        self._name = _hidden(url)
        self._dialect = self._engine.dialect.name
        driver = self._engine.dialect.loaded_dbapi
        self._driver_errors = (driver.OperationalError, driver.InterfaceError)
        """What raw cursors raise where SQLAlchemy would have wrapped it."""
        if self._dialect == "sqlite":
            sa.event.listen(self._engine, "connect", _prepare_sqlite)
            sa.event.listen(self._engine, "begin", _begin_sqlite)
        self._create_schema()

    @property
    def token(self) -> int | None:
        """The writer's fencing token."""
        return self._token

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ transactions

    def _create_schema(self) -> None:
        with self._transaction(write=True, fenced=False) as connection:
            if self._dialect == "postgresql":
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(7042001)"))
            metadata.create_all(connection)
            self._insert_ignore(connection, meta, [{"name": "schema", "value": SCHEMA_VERSION}], ["name"])
            self._insert_ignore(connection, meta, [{"name": "token", "value": 0}], ["name"])
            self._insert_ignore(connection, meta, [{"name": "epoch", "value": 0}], ["name"])
            found = connection.scalar(sa.select(meta.c.value).where(meta.c.name == "schema"))
        if found != SCHEMA_VERSION:
            raise BadInputError(f"ledger {self._name}: schema {found}, this version reads {SCHEMA_VERSION}")

    @contextmanager
    def _transaction(self, *, write: bool = False, fenced: bool = True) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect().execution_options(planaria_write=write) as connection, connection.begin():
                if write and fenced:
                    self._check_token(connection)
                yield connection
        except (OperationalError, sa.exc.InterfaceError, sa.exc.TimeoutError, *self._driver_errors) as error:
            raise MissingServiceError(f"ledger {self._name}: cannot be used now ({_cause(error)})") from error
        except DBAPIError as error:
            if error.connection_invalidated:
                raise MissingServiceError(f"ledger {self._name}: connection lost ({_cause(error)})") from error
            raise

    def _check_token(self, connection: sa.Connection) -> None:
        """Fencing: the row's lock serialises writers; an older token than the newest is refused."""
        if self._token is None:
            raise FencedError(f"ledger {self._name}: opened for reading, it takes no writes")
        row = sa.select(meta.c.value).where(meta.c.name == "token").with_for_update()
        newest = int(connection.scalar(row) or 0)
        if newest > self._token:
            raise FencedError(
                f"ledger {self._name}: token {self._token} is older than {newest}; another writer took over"
            )
        if newest < self._token:
            connection.execute(sa.update(meta).where(meta.c.name == "token").values(value=self._token))

    def _upsert(
        self,
        connection: sa.Connection,
        table: sa.Table,
        rows: Sequence[Mapping[str, Any]],
        key: Sequence[str],
        where: sa.ColumnElement[bool] | None = None,
    ) -> None:
        """Insert rows, replacing those with the same key (only such as satisfy ``where``)."""
        if not rows:
            return
        statement = self._insert(table)
        changed = {column.name: statement.excluded[column.name] for column in table.columns if column.name not in key}
        statement = statement.on_conflict_do_update(index_elements=list(key), set_=changed, where=where)
        for start in range(0, len(rows), _BATCH):
            connection.execute(statement, list(rows[start : start + _BATCH]))

    def _insert_ignore(
        self, connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]], key: Sequence[str]
    ) -> None:
        connection.execute(self._insert(table).on_conflict_do_nothing(index_elements=list(key)), list(rows))

    def _insert(self, table: sa.Table) -> Any:
        if self._dialect == "postgresql":
            from sqlalchemy.dialects.postgresql import insert as postgres_insert

            return postgres_insert(table)
        from sqlalchemy.dialects.sqlite import insert as sqlite_insert

        return sqlite_insert(table)

    # ------------------------------------------------------------ epochs and tokens

    def next_epoch(self) -> int:
        """Count up and return the epoch that a new coordinator's tokens carry; needs no token itself."""
        with self._transaction(write=True, fenced=False) as connection:
            row = sa.select(meta.c.value).where(meta.c.name == "epoch").with_for_update()
            epoch = int(connection.scalar(row) or 0) + 1
            connection.execute(sa.update(meta).where(meta.c.name == "epoch").values(value=epoch))
        return epoch

    def newest_token(self) -> int:
        """The newest fencing token that wrote."""
        with self._transaction() as connection:
            return int(connection.scalar(sa.select(meta.c.value).where(meta.c.name == "token")) or 0)

    # ------------------------------------------------------------ request sets

    def put_requests(self, digest: str, task: str, found: Iterable[Request]) -> int:
        """Keep a task's recorded requests under their digest; returns the set's number. Done once per digest."""
        with self._transaction(write=True) as connection:
            known = connection.scalar(sa.select(request_sets.c.id).where(request_sets.c.digest == digest))
            if known is not None:
                return int(known)
            rows = list(found)
            values = {"digest": digest, "task": task, "count": len(rows)}
            made = connection.execute(sa.insert(request_sets).values(**values).returning(request_sets.c.id))
            set_id = int(made.scalar_one())
            self._bulk_insert(connection, requests, (request_row(set_id, n, r) for n, r in enumerate(rows)))
        return set_id

    def _bulk_insert(self, connection: sa.Connection, table: sa.Table, rows: Iterator[tuple[Any, ...]]) -> None:
        """Many new rows, the fastest way that the database has: COPY, or one prepared statement."""
        columns = [column.name for column in table.columns]
        cursor = connection.connection.cursor()
        try:
            if self._dialect == "postgresql":
                names = ", ".join(columns)
                with cursor.copy(f"COPY {table.name} ({names}) FROM STDIN") as copy:
                    for row in rows:
                        copy.write_row(row)
            else:
                marks = ", ".join("?" * len(columns))
                statement = f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608 - own names
                cursor.executemany(statement, rows)  # type: ignore[arg-type]
        finally:
            cursor.close()

    def requests_of(self, set_id: int) -> list[Request]:
        """A set's requests, in recorded order."""
        with self._transaction() as connection:
            task = connection.scalar(sa.select(request_sets.c.task).where(request_sets.c.id == set_id))
            query = sa.select(requests).where(requests.c.set_id == set_id).order_by(requests.c.position)
            return [to_request(str(task), row) for row in connection.execute(query).mappings()]

    # ------------------------------------------------------------ trials

    def put_trial(
        self,
        *,
        key: str,
        key_parts: Mapping[str, Any],
        task: str,
        set_id: int,
        model_path: str,
        job: str | None = None,
        step: int | None = None,
    ) -> Trial:
        """The trial with this key, made if there is none. An old one keeps its state and answers."""
        now = self._clock.time()
        row = {
            "key": key, "key_parts": canonical_json(key_parts), "task": task, "set_id": set_id,
            "model_path": model_path, "job": job, "step": step,
            "state": TrialState.QUEUED.value, "reason": "", "created": now, "updated": now,
        }  # fmt: skip
        with self._transaction(write=True) as connection:
            self._insert_ignore(connection, trials, [row], ["key"])
            return self._trials(connection, trials.c.key == key)[0]

    def set_trial_state(self, trial_id: int, state: TrialState, reason: str = "") -> None:
        """Move a trial to ``state``."""
        values = {"state": state.value, "reason": reason, "updated": self._clock.time()}
        with self._transaction(write=True) as connection:
            connection.execute(sa.update(trials).where(trials.c.id == trial_id).values(**values))

    def trial(self, trial_id: int) -> Trial | None:
        """One trial by number."""
        with self._transaction() as connection:
            found = self._trials(connection, trials.c.id == trial_id)
        return found[0] if found else None

    def trials(self, *, job: str | None = None, state: TrialState | None = None) -> list[Trial]:
        """Trials, oldest first, of one job and in one state if so asked."""
        conditions: list[Any] = [trials.c.job == job] if job is not None else []
        if state is not None:
            conditions.append(trials.c.state == state.value)
        with self._transaction() as connection:
            return self._trials(connection, *conditions)

    def _trials(self, connection: sa.Connection, *conditions: Any) -> list[Trial]:
        own = sa.select(sa.func.count()).where(responses.c.trial_id == trials.c.id).correlate(trials)
        query = (
            sa.select(trials, request_sets.c.count.label("count"), own.scalar_subquery().label("answered"))
            .join(request_sets, request_sets.c.id == trials.c.set_id)
            .where(*conditions)
            .order_by(trials.c.id)
        )
        return [to_trial(row) for row in connection.execute(query).mappings()]

    def requests_of_trial(self, trial_id: int) -> list[Request]:
        """All requests of a trial."""
        with self._transaction() as connection:
            set_id = connection.scalar(sa.select(trials.c.set_id).where(trials.c.id == trial_id))
        return [] if set_id is None else self.requests_of(int(set_id))

    def open_requests(self, trial_id: int) -> list[Request]:
        """Requests of a trial that have no response yet, in recorded order."""
        answered = set(self.answered(trial_id))
        return [request for request in self.requests_of_trial(trial_id) if request.id not in answered]

    # ------------------------------------------------------------ responses

    def put_responses(self, found: Mapping[int, Sequence[Response]], worker: str = "") -> None:
        """Keep the responses of a shard, by trial, in one transaction.

        The first answer to a request stands, so that a shard that is delivered twice changes nothing; an
        error gives way to an answer.
        """
        now = self._clock.time()
        rows = (
            response_row(trial_id, response, worker, now) for trial_id, group in found.items() for response in group
        )
        with self._transaction(write=True) as connection:
            self._bulk_upsert_responses(connection, rows)

    def _bulk_upsert_responses(self, connection: sa.Connection, rows: Iterator[tuple[Any, ...]]) -> None:
        """One prepared statement, row after row: SQLAlchemy's own parameters cost several times the insertion."""
        columns = [column.name for column in responses.columns]
        key = ("trial_id", *_IDENTITY)
        marks = ", ".join(["%s" if self._dialect == "postgresql" else "?"] * len(columns))
        changed = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
        statement = (
            f"INSERT INTO responses ({', '.join(columns)}) VALUES ({marks}) "  # noqa: S608 - own names
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changed} WHERE responses.value IS NULL"
        )
        cursor = connection.connection.cursor()
        try:
            cursor.executemany(statement, rows)  # type: ignore[arg-type]
        finally:
            cursor.close()

    def answered(self, trial_id: int) -> list[RequestId]:
        """Identities that have a response."""
        columns = [responses.c[name] for name in _IDENTITY]
        with self._transaction() as connection:
            task = str(connection.scalar(sa.select(trials.c.task).where(trials.c.id == trial_id)))
            query = sa.select(*columns).where(responses.c.trial_id == trial_id)
            return [RequestId(kind, task, doc, idx, occ) for kind, doc, idx, occ in connection.execute(query)]

    def responses_of(self, trial_id: int) -> list[Response]:
        """A trial's responses, by document, index and occurrence."""
        order = [responses.c[name] for name in _IDENTITY]
        with self._transaction() as connection:
            task = str(connection.scalar(sa.select(trials.c.task).where(trials.c.id == trial_id)))
            query = sa.select(responses).where(responses.c.trial_id == trial_id).order_by(*order)
            return [to_response(task, row) for row in connection.execute(query).mappings()]

    def forget_responses(self, trial_id: int, identities: Iterable[RequestId] | None = None) -> None:
        """Drop a trial's responses (``planaria retry``): all, or those named."""
        with self._transaction(write=True) as connection:
            if identities is None:
                connection.execute(sa.delete(responses).where(responses.c.trial_id == trial_id))
                return
            for one in identities:
                same = [responses.c[name] == getattr(one, name) for name in _IDENTITY]
                connection.execute(sa.delete(responses).where(responses.c.trial_id == trial_id, *same))

    # ------------------------------------------------------------ scores

    def put_scores(self, trial_id: int, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep a trial's scores: metric (``acc,none``) to value, stderr, low, high, n, higher_is_better."""
        names = ("value", "stderr", "low", "high", "n", "higher_is_better")
        rows = [
            {"trial_id": trial_id, "metric": metric, **{name: entry.get(name) for name in names}}
            for metric, entry in sorted(found.items())
        ]
        with self._transaction(write=True) as connection:
            connection.execute(sa.delete(scores).where(scores.c.trial_id == trial_id))
            self._upsert(connection, scores, rows, ["trial_id", "metric"])

    def scores_of(self, trial_id: int) -> dict[str, dict[str, Any]]:
        """A trial's scores by metric."""
        with self._transaction() as connection:
            query = sa.select(scores).where(scores.c.trial_id == trial_id).order_by(scores.c.metric)
            rows = [dict(row) for row in connection.execute(query).mappings()]
        return {row.pop("metric"): {k: v for k, v in row.items() if k != "trial_id"} for row in rows}

    # ------------------------------------------------------------ shards that failed

    def count_attempt(self, shard_id: str, reason: str, payload: Mapping[str, Any] | None = None) -> int:
        """Count a failed attempt at a shard, by our own id; returns the attempts so far."""
        with self._transaction(write=True) as connection:
            old = connection.execute(sa.select(shards).where(shards.c.id == shard_id)).mappings().first()
            attempts = (int(old["attempts"]) if old else 0) + 1
            row = {
                "id": shard_id, "attempts": attempts, "quarantined": bool(old and old["quarantined"]), "reason": reason,
                "payload": canonical_json(payload or {}), "updated": self._clock.time(),
            }  # fmt: skip
            self._upsert(connection, shards, [row], ["id"])
        return attempts

    def quarantine(self, shard_id: str) -> None:
        """Keep a shard aside: it is not handed out again."""
        with self._transaction(write=True) as connection:
            values = {"quarantined": True, "updated": self._clock.time()}
            connection.execute(sa.update(shards).where(shards.c.id == shard_id).values(**values))

    def forgive(self, shard_ids: Iterable[str]) -> None:
        """Forget the failed attempts of shards (``planaria retry``)."""
        with self._transaction(write=True) as connection:
            for shard_id in shard_ids:
                connection.execute(sa.delete(shards).where(shards.c.id == shard_id))

    def failed_shards(self, *, quarantined: bool | None = None) -> list[dict[str, Any]]:
        """Shards with failed attempts: ``{"id", "attempts", "quarantined", "reason", "payload", "updated"}``."""
        query = sa.select(shards).order_by(shards.c.id)
        if quarantined is not None:
            query = query.where(shards.c.quarantined == quarantined)
        with self._transaction() as connection:
            rows = [dict(row) for row in connection.execute(query).mappings()]
        return [row | {"payload": json.loads(row["payload"])} for row in rows]

    # ------------------------------------------------------------ what judges said

    def put_verdicts(self, found: Iterable[Verdict]) -> None:
        """Keep a judge's verdicts; the first one to a prompt stands."""
        now = self._clock.time()
        rows = [{name: without_nul(value) for name, value in one.to_json().items()} | {"written": now} for one in found]
        if rows:
            with self._transaction(write=True) as connection:
                self._insert_ignore(connection, verdicts, rows, ["key"])

    def verdicts(self, tasks: Iterable[str], count: int = 50_000) -> list[Verdict]:
        """The newest ``count`` verdicts on these tasks."""
        query = sa.select(verdicts).where(verdicts.c.task.in_(sorted(tasks)))
        with self._transaction() as connection:
            rows = connection.execute(query.order_by(verdicts.c.written.desc()).limit(count)).mappings().all()
        return [Verdict.from_json(dict(row)) for row in rows]

    # ------------------------------------------------------------ what things cost

    def put_observations(self, found: Iterable[Observation]) -> None:
        """Keep measurements of costs, with what was predicted before them (:mod:`evalsched.priors`)."""
        now = self._clock.time()
        rows = [
            {
                "kind": one.kind, "setting": one.setting, "measured": one.measured, "predicted": one.predicted,
                "spread": one.spread, "default_value": one.default, "features": canonical_json(dict(one.features)),
                "written": now,
            }
            for one in found
        ]  # fmt: skip
        if rows:
            with self._transaction(write=True) as connection:
                connection.execute(sa.insert(observations), rows)

    def observations(self, kind: str, count: int) -> list[Observation]:
        """The newest ``count`` measurements of a kind, oldest first."""
        query = sa.select(observations).where(observations.c.kind == kind)
        with self._transaction() as connection:
            rows = connection.execute(query.order_by(observations.c.id.desc()).limit(count)).mappings().all()
        return [to_observation(row) for row in reversed(rows)]


# ---------------------------------------------------------------- dialects


def _with_driver(url: str) -> sa.URL:
    parsed = sa.make_url(url)
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise BadInputError(f"ledger {_hidden(url)}: SQLite (sqlite:///PATH) or PostgreSQL (postgresql://…) is needed")
    return parsed


def _hidden(url: str) -> str:
    try:
        return sa.make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return "(unreadable URL)"


def _cause(error: Exception) -> str:
    return one_line(getattr(error, "orig", None) or error)[:200]


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # transactions are begun below, by their kind
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout = 30000")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    write = connection.get_execution_options().get("planaria_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
