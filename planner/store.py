"""The cluster's shared state in Redis. Only this module and the lease script know keys; see docs/architecture.md.

Streams carry one field ``d``. Commands, reports and responses are sealed with the cluster secret; what is forged, of an
unknown kind or misshapen is dropped, kept aside in ``planaria:refused`` and told as an event, and the reader goes on.
A reader keeps its own position: ``entries[-1].id`` of the last answer, saved under a name if it must outlive it.

Everything here retries while Redis is away (:mod:`planner.redis_link`) and appends exactly once.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from planner.auth import ForgedMessageError, seal, unseal
from planner.clock import Clock, SystemClock
from planner.demand import Demand
from planner.errors import MissingServiceError, one_line
from planner.events import Action, Event
from planner.leases import Lease, Leases, Registration
from planner.messages import COMMANDS, REPORTS
from planner.redis_link import APPEND, DAEMON_PATIENCE, MAX_BLOCK, RedisLink

PREFIX = "planaria:"
STREAM_START = "0-0"
"""Position before the first entry of a stream."""
MAX_EVENTS = 20_000
MAX_MESSAGES = 50_000
MAX_REFUSED = 1_000
COMMAND_MAX_AGE = 600.0
"""Seconds after which a command is no longer carried out (a replayed or forgotten one)."""

PayloadT = TypeVar("PayloadT")


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """Static facts of a node, told by its agent when it comes up."""

    name: str
    address: str
    """Address that other nodes reach it at."""
    slots: int
    """Slots 0 to slots - 1."""
    boot: str
    """Id of this life of the agent; never reused."""
    threads_per_slot: int = 1
    memory_bytes: int = 0
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    pid: int = 0
    kind: str = "agent"
    """``agent``, or ``worker`` for an infer worker started by hand that brings its own slots."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """For placement: ``switch``, ``rail`` …"""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NodeFacts:
        """The inverse of :meth:`to_json`."""
        return cls(**data)


@dataclass(frozen=True)
class Entry(Generic[PayloadT]):
    """One entry of a stream. ``id`` is the position after it."""

    id: str
    payload: PayloadT


@dataclass(frozen=True)
class ReportEnvelope:
    """What an agent said. ``report`` is one of :data:`planner.messages.AgentReport`."""

    node: str
    time: float
    report: Any


@dataclass(frozen=True)
class Request:
    """What a person asked for: ``kind`` (submit, cancel, pause, resume, evaluate, retry …) and its payload."""

    kind: str
    time: float
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class CoordinatorLock:
    """Who coordinates: ``owner`` is ``<host>:<pid>:<random>``; ``expires`` is server time."""

    owner: str
    token: int
    expires: float

    @property
    def pid(self) -> int:
        """Process id of the owner on its host."""
        return int(self.owner.split(":")[-2])


class ClusterStore:
    """All that processes of a cluster share.

    Args:
        url: Redis URL, password included.
        secret: cluster secret (:mod:`planner.auth`); None for those who neither command nor report.
        patience: seconds a call keeps trying while Redis is away, before MissingServiceError.
        clock: wall clock of event times.

    Thread-safe. Times that leases and heartbeats carry are the server's (:meth:`server_time`).
    """

    def __init__(
        self, url: str, secret: str | None = None, *, patience: float = DAEMON_PATIENCE, clock: Clock | None = None
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.link = RedisLink(url, patience=patience)
        self.secret = secret
        self.table = Leases(self.link.call)
        """The lease table; see :mod:`planner.leases` for who calls what."""
        self.fence: Callable[[], int | None] = lambda: None
        """The coordinator's present fencing token; set by the coordinator, None elsewhere."""
        self._seen_commands: dict[str, None] = {}

    # ------------------------------------------------------------------ connection

    @property
    def url(self) -> str:
        """The Redis URL with its password (Celery's broker); never print it."""
        return self.link.url

    def ping(self) -> None:
        """Raises MissingServiceError when Redis is away or refuses us."""
        self.link.call(lambda client: client.ping())

    def server_time(self) -> float:
        """The Redis server's clock, seconds since the epoch."""
        seconds, micros = self.link.call(lambda client: client.time())
        return float(seconds) + float(micros) / 1e6

    def close(self) -> None:
        """Close the connections."""
        self.link.close()

    def _sealing_key(self) -> str:
        if self.secret is None:
            raise MissingServiceError("the cluster secret is missing: give --secret-file or --state-dir")
        return self.secret

    def coordinator(self) -> CoordinatorLock | None:
        """The lock's present owner; None when nobody has it (it may have expired: compare with the server's time)."""
        found = self.link.call(lambda client: client.hgetall(PREFIX + "coordinator"))
        if not found.get("owner"):
            return None
        return CoordinatorLock(str(found["owner"]), int(found["token"]), float(found["expires"]))

    # ------------------------------------------------------------------ streams

    def _append(self, stream: str, data: str, max_length: int) -> str:
        once = f"{PREFIX}once:{uuid.uuid4().hex}"
        keys = (PREFIX + stream, once)
        return str(self.link.call(lambda client: client.eval(APPEND, 2, *keys, data, max_length)))

    def _read(self, stream: str, after: str, block: float, count: int) -> list[tuple[str, str]]:
        deadline = time.monotonic() + block
        key = PREFIX + stream
        while True:
            wait = min(MAX_BLOCK, deadline - time.monotonic())
            # BLOCK 0 would wait for ever, so a read that must not wait leaves it out.
            milliseconds = int(wait * 1000) if wait > 0.001 else None
            answer = self.link.call(partial(_xread, key=key, after=after, count=count, block=milliseconds))
            if answer:
                rows = answer[key][0] if isinstance(answer, dict) else answer[0][1]
                return [(entry, fields.get("d", "")) for entry, fields in rows]
            if time.monotonic() >= deadline:
                return []

    def end_of(self, stream: str) -> str:
        """Position of the last entry of ``events``, ``reports``, ``requests``, ``responses`` or ``commands:<node>``."""
        last = self.link.call(lambda client: client.xrevrange(PREFIX + stream, count=1))
        return str(last[0][0]) if last else STREAM_START

    def position(self, reader: str) -> str:
        """The saved position of a reader; the stream's start when it never saved one."""
        return str(self.link.call(lambda client: client.hget(PREFIX + "positions", reader)) or STREAM_START)

    def save_position(self, reader: str, position: str) -> None:
        """Remember how far a reader came; save it after the effects of the entries are durable."""
        self.link.call(lambda client: client.hset(PREFIX + "positions", reader, position))

    def refuse(self, source: str, raw: str, reason: str) -> None:
        """Keep a message that nobody can act on aside, and say so as an event."""
        self._append("refused", json.dumps({"source": source, "reason": reason, "raw": raw[:4000]}), MAX_REFUSED)
        self.tell(Action.MESSAGE_REFUSED, reason=reason, source=source)

    def _sift(
        self, source: str, rows: Iterable[tuple[str, str]], parse: Callable[[str], PayloadT]
    ) -> list[Entry[PayloadT | None]]:
        """Parsed rows; a refused one keeps its place with payload None, so that positions still advance."""
        entries: list[Entry[PayloadT | None]] = []
        for entry, raw in rows:
            try:
                entries.append(Entry(entry, parse(raw)))
            except (ForgedMessageError, ValidationError, ValueError, KeyError, TypeError) as error:
                self.refuse(source, raw, _why(error))
                entries.append(Entry(entry, None))
        return entries

    # ------------------------------------------------------------------ commands, reports, responses

    def send_command(self, node: str, command: BaseModel) -> str:
        """Seal a command for a node's agent."""
        envelope = {"node": node, "time": self.clock.time(), "id": uuid.uuid4().hex}
        body = envelope | {"command": command.model_dump(mode="json", by_alias=True)}
        return self._append(f"commands:{node}", seal(self._sealing_key(), body), MAX_MESSAGES)

    def read_commands(self, node: str, after: str, *, block: float = 0.0, count: int = 100) -> list[Entry[Any]]:
        """Commands for ``node`` after a position, waiting up to ``block`` seconds for the first.

        The payload is one of :data:`planner.messages.Command`, or None for one that was refused: forged, malformed,
        meant for another node, older than :data:`COMMAND_MAX_AGE`, or seen before by this object.
        """

        def parse(raw: str) -> Any:
            body = unseal(self._sealing_key(), raw)
            if body["node"] != node:
                raise ValueError(f"a command for node {body['node']} stands in the stream of {node}")
            if self.clock.time() - float(body["time"]) > COMMAND_MAX_AGE:
                raise ValueError(f"the command is older than {COMMAND_MAX_AGE:.0f} s")
            if body["id"] in self._seen_commands:
                raise ValueError("the command was carried out already (a replay)")
            command = COMMANDS.validate_python(body["command"])
            self._seen_commands[str(body["id"])] = None
            if len(self._seen_commands) > MAX_MESSAGES:
                del self._seen_commands[next(iter(self._seen_commands))]
            return command

        return self._sift(f"commands:{node}", self._read(f"commands:{node}", after, block, count), parse)

    def send_report(self, node: str, report: BaseModel) -> str:
        """Seal a report of a node's agent (one of :data:`planner.messages.AgentReport`)."""
        body = {"node": node, "time": self.clock.time(), "report": report.model_dump(mode="json")}
        return self._append("reports", seal(self._sealing_key(), body), MAX_MESSAGES)

    def read_reports(self, after: str, *, block: float = 0.0, count: int = 500) -> list[Entry[ReportEnvelope | None]]:
        """Reports of all agents after a position; None for refused ones."""

        def parse(raw: str) -> ReportEnvelope:
            body = unseal(self._sealing_key(), raw)
            return ReportEnvelope(str(body["node"]), float(body["time"]), REPORTS.validate_python(body["report"]))

        return self._sift("reports", self._read("reports", after, block, count), parse)

    def send_response(self, response: Mapping[str, Any]) -> str:
        """Seal what a worker has to say to the scheduler. Never trimmed on its own: see :meth:`trim_responses`."""
        return self._append("responses", seal(self._sealing_key(), response), 0)

    def read_responses(self, after: str, *, block: float = 0.0, count: int = 100) -> list[Entry[dict[str, Any] | None]]:
        """Responses after a position; None for refused ones."""
        key = self._sealing_key()
        return self._sift("responses", self._read("responses", after, block, count), lambda raw: unseal(key, raw))

    def trim_responses(self, through: str) -> None:
        """Drop the responses up to and including a position, once the ledger holds them."""
        milliseconds, _, sequence = through.partition("-")
        first_kept = f"{milliseconds}-{int(sequence or 0) + 1}"
        self.link.call(lambda client: client.xtrim(PREFIX + "responses", minid=first_kept, approximate=False))

    # ------------------------------------------------------------------ requests

    def send_request(self, kind: str, **payload: Any) -> str:
        """Ask the coordinator for something; returns the entry's id.

        Kinds: ``submit`` ``cancel`` ``pause`` ``resume`` (supervisor), ``evaluate`` ``retry`` (scheduler).
        """
        return self._append(
            "requests", json.dumps({"kind": kind, "time": self.clock.time(), "payload": payload}), MAX_MESSAGES
        )

    def read_requests(self, after: str, *, block: float = 0.0, count: int = 100) -> list[Entry[Request | None]]:
        """Requests after a position. Every loop reads all of them and leaves alone what is not its own."""

        def parse(raw: str) -> Request:
            body = json.loads(raw)
            return Request(str(body["kind"]), float(body["time"]), dict(body["payload"]))

        return self._sift("requests", self._read("requests", after, block, count), parse)

    # ------------------------------------------------------------------ events

    def emit(self, event: Event) -> str:
        """Append an event to the cluster's stream."""
        return self._append("events", json.dumps(event.to_json()), MAX_EVENTS)

    def tell(self, action: Action, *, job: str | None = None, reason: str = "", old: str | None = None,
             new: str | None = None, incarnation: int | None = None, **details: Any) -> None:  # fmt: skip
        """Emit an event with the present time."""
        now = self.clock.time()
        self.emit(
            Event(
                time=now,
                action=action,
                job=job,
                incarnation=incarnation,
                old=old,
                new=new,
                reason=reason,
                details=details,
            )
        )

    def read_events(self, after: str, *, block: float = 0.0, count: int = 500) -> list[Entry[Event | None]]:
        """Events after a position, oldest first; None for one of a later version."""
        rows = self._read("events", after, block, count)
        entries: list[Entry[Event | None]] = []
        for entry, raw in rows:
            try:
                entries.append(Entry(entry, Event.from_json(json.loads(raw))))
            except (ValueError, KeyError, TypeError):  # not refused with an event: that would feed on itself
                entries.append(Entry(entry, None))
        return entries

    def last_events(self, count: int = 50) -> list[Event]:
        """The newest events, oldest first."""
        rows = self.link.call(lambda client: client.xrevrange(PREFIX + "events", count=count))
        found: list[Event] = []
        for _, fields in reversed(rows):
            try:
                found.append(Event.from_json(json.loads(fields["d"])))
            except (ValueError, KeyError, TypeError):
                continue
        return found

    # ------------------------------------------------------------------ nodes

    def register_node(self, facts: NodeFacts, adopt: Sequence[tuple[str, int]] = ()) -> Registration:
        """An agent says hello (or again, when :meth:`heartbeat` answers False).

        A new ``boot`` ends the leases that the node's former agent answered for, except the (id, token) pairs in
        ``adopt``, whose processes it took over. The free slots of a new boot stand in quarantine until
        :meth:`confirm_free`.
        """
        return self.table.register(facts.name, facts.to_json(), adopt)

    def heartbeat(self, node: str) -> bool:
        """Say that the node lives; to be called each second. False: not registered (any more), register again."""
        now = self.server_time()

        def beat(client: Any) -> Any:
            pipe = client.pipeline(transaction=False)
            pipe.set(f"{PREFIX}heartbeat:{node}", repr(now))
            pipe.hexists(PREFIX + "nodes", node)
            return pipe.execute()

        return bool(self.link.call(beat)[1])

    def nodes(self) -> list[NodeFacts]:
        """Registered nodes by name."""
        found = self.link.call(lambda client: client.hgetall(PREFIX + "nodes"))
        return [NodeFacts.from_json(json.loads(found[name])) for name in sorted(found)]

    def remove_node(self, node: str) -> None:
        """Forget a node that left for good, after its leases ended."""

        def remove(client: Any) -> Any:
            pipe = client.pipeline()
            pipe.hdel(PREFIX + "nodes", node)
            pipe.delete(f"{PREFIX}heartbeat:{node}", f"{PREFIX}commands:{node}")
            pipe.hdel(PREFIX + "cordoned", node)
            return pipe.execute()

        self.link.call(remove)

    def heartbeats(self) -> dict[str, float]:
        """Node → server time of its last heartbeat."""
        names = [facts.name for facts in self.nodes()]
        if not names:
            return {}
        values = self.link.call(lambda client: client.mget([f"{PREFIX}heartbeat:{name}" for name in names]))
        return {name: float(value) for name, value in zip(names, values, strict=True) if value is not None}

    def cordon(self, node: str, mode: str) -> None:
        """Keep new work away from a node; ``mode`` is ``cordon`` (running work stays) or ``drain`` (it moves off)."""
        self.link.call(lambda client: client.hset(PREFIX + "cordoned", node, mode))

    def uncordon(self, node: str) -> None:
        """Let a node take work again."""
        self.link.call(lambda client: client.hdel(PREFIX + "cordoned", node))

    def cordoned(self) -> dict[str, str]:
        """Node → ``cordon`` or ``drain``."""
        found: dict[str, str] = self.link.call(lambda client: client.hgetall(PREFIX + "cordoned"))
        return found

    # ------------------------------------------------------------------ leases, as their users see them

    def leases(self, holder: str | None = None, *, node: str | None = None) -> list[Lease]:
        """Leases of a holder and/or a node, oldest token first.

        ``holder`` ending in ``:`` matches all that begin so (``evaluation:``).
        """

        def matches(lease: Lease) -> bool:
            if node is not None and lease.node != node:
                return False
            if holder is None or lease.holder == holder:
                return True
            return holder.endswith(":") and lease.holder.startswith(holder)

        return [lease for lease in self.table.leases() if matches(lease)]

    def lease_valid(self, lease: str, token: int) -> bool:
        """Whether this lease exists under this token now: the check where it matters (publication, ledger)."""
        return bool(self.link.call(lambda client: client.hget(f"{PREFIX}lease:{lease}", "token")) == str(token))

    def release(self, lease: Lease, *, confirmed: bool = True, reason: str = "") -> bool:
        """Give a lease back and say so; see :meth:`planner.leases.LeaseTable.release`."""
        done = self.table.release(lease.id, lease.token, confirmed=confirmed)
        if done:
            self.tell(
                Action.LEASE_RELEASED,
                reason=reason or "given back by its holder",
                **lease_details(lease),
                confirmed=confirmed,
            )
        return done

    def confirm_free(self, node: str, marks: Mapping[str, str]) -> list[str]:
        """An agent's word that no process holds these slots: slot name → the mark from :meth:`quarantine`."""
        return self.table.confirm_free([(slot, mark) for slot, mark in marks.items() if slot.startswith(f"{node}/")])

    def quarantine(self, node: str) -> dict[str, str]:
        """Slot name → mark of the node's slots that wait for its agent's confirmation."""
        return {slot: mark for slot, mark in self.table.quarantine().items() if slot.startswith(f"{node}/")}

    # ------------------------------------------------------------------ demand, jobs, documents

    def set_demand(self, holder: str, demand: Demand) -> None:
        """Say what a holder wants; replaces what it said before."""
        self.link.call(lambda client: client.set(f"{PREFIX}demand:{holder}", json.dumps(demand.to_json())))

    def drop_demand(self, holder: str) -> None:
        """The holder wants nothing any more."""
        self.link.call(lambda client: client.delete(f"{PREFIX}demand:{holder}"))

    def demands(self) -> list[Demand]:
        """All demands, by holder."""
        keys = sorted(self.link.call(lambda client: list(client.scan_iter(f"{PREFIX}demand:*", count=1000))))
        if not keys:
            return []
        values = self.link.call(lambda client: client.mget(keys))
        found: list[Demand] = []
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue
            try:
                found.append(Demand.from_json(json.loads(value)))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self.refuse(key.removeprefix(PREFIX), value, _why(error))  # one bad demand must not stop all others
                self.link.call(partial(_delete, key=key))
        return found

    def put_job(self, job: str, record: Mapping[str, Any]) -> None:
        """Replace a job's record (the supervisor alone writes it)."""
        self.link.call(lambda client: client.hset(PREFIX + "jobs", job, json.dumps(dict(record))))

    def job(self, job: str) -> dict[str, Any] | None:
        """A job's record."""
        found = self.link.call(lambda client: client.hget(PREFIX + "jobs", job))
        return None if found is None else dict(json.loads(found))

    def jobs(self) -> dict[str, dict[str, Any]]:
        """All job records by id."""
        found = self.link.call(lambda client: client.hgetall(PREFIX + "jobs"))
        return {job: dict(json.loads(record)) for job, record in sorted(found.items())}

    def put_document(self, name: str, value: Mapping[str, Any]) -> None:
        """Publish a small JSON document for readers: ``evaluation`` (the scheduler's summary), ``decision`` …"""
        self.link.call(lambda client: client.hset(PREFIX + "documents", name, json.dumps(dict(value))))

    def document(self, name: str) -> dict[str, Any] | None:
        """A published document."""
        found = self.link.call(lambda client: client.hget(PREFIX + "documents", name))
        return None if found is None else dict(json.loads(found))


def _xread(client: Any, *, key: str, after: str, count: int, block: int | None) -> Any:
    return client.xread({key: after}, count=count, block=block)


def _delete(client: Any, *, key: str) -> Any:
    return client.delete(key)


def lease_details(lease: Lease) -> dict[str, Any]:
    """A lease as the details of an event."""
    return {
        "lease": lease.id,
        "token": lease.token,
        "holder": lease.holder,
        "node": lease.node,
        "slots": list(lease.slots),
    }


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return one_line(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}")[:300]
    if isinstance(error, KeyError):
        return f"the field {error.args[0]!r} is missing"
    return one_line(error)[:300]


__all__ = [
    "STREAM_START",
    "ClusterStore",
    "CoordinatorLock",
    "Demand",
    "Entry",
    "NodeFacts",
    "ReportEnvelope",
    "Request",
    "lease_details",
]
