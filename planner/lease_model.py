"""The lease table as a pure, in-memory model: the rules of ``planner/lua/leases.lua`` in Python, time given.

It is what the simulator and fast tests use instead of Redis, and what the conformance tests hold the script against.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import FencedError
from planner.leases import (
    DEFAULT_TTL,
    EPOCH_UNIT,
    SWEEP_GUARD,
    GrantRequest,
    Lease,
    LockTakenError,
    RedisRestartedError,
    Registration,
    Renewal,
    RenewStatus,
    Revocation,
    SlotsTakenError,
    slot_name,
)

_LOST = Renewal(RenewStatus.LOST, 0.0, None)


@dataclass(frozen=True)
class _Lock:
    owner: str | None
    token: int
    expires: float


class LeaseModel:
    """See :class:`planner.leases.LeaseTable`.

    Args:
        now: present time in seconds.
        run: id of the server's run; :meth:`restart` changes it.
    """

    def __init__(self, now: Callable[[], float], run: str = "run-0") -> None:
        self._now = now
        self._run = run
        self._known_run: str | None = None
        self._counter = 0
        self._swept: float | None = None
        self._lock: _Lock | None = None
        self._leases: dict[str, Lease] = {}
        self._quarantine: dict[str, str] = {}
        self._nodes: dict[str, Mapping[str, Any]] = {}

    def restart(self, run: str) -> None:
        """The server restarts with all its data."""
        self._run = run

    # ------------------------------------------------------------------ the coordinator's lock

    def lock(self, owner: str, epoch: int, ttl: float = DEFAULT_TTL) -> int:
        """See :class:`planner.leases.LeaseTable`."""
        now, held = self._now(), self._lock
        if held is not None and held.owner not in (None, owner) and held.expires > now:
            raise LockTakenError(str(held.owner))
        if self._known_run != self._run:
            for node, facts in self._nodes.items():
                self._quarantine_free(node, facts, f"run:{self._run}:{epoch}")
        self._counter = max(self._counter, epoch * EPOCH_UNIT) + 1
        self._known_run = self._run
        self._lock = _Lock(owner, self._counter, now + ttl)
        return self._counter

    def keep(self, owner: str, token: int, ttl: float = DEFAULT_TTL) -> None:
        """See :class:`planner.leases.LeaseTable`."""
        held = self._own(owner, token)
        if self._known_run != self._run:
            raise RedisRestartedError("the server restarted")
        self._lock = replace(held, expires=self._now() + ttl)

    def unlock(self, owner: str, token: int) -> None:
        """See :class:`planner.leases.LeaseTable`."""
        self._lock = replace(self._own(owner, token), owner=None, expires=0.0)

    def _own(self, owner: str, token: int) -> _Lock:
        if self._lock is None or self._lock.owner != owner or self._lock.token != token:
            raise FencedError("another coordinator took over")
        return self._lock

    def _check_fence(self, fence: int | None) -> None:
        if fence is not None and (self._lock is None or self._lock.token != fence):
            raise FencedError("another coordinator took over")

    # ------------------------------------------------------------------ leases

    def grant(self, requests: Sequence[GrantRequest], *, fence: int | None) -> list[Lease]:
        """See :class:`planner.leases.LeaseTable`."""
        if not requests:
            return []
        self._check_fence(fence)
        if self._known_run != self._run:
            raise RedisRestartedError("the server restarted")
        if requests[0].id and requests[0].id in self._leases:
            return [self._leases[r.id] for r in requests if r.id in self._leases]
        held = {name for lease in self._leases.values() for name in lease.slot_names}
        taken: list[str] = []
        for name in (slot_name(r.node, index) for r in requests for index in r.slots):
            if name in held or name in self._quarantine:
                taken.append(name)
            held.add(name)
        if taken:
            raise SlotsTakenError(taken)
        return [self._new(request) for request in requests]

    def _new(self, request: GrantRequest) -> Lease:
        self._counter += 1
        now = self._now()
        lease = Lease(
            id=request.id or uuid.uuid4().hex[:16],
            token=self._counter,
            holder=request.holder,
            node=request.node,
            slots=request.slots,
            granted=now,
            expires=now + request.ttl,
            ttl=request.ttl,
            reason=request.reason,
        )
        self._leases[lease.id] = lease
        return lease

    def renew(self, leases: Sequence[tuple[str, int]]) -> list[Renewal]:
        """See :class:`planner.leases.LeaseTable`."""
        return [self._renew(lease, token) for lease, token in leases]

    def _renew(self, name: str, token: int) -> Renewal:
        lease, now = self._leases.get(name), self._now()
        if lease is None or lease.token != token:
            return _LOST
        if lease.revoked is not None and lease.revoked <= now:
            return _LOST
        expires = now + lease.ttl if lease.revoked is None else min(now + lease.ttl, lease.revoked)
        self._leases[name] = replace(lease, expires=expires)
        status = RenewStatus.RENEWED if lease.revoked is None else RenewStatus.REVOKED
        return Renewal(status, expires, lease.revoked)

    def revoke(self, revocations: Sequence[Revocation], *, fence: int | None) -> list[Lease]:
        """See :class:`planner.leases.LeaseTable`."""
        if revocations:
            self._check_fence(fence)
        for want in revocations:
            lease, deadline = self._leases.get(want.lease), self._now() + want.grace_seconds
            if lease is not None and (lease.revoked is None or deadline < lease.revoked):
                self._leases[lease.id] = replace(
                    lease, revoked=deadline, reason=want.reason, expires=min(lease.expires, deadline)
                )
        found = [self._leases[r.lease] for r in revocations if r.lease in self._leases]
        return sorted(found, key=lambda lease: lease.token)

    def release(self, lease: str, token: int, *, confirmed: bool = True) -> bool:
        """See :class:`planner.leases.LeaseTable`."""
        held = self._leases.get(lease)
        if held is None or held.token != token:
            return False
        self._finish(held, None if confirmed else str(held.token))
        return True

    def expire(self, *, fence: int | None, guard: float = SWEEP_GUARD) -> list[Lease]:
        """See :class:`planner.leases.LeaseTable`."""
        self._check_fence(fence)
        now, before, self._swept = self._now(), self._swept, self._now()
        if before is None or now - before > guard:
            self._forgive(now, 0.0 if before is None else now - before)
        ended = sorted((lease for lease in self._leases.values() if lease.expires <= now), key=lambda one: one.token)
        for lease in ended:
            self._finish(lease, str(lease.token))
        return ended

    def _forgive(self, now: float, away: float) -> None:
        """Time in which no sweep ran counts against no lease."""
        for lease in list(self._leases.values()):
            expires, revoked = max(lease.expires, now + lease.ttl), lease.revoked
            if revoked is not None:
                revoked += away
                expires = min(expires, revoked)
            self._leases[lease.id] = replace(lease, expires=expires, revoked=revoked)

    def _finish(self, lease: Lease, mark: str | None) -> None:
        del self._leases[lease.id]
        if mark is not None:
            self._quarantine.update(dict.fromkeys(lease.slot_names, mark))

    # ------------------------------------------------------------------ nodes

    def confirm_free(self, slots: Sequence[tuple[str, str]]) -> list[str]:
        """See :class:`planner.leases.LeaseTable`."""
        cleared = [slot for slot, mark in slots if self._quarantine.get(slot) == mark]
        for slot in cleared:
            del self._quarantine[slot]
        return cleared

    def register(self, node: str, facts: Mapping[str, Any], adopt: Sequence[tuple[str, int]] = ()) -> Registration:
        """See :class:`planner.leases.LeaseTable`."""
        before, self._nodes[node] = self._nodes.get(node), dict(facts)
        if before is not None and before["boot"] == facts["boot"]:
            return Registration((), False)
        ended: list[Lease] = []
        if before is not None:
            kept = dict(adopt)
            ended = [one for one in self.leases() if one.node == node and kept.get(one.id) != one.token]
            for lease in ended:
                self._finish(lease, str(facts["boot"]))
        self._quarantine_free(node, facts, str(facts["boot"]))
        return Registration(tuple(ended), True)

    def _quarantine_free(self, node: str, facts: Mapping[str, Any], mark: str) -> None:
        held = {name for lease in self._leases.values() for name in lease.slot_names}
        names = {slot_name(node, index) for index in range(int(facts["slots"]))}
        self._quarantine.update(dict.fromkeys(names - held, mark))

    def leases(self) -> list[Lease]:
        """See :class:`planner.leases.LeaseTable`."""
        return sorted(self._leases.values(), key=lambda lease: lease.token)

    def quarantine(self) -> dict[str, str]:
        """See :class:`planner.leases.LeaseTable`."""
        return dict(self._quarantine)
