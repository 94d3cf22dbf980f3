"""What is going on, as one JSON document: for ``status``, ``nodes`` and the dashboard alike.

The parts that DESIGN.md fixes are ``jobs``, ``slots`` and ``evaluation``; the rest stands beside them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from planner.errors import BadInputError
from planner.events import Event
from planner.health import NodeState, judge_all
from planner.leases import Lease, slot_name
from planner.store import ClusterStore, NodeFacts

JOB_FIELDS: Mapping[str, Any] = {
    "id": None,
    "name": None,
    "state": "queued",
    "step": 0,
    "steps": 0,
    "loss": None,
    "workers": 0,
    "incarnation": 0,
    "faults": 0,
    "ettr": None,
    "ettr_losses": {},
}
"""What ``status --json`` says of each job, with the values of one that has not begun."""


def overview(store: ClusterStore) -> dict[str, Any]:
    """The whole document: jobs, slots, evaluation, nodes, decision."""
    facts = store.nodes()
    leases = store.leases()
    quarantine = store.table.quarantine()
    return {
        "jobs": [job_summary(job, record) for job, record in store.jobs().items()],
        "slots": slot_rows(facts, leases, quarantine),
        "evaluation": evaluation_summary(store.document("evaluation")),
        "nodes": node_rows(
            facts,
            store.heartbeats(),
            leases,
            store.cordoned(),
            store.server_time(),
            store.document("node_health"),
            store.document("node_checks"),
        ),
        "decision": store.document("decision"),
        "coordinator": _coordinator(store),
    }


def _coordinator(store: ClusterStore) -> dict[str, Any] | None:
    lock = store.coordinator()
    if lock is None:
        return None
    return {"owner": lock.owner, "active": lock.expires > store.server_time()}


def job_summary(job: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """A job's record cut to what the document promises; ``faults`` as a number, whatever the record keeps."""
    row = {name: _finite(record.get(name, default)) for name, default in JOB_FIELDS.items()}
    row["id"] = job
    row["name"] = row["name"] or job
    if isinstance(row["faults"], Sequence) and not isinstance(row["faults"], str):
        row["faults"] = len(row["faults"])
    if record.get("reason"):
        row["reason"] = record["reason"]
    return row


def _finite(value: Any) -> Any:
    """JSON has no NaN: a loss that is none is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def slot_rows(
    facts: Iterable[NodeFacts], leases: Iterable[Lease], quarantine: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row per slot, by node and index. A free slot has neither holder nor expiry."""
    by_slot = {name: lease for lease in leases for name in lease.slot_names}
    rows: list[dict[str, Any]] = []
    for node in facts:
        for index in range(node.slots):
            name = slot_name(node.name, index)
            lease = by_slot.get(name)
            state = "held" if lease else "unconfirmed" if name in quarantine else "free"
            if lease is not None and lease.revoked is not None:
                state = "revoked"
            rows.append(
                {
                    "node": node.name,
                    "slot": index,
                    "holder": lease.holder if lease else None,
                    "lease_expires": lease.expires if lease else None,
                    "state": state,
                }
            )
    return rows


def evaluation_summary(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """The scheduler's summary; zeros before it ever wrote one."""
    return {"queued": 0, "running": 0, "done": 0, "workers": 0} | dict(document or {})


def node_rows(
    facts: Iterable[NodeFacts],
    heartbeats: Mapping[str, float],
    leases: Sequence[Lease],
    cordoned: Mapping[str, str],
    now: float,
    judged: Mapping[str, Any] | None = None,
    checks: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """One row per node: its facts, its health and why, what its own checks say, and what it holds."""
    nodes = {node.name: node for node in facts}
    health = judge_all(nodes, heartbeats, leases, now)
    rows: list[dict[str, Any]] = []
    for name, node in sorted(nodes.items()):
        state, reason = health[name]
        if (judged or {}).get(name) == NodeState.DEAD and state is NodeState.SUSPECTED:
            state = NodeState.DEAD  # its leases ended meanwhile: the allocator has carried its plans out
        used = sum(len(lease.slots) for lease in leases if lease.node == name)
        rows.append(
            {
                "name": name,
                "kind": node.kind,
                "address": node.address,
                "device": node.device,
                "slots": node.slots,
                "held": used,
                "state": str(state),
                "reason": reason,
                "cordoned": cordoned.get(name),
                "checks": (checks or {}).get(name, {}),
                "heartbeat_seconds": round(now - heartbeats[name], 3) if name in heartbeats else None,
            }
        )
    return rows


def find_named(kind: str, name: str, known: Iterable[str]) -> str:
    """``name`` if it is known.

    Raises:
        BadInputError: it is not; the nearest names are in the message.
    """
    names = sorted(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; known: {', '.join(names[:8]) or 'none'}"
    raise BadInputError(f"{kind} {name}: not known here{hint}")


def event_in_words(event: Event) -> str:
    """One line for a person."""
    parts = [event.action.value]
    if event.job:
        parts.append(event.job)
    if event.old or event.new:
        parts.append(f"{event.old or 'new'} → {event.new or 'gone'}")
    subject = event.details.get("node") or event.details.get("worker") or event.details.get("loop")
    if subject and not event.job:
        parts.append(str(subject))
    return " ".join(parts) + (f": {event.reason}" if event.reason else "")
