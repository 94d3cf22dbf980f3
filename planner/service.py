"""The allocator's loop: reads what holders want and how the nodes are, asks the pure decision, carries it out.

Each round: leases that died are swept, the health of each node is judged anew, and the decision is made on what stands
in Redis now. Nothing is remembered that Redis does not hold, but for what is told only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.allocation import Allocation, ClusterView, NodeView
from planner.allocator_settings import SettingsWatch
from planner.events import Action
from planner.foresight import Foresight
from planner.health import NodeState, judge_all, transitions
from planner.leases import SWEEP_GUARD, Lease, RedisRestartedError, SlotsTakenError
from planner.store import ClusterStore, NodeFacts, lease_details
from planner.types import Trigger

STUCK_SECONDS = 10.0
"""Seconds in quarantine after which no plan counts on a slot."""

TIMER_SECONDS = 2.0
"""Seconds after which the decision is made anew although nothing happened (waiting grows older)."""
_LIGHT = (Trigger.TIMER, Trigger.BACKLOG_CHANGED)
"""Triggers that say less than that a checkpoint was published."""

Decide = Callable[[ClusterView, float], Allocation]


class Allocator:
    """The loop; see :class:`planner.coordinator.Loop`.

    Args:
        store: with the coordinator's fence.
        state_dir: may hold ``allocator.yaml`` (:class:`planner.allocator_settings.AllocatorSettings`).
        decide: the decision; the cost-aware one when left out.
    """

    def __init__(self, store: ClusterStore, state_dir: Path | None = None, decide: Decide | None = None) -> None:
        self._store = store
        self._settings = SettingsWatch(state_dir)
        self._decide: Decide = decide if decide is not None else Foresight(self._settings.settings)
        remembered = store.document("node_health") or {}
        self._health: dict[str, NodeState] = {node: NodeState(state) for node, state in remembered.items()}
        self._first_seen: dict[str, float] = {}
        self._quarantined_since: dict[str, float] = {}
        self._drained: set[str] = set()
        self._last_round = 0.0
        self._back_since = 0.0
        self._view: ClusterView | None = None
        self._told: tuple[Any, ...] | None = None
        self._position = store.end_of("events")
        self._idle = False
        self._decided_at = 0.0

    def tick(self, now: float) -> None:
        """One round.

        Raises:
            FencedError: another coordinator took over.
        """
        store = self._store
        for lease in store.table.expire(fence=store.fence()):
            self._tell_lease(Action.LEASE_EXPIRED, lease, _why_ended(lease))
        server_now = store.server_time()
        view = self._read(server_now)
        view = replace(view, trigger=self._trigger(view))
        self._tell_drained(view)
        last, self._view = self._view, view
        if self._settled(last, view, server_now):
            return
        self._decided_at = server_now
        allocation = self._decide(view, server_now)
        self._idle = allocation.idle
        self._carry_out(allocation)
        self._tell_decision(allocation, view, now)

    def close(self) -> None:
        """End what the decision runs in the background."""
        if isinstance(self._decide, Foresight):
            self._decide.close()

    def _settled(self, last: ClusterView | None, view: ClusterView, now: float) -> bool:
        """Nothing happened since a decision that changed nothing: the same one would come out again."""
        if last is None or not self._idle or view.trigger is not Trigger.TIMER:
            return False
        return view.signature() == last.signature() and now - self._decided_at < TIMER_SECONDS

    def _trigger(self, view: ClusterView) -> Trigger:
        """What happened since the last round."""
        entries = self._store.read_events(self._position)
        self._position = entries[-1].id if entries else self._position
        found = trigger(self._view, view)
        if found in _LIGHT and self._settings.changed():
            if isinstance(self._decide, Foresight):
                self._decide.use(self._settings.settings)
            return Trigger.PRICE_CHANGED
        published = any(entry.payload and entry.payload.action is Action.EXPORT_PUBLISHED for entry in entries)
        return Trigger.CHECKPOINT_PUBLISHED if published and found in _LIGHT else found

    # ------------------------------------------------------------------ reading

    def _read(self, now: float) -> ClusterView:
        store = self._store
        facts = {node.name: node for node in store.nodes()}
        leases = tuple(store.leases())
        cordoned = store.cordoned()
        self._judge(facts, leases, now)
        quarantine = store.table.quarantine()
        self._quarantined_since = {slot: self._quarantined_since.get(slot, now) for slot in quarantine}
        stuck = {slot for slot, since in self._quarantined_since.items() if now - since > STUCK_SECONDS}
        return ClusterView(
            nodes=tuple(self._node(facts[name], cordoned.get(name)) for name in sorted(facts)),
            demands=tuple(store.demands()),
            leases=leases,
            quarantine=frozenset(quarantine),
            stuck=frozenset(stuck),
        )

    def _node(self, facts: NodeFacts, cordoned: str | None) -> NodeView:
        state = self._health[facts.name]
        why = "" if state is NodeState.ALIVE else str(state)
        if cordoned is not None:
            why = {"drain": "drained", "cordon": "cordoned", "check": "cordoned until it passes a node check"}.get(
                cordoned, cordoned
            )
        return NodeView(
            name=facts.name,
            slots=facts.slots,
            usable=not why,
            kept=bool(why) and state is not NodeState.DEAD and cordoned != "drain",
            drained=cordoned == "drain",
            why=why,
            own=f"evaluation:{facts.name}" if facts.kind == "worker" else None,
        )

    def _judge(self, facts: Mapping[str, NodeFacts], leases: tuple[Lease, ...], now: float) -> None:
        self._first_seen = {name: self._first_seen.get(name, now) for name in facts}
        judged = judge_all(facts, self._heartbeats(now), leases, now, known_since=self._first_seen)
        changes = transitions(self._health, judged)
        for change in changes:
            self._store.tell(change.action, old=change.old, new=change.new, reason=change.reason, node=change.node)
        self._health = {name: state for name, (state, _) in judged.items()}
        if changes:
            self._store.put_document("node_health", {name: str(state) for name, state in self._health.items()})

    def _heartbeats(self, now: float) -> dict[str, float]:
        """Heartbeats; time in which no round ran counts against no node that lived, as it counts against no lease."""
        if now - self._last_round > SWEEP_GUARD:
            self._back_since = now
        self._last_round = now
        return {
            node: beat if self._health.get(node) is NodeState.DEAD else max(beat, self._back_since)
            for node, beat in self._store.heartbeats().items()
        }

    # ------------------------------------------------------------------ doing

    def _carry_out(self, allocation: Allocation) -> None:
        store = self._store
        if allocation.revocations:
            for lease in store.table.revoke(allocation.revocations, fence=store.fence()):
                self._tell_lease(Action.LEASE_REVOKED, lease, lease.reason)
        if allocation.grants:
            try:
                granted = store.table.grant(allocation.grants, fence=store.fence())
            except (SlotsTakenError, RedisRestartedError):
                return  # the world moved on since it was read: the next round sees it
            for lease in granted:
                self._tell_lease(Action.LEASE_GRANTED, lease, lease.reason)

    # ------------------------------------------------------------------ telling

    def _tell_lease(self, action: Action, lease: Lease, reason: str) -> None:
        job = lease.holder.removeprefix("job:") if lease.holder.startswith("job:") else None
        self._store.tell(action, job=job, reason=reason, **lease_details(lease))

    def _tell_decision(self, allocation: Allocation, view: ClusterView, now: float) -> None:
        """An event per decision that changes something; a document with the present one."""
        decision = allocation.decision
        told = (dict(decision.plan.assignments), decision.plan.unassigned, dict(allocation.waiting))
        if allocation.idle and told == self._told:
            return
        self._told = told
        body = decision.to_json() | {
            "trigger": str(view.trigger),
            "waiting": dict(allocation.waiting),
            "granted": [f"{g.node}/{index} to {g.holder}" for g in allocation.grants for index in g.slots],
            "revoked": [revocation.lease for revocation in allocation.revocations],
        }
        self._store.put_document("decision", body | {"time": now})
        reason = body.pop("reason")
        self._store.tell(Action.DECISION, reason=str(reason), **body)

    def _tell_drained(self, view: ClusterView) -> None:
        busy = {lease.node for lease in view.leases}
        empty = {node.name for node in view.nodes if node.drained and node.name not in busy}
        for node in sorted(empty - self._drained):
            if self._view is not None:  # the first round cannot know whether it was told before
                self._store.tell(Action.NODE_DRAINED, reason="no work is left on it", node=node)
        self._drained = empty


def _why_ended(lease: Lease) -> str:
    if lease.revoked is not None:
        return "it was revoked and not given back within its grace period"
    return f"it was not renewed for {lease.ttl:.0f} s"


def trigger(before: ClusterView | None, after: ClusterView) -> Trigger:
    """What happened between two views, the weightiest first; the timer when nothing did."""
    if before is None:
        return Trigger.TIMER
    was, now = _usable(before), _usable(after)
    old, new = {d.holder: d for d in before.demands}, {d.holder: d for d in after.demands}
    if was - now:
        return Trigger.NODE_LOST
    if any(d.faulted and not (h in old and old[h].faulted) for h, d in new.items()):
        return Trigger.WORKER_LOST
    if now - was:
        return Trigger.NODE_JOINED
    if new.keys() - old.keys():
        return Trigger.JOB_SUBMITTED
    if old.keys() - new.keys():
        return Trigger.JOB_ENDED
    if any(d.backlog_seconds != old[h].backlog_seconds for h, d in new.items()):
        return Trigger.BACKLOG_CHANGED
    return Trigger.TIMER


def _usable(view: ClusterView) -> set[str]:
    return {node.name for node in view.nodes if node.usable}
