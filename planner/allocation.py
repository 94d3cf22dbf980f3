"""From what holders want and what the cluster has to leases: the one decision of who gets which slot.

:func:`allocate` is pure. It has two halves behind one seam: *how many* slots each holder gets (:data:`Planner`, a
function of cluster and jobs) and *which* slots these are. The first form of the planner gives training its slots up to
its maximum, in order of weight, and evaluation the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from planner.demand import Demand
from planner.leases import GrantRequest, Lease, Revocation
from planner.types import Alternative, Decision, JobKind, Node, Plan, Slot, Trigger

EVALUATION = "evaluation"
"""The holder that asks for evaluation's slots; its leases are held by ``evaluation:<slot>``, one slot each."""
TRAINING_GRACE = 30.0
"""Seconds that a training job gets to publish and leave a slot."""
EVALUATION_GRACE = 10.0
"""Seconds that an infer worker gets to hand back what it finished."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """A node as the decision sees it."""

    name: str
    slots: int
    usable: bool
    """Alive and not cordoned: its free slots may be granted."""
    kept: bool = False
    """Not usable, but what is held there stays and counts: cordoned, or suspected and not yet dead."""
    drained: bool = False
    """All work is to move off (cordoned by ``drain``)."""
    why: str = ""
    """Why it is not usable, in words."""
    own: str | None = None
    """Holder that alone may use it: a worker started by hand that brought its own slots."""


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """All that the decision depends on."""

    nodes: tuple[NodeView, ...]
    demands: tuple[Demand, ...]
    leases: tuple[Lease, ...] = ()
    quarantine: frozenset[str] = frozenset()
    """Names of free slots that wait for an agent's word."""
    stuck: frozenset[str] = frozenset()
    """Those of them that have waited too long: no plan counts on them."""
    grace: Mapping[str, float] = field(default_factory=dict)
    """Kind → seconds of grace, where it is not the default."""
    trigger: Trigger = Trigger.TIMER

    def signature(self) -> tuple[object, ...]:
        """Equal for two views that lead to the same decision, whatever expires when and what led to them."""
        return (
            self.nodes,
            self.demands,
            tuple((lease.id, lease.revoked is not None) for lease in self.leases),
            self.quarantine,
            self.stuck,
        )


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The decision and what it takes to carry it out."""

    decision: Decision
    grants: tuple[GrantRequest, ...] = ()
    revocations: tuple[Revocation, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Holder → what is missing, in words."""

    @property
    def idle(self) -> bool:
        """Nothing is to be done."""
        return not self.grants and not self.revocations


Planner = Callable[[ClusterView, int], Decision]
"""``planner(view, slots) -> Decision``: counts per holder for a cluster of so many usable slots."""


# ---------------------------------------------------------------- how many: the first form


def first_form(view: ClusterView, slots: int) -> Decision:
    """Training first, by weight, each up to the largest feasible count; evaluation gets what is left.

    The minimum of every job comes before more than the minimum of any.
    """
    training = sorted((d for d in view.demands if d.kind != EVALUATION), key=lambda d: (-d.weight, d.since, d.holder))
    counts = dict.fromkeys((d.holder for d in view.demands), 0)
    left = slots
    for demand in training:
        least = _largest(demand, demand.min_slots)
        if 0 < least <= left:
            counts[demand.holder] = least
            left -= least
    for demand in training:
        if counts[demand.holder]:
            most = _largest(demand, counts[demand.holder] + left)
            left -= most - counts[demand.holder]
            counts[demand.holder] = most
    for demand in view.demands:
        if demand.kind == EVALUATION:
            # With nothing queued it keeps what nobody else wants: a resident engine is dear to load again.
            most = demand.max_slots if demand.backlog_seconds > 0 else min(_held_by_evaluation(view), demand.max_slots)
            counts[demand.holder] = min(left, most)
            left -= counts[demand.holder]
    plan = Plan(counts, left, _rate(view, counts))
    return Decision(plan=plan, reason=_in_words(view, counts, slots, left), trigger=view.trigger,
                    alternatives=_alternatives(view, counts, left))  # fmt: skip


def _held_by_evaluation(view: ClusterView) -> int:
    return sum(len(lease.slots) for lease in _held(view).get(EVALUATION, ()))


def _largest(demand: Demand, limit: int) -> int:
    fitting = [count for count in demand.feasible if demand.min_slots <= count <= min(limit, demand.max_slots)]
    return max(fitting, default=0)


def _rate(view: ClusterView, counts: Mapping[str, int]) -> float:
    """Weighted achieved aggregate FLOP/s of the training jobs."""
    return sum(d.weight * d.throughput.get(counts[d.holder], 0.0) for d in view.demands if d.kind != EVALUATION)


def _alternatives(view: ClusterView, counts: Mapping[str, int], left: int) -> tuple[Alternative, ...]:
    """One slot more for evaluation, from each training job that could give one: what it would cost in FLOP/s."""
    evaluation = [d for d in view.demands if d.kind == EVALUATION and counts[d.holder] < d.max_slots]
    found: list[Alternative] = []
    for demand in view.demands:
        if demand.kind == EVALUATION or not evaluation:
            continue
        smaller = _largest(demand, counts[demand.holder] - 1)
        if smaller <= 0:
            continue
        freed = counts[demand.holder] - smaller
        other = {**counts, demand.holder: smaller, evaluation[0].holder: counts[evaluation[0].holder] + freed}
        cost = _rate(view, counts) - _rate(view, other)
        label = f"{freed} slot(s) of {demand.holder} to evaluation"
        found.append(Alternative(label, Plan(other, left, _rate(view, other)), max(cost, 0.0)))
    return tuple(found)


def _in_words(view: ClusterView, counts: Mapping[str, int], slots: int, left: int) -> str:
    parts: list[str] = []
    for demand in view.demands:
        count = counts[demand.holder]
        if demand.kind == EVALUATION:
            if demand.backlog_seconds > 0:
                parts.append(f"{count} to evaluation, whose backlog is {demand.backlog_seconds:.0f} slot-seconds")
            elif count:
                parts.append(f"{count} stay with evaluation, whose engines are loaded and which nobody else wants")
        elif count:
            rate = demand.weight * demand.throughput.get(count, 0.0)
            parts.append(f"{count} to {demand.holder}, worth {rate:.3g} FLOP/s")
        else:
            parts.append(f"none to {demand.holder}, which needs {_missing(demand)}")
    if not parts:
        return f"nobody asks for any of the {slots} slots"
    return f"of {slots} slots: {'; '.join(parts)}; {left} left over"


def _missing(demand: Demand) -> str:
    if not any(demand.min_slots <= count <= demand.max_slots for count in demand.feasible):
        return f"a count from {demand.min_slots} to {demand.max_slots} and has a layout for none"
    least = min(c for c in demand.feasible if demand.min_slots <= c <= demand.max_slots)
    return f"at least {least}"


# ---------------------------------------------------------------- which: from counts to leases


def allocate(view: ClusterView, now: float, planner: Planner = first_form) -> Allocation:
    """Decide who holds which slot.

    A slot that is to change hands is revoked now and granted in a later call, once it is free: what is granted here is
    free already. A holder that keeps its count keeps its slots. A job's slots come in one step or not at all, since
    each step is a transition of the job: while fewer than it lacks are free, none is granted.

    Args:
        view: nodes, demands, leases.
        now: server time, seconds since the epoch (for waiting times in the reasons).
        planner: decides the counts.
    """
    usable = {slot.name for node in view.nodes if node.usable and node.own is None for slot in _slots(node)}
    usable -= view.stuck
    held = _held(view)
    staying = {node.name for node in view.nodes if node.kept}
    pinned = sum(len(lease.slots) for leases in held.values() for lease in leases if lease.node in staying)
    decision = planner(view, len(usable) + pinned)
    round_ = _Round(view, decision, usable, held)
    for demand in sorted(view.demands, key=lambda d: d.kind == EVALUATION):
        round_.serve(demand)
    return Allocation(
        decision=decision,
        grants=tuple(round_.grants + _brought(view)),
        revocations=tuple(round_.revocations + _orphans(view, held, {r.lease for r in round_.revocations})),
        waiting=round_.waiting,
    )


class _Round:
    """One call of :func:`allocate`: what is still free while the demands are served in turn."""

    def __init__(
        self, view: ClusterView, decision: Decision, usable: set[str], held: Mapping[str, Sequence[Lease]]
    ) -> None:
        self.view = view
        self.decision = decision
        self.usable = usable
        self.free = _free(view, usable)
        self.revocations = _drained(view)
        self.grants: list[GrantRequest] = []
        self.waiting: dict[str, str] = {}
        drained = {revocation.lease for revocation in self.revocations}
        self.split = {
            demand.holder: _split(
                [lease for lease in held.get(demand.holder, ()) if lease.id not in drained],
                decision.plan.assignments.get(demand.holder, 0),
            )
            for demand in view.demands
        }
        for demand in view.demands:
            self.revocations += [_revocation(view, one, demand.kind, decision) for one in self.split[demand.holder][1]]
        leaving = any(lease.revoked is not None for lease in view.leases)
        self.more_to_come = bool(leaving or self.revocations or (view.quarantine - view.stuck) & usable)
        """Slots are being freed: who lacks some waits for them, so that its change is one transition and not two."""

    def serve(self, demand: Demand) -> None:
        """Grant a demand what it lacks, or say why it waits."""
        wanted = self.decision.plan.assignments.get(demand.holder, 0)
        keep = self.split[demand.holder][0]
        have = sum(len(lease.slots) for lease in keep)
        count = wanted - have
        if wanted == 0:
            self.waiting[demand.holder] = _why_waiting(self.view, demand, len(self.usable))
        elif count > len(self.free) and demand.kind != EVALUATION:
            self.waiting[demand.holder] = f"{count} more slots are being freed for it, {len(self.free)} are free so far"
            count = 0 if self.more_to_come else _largest(demand, have + len(self.free)) - have
        count = min(count, len(self.free))
        if count > 0:
            taken = _choose(self.free, count, keep, demand)
            if not taken:
                self.waiting[demand.holder] = f"no {count} of the free slots are whole groups of {_group(demand)}"
            self.free = [slot for slot in self.free if slot not in taken]
            self.grants += _requests(demand, taken, self.decision)


def _free(view: ClusterView, usable: set[str]) -> list[Slot]:
    taken = {name for lease in view.leases for name in lease.slot_names}
    return sorted(Slot.parse(name) for name in usable - view.quarantine - taken)


def _brought(view: ClusterView) -> list[GrantRequest]:
    """Workers started by hand get the slots that they brought, all at once."""
    found: list[GrantRequest] = []
    for node in view.nodes:
        slots = {slot.name for slot in _slots(node)}
        if node.own is not None and node.usable and len(_free(view, slots)) == node.slots:
            reason = "it brought these slots itself"
            found.append(GrantRequest(holder=node.own, node=node.name, slots=tuple(range(node.slots)), reason=reason))
    return found


def _slots(node: NodeView) -> tuple[Slot, ...]:
    return tuple(Slot(node.name, index) for index in range(node.slots))


def demand_of(lease: Lease) -> str:
    """The demand that a lease answers: ``evaluation`` for all ``evaluation:<worker>``."""
    return EVALUATION if lease.holder.startswith(f"{EVALUATION}:") else lease.holder


def _held(view: ClusterView) -> dict[str, list[Lease]]:
    """Leases by demand, those that are not being taken back, on nodes that the allocator deals out."""
    ours = {node.name for node in view.nodes if node.own is None}
    held: dict[str, list[Lease]] = {}
    for lease in view.leases:
        if lease.revoked is None and lease.node in ours:
            held.setdefault(demand_of(lease), []).append(lease)
    return held


def _split(leases: Sequence[Lease], wanted: int) -> tuple[list[Lease], list[Lease]]:
    """Which leases stay and which go so that at most ``wanted`` slots are kept; the youngest go first."""
    keep: list[Lease] = []
    total = 0
    for lease in sorted(leases, key=lambda lease: lease.token):
        if total + len(lease.slots) <= wanted:
            keep.append(lease)
            total += len(lease.slots)
    return keep, [lease for lease in leases if lease not in keep]


def _revocation(view: ClusterView, lease: Lease, kind: str, decision: Decision) -> Revocation:
    default = EVALUATION_GRACE if kind == EVALUATION else TRAINING_GRACE
    return Revocation(lease=lease.id, grace_seconds=view.grace.get(kind, default), reason=decision.reason)


def _drained(view: ClusterView) -> list[Revocation]:
    drained = {node.name for node in view.nodes if node.drained}
    return [
        Revocation(
            lease=lease.id,
            grace_seconds=view.grace.get("drain", TRAINING_GRACE),
            reason=f"node {lease.node} is being drained",
        )
        for lease in view.leases
        if lease.node in drained and lease.revoked is None
    ]


def _orphans(view: ClusterView, held: Mapping[str, list[Lease]], revoked: set[str]) -> list[Revocation]:
    """Leases whose demand is gone: the job ended, or evaluation has nothing left."""
    asked = {demand.holder for demand in view.demands}
    return [
        Revocation(lease=lease.id, grace_seconds=TRAINING_GRACE, reason=f"{holder} asks for nothing any more")
        for holder, leases in sorted(held.items())
        if holder not in asked
        for lease in leases
        if lease.id not in revoked
    ]


def _why_waiting(view: ClusterView, demand: Demand, usable: int) -> str:
    if demand.kind == EVALUATION:
        return "training uses all slots" if demand.backlog_seconds > 0 else "nothing is queued"
    out = [f"{node.name} ({node.why})" for node in view.nodes if node.why]
    missing = f"needs {_missing(demand)} of {usable} usable slots"
    return missing + (f"; not usable: {', '.join(out)}" if out else "")


def _group(demand: Demand) -> int:
    """Slots that must lie together on a node: the job's tensor-parallel size."""
    return max(1, int(demand.details.get("group", 1)))


def _choose(free: Sequence[Slot], count: int, keep: Sequence[Lease], demand: Demand) -> list[Slot]:
    """``count`` more slots by :mod:`planner.placement`, or none if they cannot be had in whole groups.

    Nothing that is held moves: the flow is over the free slots and what the holder keeps. It stays on the holder's own
    nodes first; then training takes the node with the most free slots, evaluation the one with the fewest.
    """
    # networkx is only needed when slots change hands
    from planner.placement import NotPlaceableError, Request, place
    from planner.topology import Topology

    held = {Slot(lease.node, index) for lease in keep for index in lease.slots}
    there = {*free, *held}
    sizes = {node: 1 + max(s.index for s in there if s.node == node) for node in {s.node for s in there}}
    nodes = tuple(Node(name=node, slots=size) for node, size in sorted(sizes.items()))
    lost = frozenset(slot for node in nodes for slot in node.slot_list() if slot not in there)
    kind = JobKind.EVALUATION if demand.kind == EVALUATION else JobKind.PRETRAIN
    group, total = _group(demand), len(held) + count
    request = Request(job=demand.holder, count=total - total % group, group=group, kind=kind, held=frozenset(held))
    try:
        placement = place(Topology(nodes, lost), [request])
    except NotPlaceableError:
        return []
    return [] if placement.released[demand.holder] else list(placement.new[demand.holder])


def _requests(demand: Demand, slots: Sequence[Slot], decision: Decision) -> list[GrantRequest]:
    """One lease per unit that can be taken back alone: a slot for evaluation; for training the greatest common divisor
    of its feasible counts (its tensor and pipeline groups), within a node."""
    unit = 1 if demand.kind == EVALUATION else gcd(*demand.feasible) or 1
    by_node: dict[str, list[int]] = {}
    for slot in slots:
        by_node.setdefault(slot.node, []).append(slot.index)
    requests: list[GrantRequest] = []
    for node, indices in by_node.items():
        for start in range(0, len(indices), unit):
            part = tuple(indices[start : start + unit])
            holder = f"{EVALUATION}:{node}-{part[0]}" if demand.kind == EVALUATION else demand.holder
            requests.append(GrantRequest(holder=holder, node=node, slots=part, reason=decision.reason))
    return requests
