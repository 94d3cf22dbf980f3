"""Whether a node lives: decided from its heartbeats and leases alone, with no clock of its own.

*Suspected* after 3 s without a heartbeat: plans are made. *Dead* only at the lease's expiry (or, without a lease, after
the time a lease would have lived): plans are carried out (DESIGN.md, Words).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from planner.events import Action
from planner.leases import DEFAULT_TTL, Lease

SUSPECTED_AFTER = 3.0
"""Seconds without a heartbeat."""


class NodeState(StrEnum):
    """Health of a node."""

    ALIVE = "alive"
    SUSPECTED = "suspected"
    DEAD = "dead"


def judge(silent: float, leases_end: float | None, now: float, *, ttl: float = DEFAULT_TTL) -> tuple[NodeState, str]:
    """State of a node and why.

    Args:
        silent: seconds since its last heartbeat.
        leases_end: server time at which the last of its leases ends; None without a lease.
        now: server time.
        ttl: seconds a lease lives without renewal.
    """
    if silent < SUSPECTED_AFTER:
        return NodeState.ALIVE, f"heartbeat {max(silent, 0.0):.1f} s ago"
    if leases_end is not None and leases_end > now:
        return NodeState.SUSPECTED, f"no heartbeat for {silent:.1f} s; its leases end in {leases_end - now:.1f} s"
    if silent < ttl:
        return NodeState.SUSPECTED, f"no heartbeat for {silent:.1f} s; dead after {ttl:.0f} s"
    return NodeState.DEAD, f"no heartbeat for {silent:.1f} s and no lease that lives"


def judge_all(
    nodes: Iterable[str],
    heartbeats: Mapping[str, float],
    leases: Iterable[Lease],
    now: float,
    *,
    known_since: Mapping[str, float] | None = None,
) -> dict[str, tuple[NodeState, str]]:
    """Node → state and reason. ``known_since`` stands in for the heartbeat of a node that never sent one."""
    ends: dict[str, float] = {}
    for lease in leases:
        ends[lease.node] = max(ends.get(lease.node, 0.0), lease.expires)
    since = known_since or {}
    return {
        node: judge(now - heartbeats.get(node, since.get(node, 0.0)), ends.get(node), now) for node in sorted(nodes)
    }


@dataclass(frozen=True)
class Transition:
    """A node's change of health, ready to be an event."""

    node: str
    action: Action
    old: str | None
    new: str | None
    reason: str


def transitions(before: Mapping[str, NodeState], after: Mapping[str, tuple[NodeState, str]]) -> list[Transition]:
    """What changed between two judgements, nodes that came and went included."""
    found: list[Transition] = []
    for node, (state, reason) in after.items():
        old = before.get(node)
        if old is None:
            found.append(Transition(node, Action.NODE_JOINED, None, state, reason))
            if state is NodeState.ALIVE:
                continue
        if old is state:
            continue
        action = {
            NodeState.ALIVE: Action.NODE_RECOVERED,
            NodeState.SUSPECTED: Action.NODE_SUSPECTED,
            NodeState.DEAD: Action.NODE_DEAD,
        }[state]
        found.append(Transition(node, action, old, state, reason))
    gone = sorted(before.keys() - after.keys())
    return found + [Transition(node, Action.NODE_LEFT, before[node], None, "it left the cluster") for node in gone]
