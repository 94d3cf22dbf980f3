"""Leases in Redis: who may use which slots until when, under which fencing token.

A lease covers slots of one node and is granted, renewed, revoked and released as one. All changes run in one Lua
script (``planner/lua/leases.lua``), so each is atomic whoever races; :mod:`planner.lease_model` is its pure twin.

The rules:

* a slot is granted only when no lease covers it **and** it is not in *quarantine*. A slot is in quarantine after its
  node registered, after a lease on it died, and after Redis restarted, until the node's agent says that no process
  holds it (:meth:`Leases.confirm_free`);
* tokens come from one counter and only grow; it starts at ``epoch << 32``. A Redis that restarted may have lost its
  last second, so it grants nothing until the coordinator has raised the epoch (:meth:`Leases.lock`);
* a lease past its expiry lives until a sweep ends it (:meth:`Leases.expire`): until then a late renewal saves it,
  since nobody can have got its slots. Time in which no sweep ran (Redis or coordinator away) counts against no lease;
* a revoked lease may be renewed only up to its deadline.

Who calls what: the coordinator ``lock``, ``keep``, ``grant``, ``revoke``, ``expire``; an agent ``register``, ``renew``
and ``confirm_free``; a holder ``release``. All times are the Redis server's, in seconds since the epoch.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.resources import files
from typing import Any, Protocol

from planner.errors import FencedError, PlanariaError

DEFAULT_TTL = 10.0
"""Seconds a lease lives without renewal."""
SWEEP_GUARD = 3.0
"""Seconds without a sweep after which that time counts against no lease."""
EPOCH_UNIT = 1 << 32
"""Tokens per epoch; the epoch may reach 2**21 before a token is no longer exact in Lua."""


class SlotsTakenError(PlanariaError):
    """A slot of the request is leased or in quarantine; nothing of the request was granted."""

    def __init__(self, slots: Sequence[str]) -> None:
        super().__init__(f"slots {', '.join(slots)} are leased, or nobody has confirmed yet that no process holds them")
        self.slots = tuple(slots)


class RedisRestartedError(PlanariaError):
    """Redis restarted since the epoch was raised: take the coordinator's lock again before granting."""


class LockTakenError(PlanariaError):
    """Another coordinator is active; ``owner`` names it."""

    def __init__(self, owner: str) -> None:
        super().__init__(f"the coordinator's lock is held by {owner}")
        self.owner = owner


def slot_name(node: str, index: int) -> str:
    """The name of a slot: ``<node>/<index>``."""
    return f"{node}/{index}"


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The right of ``holder`` to use ``slots`` of ``node`` until ``expires``."""

    id: str
    token: int
    """Fencing token; only grows over the life of a cluster."""
    holder: str
    """``job:<job id>`` or ``evaluation:<worker id>``."""
    node: str
    slots: tuple[int, ...]
    granted: float
    expires: float
    ttl: float
    revoked: float | None = None
    """Deadline by which a revoked lease must be released; None while it is not revoked."""
    reason: str = ""
    """Why it was granted, or why it was revoked."""

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The full names of its slots."""
        return tuple(slot_name(self.node, index) for index in self.slots)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Lease:
        """The lease that Redis (or the script) describes as strings."""
        revoked = float(fields["revoked"])
        return cls(
            id=str(fields["id"]),
            token=int(fields["token"]),
            holder=str(fields["holder"]),
            node=str(fields["node"]),
            slots=tuple(int(index) for index in json.loads(fields["slots"])),
            granted=float(fields["granted"]),
            expires=float(fields["expires"]),
            ttl=float(fields["ttl"]),
            revoked=revoked if revoked > 0 else None,
            reason=str(fields["reason"]),
        )


@dataclass(frozen=True, kw_only=True)
class GrantRequest:
    """One lease to be granted; an empty ``id`` is filled in by the table."""

    holder: str
    node: str
    slots: tuple[int, ...]
    reason: str = ""
    ttl: float = DEFAULT_TTL
    id: str = ""

    def __post_init__(self) -> None:
        if not self.slots:
            raise ValueError("a lease needs at least one slot")

    def identified(self) -> GrantRequest:
        """With an id that is never reused: a call that is repeated after a lost answer then grants once."""
        return self if self.id else replace(self, id=uuid.uuid4().hex[:16])


@dataclass(frozen=True, kw_only=True)
class Revocation:
    """A lease to be taken back, with the seconds its holder gets to publish and leave."""

    lease: str
    grace_seconds: float
    reason: str = ""


class RenewStatus(StrEnum):
    """What a renewal found."""

    RENEWED = "renewed"
    REVOKED = "revoked"  #: valid up to the deadline only; wind down and release
    LOST = "lost"  #: no such lease (any more) under this token: stop what runs under it


@dataclass(frozen=True)
class Renewal:
    """Answer to one renewal; ``expires`` and ``revoked`` are server times (0 and None when lost)."""

    status: RenewStatus
    expires: float
    revoked: float | None


@dataclass(frozen=True)
class Registration:
    """Answer to a node's hello: leases of its agent's former life that ended, and whether it was new."""

    ended: tuple[Lease, ...]
    fresh: bool


class LeaseTable(Protocol):
    """What the Redis table and the pure model both do; see the module's text for who calls what."""

    def lock(self, owner: str, epoch: int, ttl: float = DEFAULT_TTL) -> int:
        """Take (or take again) the coordinator's lock; returns its fencing token. Raises LockTakenError."""

    def keep(self, owner: str, token: int, ttl: float = DEFAULT_TTL) -> None:
        """Prolong the lock. Raises FencedError when another owner has it, RedisRestartedError after a restart."""

    def unlock(self, owner: str, token: int) -> None:
        """Give the lock back. Raises FencedError."""

    def grant(self, requests: Sequence[GrantRequest], *, fence: int | None) -> list[Lease]:
        """Grant all or none. Raises SlotsTakenError, FencedError, RedisRestartedError."""

    def renew(self, leases: Sequence[tuple[str, int]]) -> list[Renewal]:
        """Renew each (id, token) of the sequence by its own ttl, in one round trip."""

    def revoke(self, revocations: Sequence[Revocation], *, fence: int | None) -> list[Lease]:
        """Set deadlines; an earlier deadline stays. Returns the leases that exist. Raises FencedError."""

    def release(self, lease: str, token: int, *, confirmed: bool = True) -> bool:
        """Give a lease back. ``confirmed``: the caller made sure that no process holds its slots; else they go into
        quarantine until the agent says so. False when there is no such lease under this token."""

    def expire(self, *, fence: int | None, guard: float = SWEEP_GUARD) -> list[Lease]:
        """Sweep: end what is past its expiry, slots into quarantine; returns the ended. Raises FencedError."""

    def confirm_free(self, slots: Sequence[tuple[str, str]]) -> list[str]:
        """The agent's word that no process holds these (slot name, quarantine mark); returns the cleared names."""

    def register(self, node: str, facts: Mapping[str, Any], adopt: Sequence[tuple[str, int]] = ()) -> Registration:
        """A node says hello with its facts (at least ``boot``, an id of this life of the agent, and ``slots``).

        Another boot ends all leases of the node but those named in ``adopt`` as (id, token)."""

    def leases(self) -> list[Lease]:
        """All leases, oldest token first."""

    def quarantine(self) -> dict[str, str]:
        """Slot name → mark of the slots that wait for an agent's confirmation."""


class Leases:
    """The lease table in Redis.

    Args:
        call: runs ``function(client)`` with retries (``planner.redis_link.RedisLink.call``).
        now: source of explicit times, for tests; None uses the server's own clock.
    """

    def __init__(self, call: Callable[[Callable[[Any], Any]], Any], *, now: Callable[[], float] | None = None) -> None:
        self._call = call
        self._now = now
        self._script: Any = None
        self._text = files("planner").joinpath("lua/leases.lua").read_text(encoding="utf-8")

    def _run(self, operation: str, **arguments: Any) -> dict[str, Any]:
        now = "" if self._now is None else repr(self._now())
        argument_list = [operation, now, json.dumps(arguments)]

        def evaluate(client: Any) -> Any:
            if self._script is None:
                self._script = client.register_script(self._text)
            return self._script(keys=[], args=argument_list, client=client)

        reply: dict[str, Any] = json.loads(self._call(evaluate))
        if reply["code"] == "fenced":
            raise FencedError("another coordinator took over: this one's token is no longer valid")
        if reply["code"] == "restarted":
            raise RedisRestartedError("Redis restarted: the epoch must be raised before anything is granted")
        return reply

    def lock(self, owner: str, epoch: int, ttl: float = DEFAULT_TTL) -> int:
        """See :class:`LeaseTable`."""
        reply = self._run("lock", owner=owner, epoch=epoch, ttl=ttl)
        if reply["code"] == "taken":
            raise LockTakenError(str(reply["owner"]))
        return int(reply["token"])

    def keep(self, owner: str, token: int, ttl: float = DEFAULT_TTL) -> None:
        """See :class:`LeaseTable`."""
        self._run("keep", owner=owner, token=str(token), ttl=ttl)

    def unlock(self, owner: str, token: int) -> None:
        """See :class:`LeaseTable`."""
        self._run("unlock", owner=owner, token=str(token))

    def grant(self, requests: Sequence[GrantRequest], *, fence: int | None) -> list[Lease]:
        """See :class:`LeaseTable`."""
        if not requests:
            return []
        wanted = [
            {
                "id": r.id,
                "holder": r.holder,
                "node": r.node,
                "slots": json.dumps(r.slots),
                "ttl": r.ttl,
                "reason": r.reason,
            }
            for r in (request.identified() for request in requests)
        ]
        reply = self._run("grant", grants=wanted, **_fence(fence))
        if reply["code"] == "taken":
            raise SlotsTakenError(reply["slots"])
        return _leases(reply)

    def renew(self, leases: Sequence[tuple[str, int]]) -> list[Renewal]:
        """See :class:`LeaseTable`."""
        if not leases:
            return []
        reply = self._run("renew", leases=[[lease, str(token)] for lease, token in leases])
        return [
            Renewal(RenewStatus(status), float(expires), float(revoked) or None)
            for status, expires, revoked in reply["results"]
        ]

    def revoke(self, revocations: Sequence[Revocation], *, fence: int | None) -> list[Lease]:
        """See :class:`LeaseTable`."""
        if not revocations:
            return []
        wanted = [{"id": r.lease, "grace": r.grace_seconds, "reason": r.reason} for r in revocations]
        return _leases(self._run("revoke", revocations=wanted, **_fence(fence)))

    def release(self, lease: str, token: int, *, confirmed: bool = True) -> bool:
        """See :class:`LeaseTable`."""
        return bool(self._run("release", id=lease, token=str(token), confirmed=confirmed)["code"] == "ok")

    def expire(self, *, fence: int | None, guard: float = SWEEP_GUARD) -> list[Lease]:
        """See :class:`LeaseTable`."""
        return _leases(self._run("expire", guard=guard, **_fence(fence)))

    def confirm_free(self, slots: Sequence[tuple[str, str]]) -> list[str]:
        """See :class:`LeaseTable`."""
        if not slots:
            return []
        return list(self._run("confirm", slots=[list(pair) for pair in slots])["slots"])

    def register(self, node: str, facts: Mapping[str, Any], adopt: Sequence[tuple[str, int]] = ()) -> Registration:
        """See :class:`LeaseTable`."""
        kept = {lease: str(token) for lease, token in adopt}
        reply = self._run("register", node=node, facts=json.dumps(dict(facts)), adopt=kept)
        return Registration(tuple(_leases(reply)), bool(reply["fresh"]))

    def leases(self) -> list[Lease]:
        """See :class:`LeaseTable`."""
        return _leases(self._run("list"))

    def quarantine(self) -> dict[str, str]:
        """See :class:`LeaseTable`."""
        found: dict[str, str] = self._call(lambda client: client.hgetall("planaria:quarantine"))
        return found


def _fence(fence: int | None) -> dict[str, str]:
    return {} if fence is None else {"fence": str(fence)}


def _leases(reply: Mapping[str, Any]) -> list[Lease]:
    found = [Lease.from_fields(fields) for fields in reply["leases"]]
    return sorted(found, key=lambda lease: lease.token)
