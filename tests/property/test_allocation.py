"""Who gets which slot: invariants of the pure decision, and where it leads when it is carried out round by round."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis import given, settings

from planner.allocation import Allocation, ClusterView, NodeView, allocate, demand_of
from planner.demand import Demand
from planner.lease_model import LeaseModel
from planner.leases import Lease
from planner.types import Decision, Plan


def training(name: str, least: int = 1, most: int = 2, weight: float = 1.0, step: int = 1) -> Demand:
    counts = tuple(range(least, most + 1, step))
    rates = {count: 1e9 * count for count in counts}
    return Demand(f"job:{name}", "pretrain", weight, least, most, counts, rates, 5.0)


def evaluation(backlog: float = 100.0, most: int = 8) -> Demand:
    counts = tuple(range(1, most + 1))
    return Demand("evaluation", "evaluation", 1.0, 0, most, counts, {}, 1.0, backlog_seconds=backlog)


def node(name: str = "n", slots: int = 3, **more: object) -> NodeView:
    return dataclasses.replace(NodeView(name=name, slots=slots, usable=True), **more)  # type: ignore[arg-type]


def lease(holder: str, slots: tuple[int, ...], node: str = "n", token: int = 1, revoked: float | None = None) -> Lease:
    return Lease(id=f"{node}{token}", token=token, holder=holder, node=node, slots=slots, granted=0.0, expires=9.0,
                 ttl=10.0, revoked=revoked)  # fmt: skip


def granted(allocation: Allocation) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for grant in allocation.grants:
        holder = "evaluation" if grant.holder.startswith("evaluation:") else grant.holder
        found.setdefault(holder, []).extend(f"{grant.node}/{index}" for index in grant.slots)
    return found


def test_training_gets_its_slots_and_evaluation_the_rest() -> None:
    found = allocate(ClusterView(nodes=(node(),), demands=(evaluation(), training("a"))), 0.0)
    assert granted(found) == {"job:a": ["n/0", "n/1"], "evaluation": ["n/2"]}
    assert "2 to job:a" in found.decision.reason
    assert "1 to evaluation" in found.decision.reason
    assert {len(g.slots) for g in found.grants} == {1}, "a slot of a job that can run on 1 may be taken back alone"
    (other,) = found.decision.alternatives
    assert other.cost == 1e9


def test_a_job_below_its_minimum_waits_and_the_reason_says_what_is_missing() -> None:
    view = ClusterView(nodes=(node(), node("m", 2, usable=False, why="dead")), demands=(training("big", 4, 4),))
    found = allocate(view, 0.0)
    assert not found.grants
    assert found.waiting["job:big"] == "needs at least 4 of 3 usable slots; not usable: m (dead)"
    assert "none to job:big, which needs at least 4" in found.decision.reason


def test_the_minimum_of_every_job_comes_before_more_of_any_and_weight_decides_who_gets_more() -> None:
    demands = (training("light", 1, 3, 1.0), training("heavy", 1, 3, 5.0))
    found = allocate(ClusterView(nodes=(node(slots=4),), demands=demands), 0.0)
    assert {holder: len(slots) for holder, slots in granted(found).items()} == {"job:light": 1, "job:heavy": 3}


def test_a_slot_changes_hands_by_revocation_first_and_the_job_gets_all_at_once() -> None:
    leases = (lease("evaluation:n-0", (0,), token=1), lease("evaluation:n-1", (1,), token=2))
    view = ClusterView(nodes=(node(slots=3),), demands=(training("a", 2, 2), evaluation()), leases=leases)
    found = allocate(view, 0.0)
    assert not found.grants, "one slot is free, the job needs two"
    assert [revocation.lease for revocation in found.revocations] == ["n2"]
    assert "being freed" in found.waiting["job:a"]
    revoked = (leases[0], dataclasses.replace(leases[1], revoked=5.0))
    assert allocate(dataclasses.replace(view, leases=revoked), 0.0).revocations == ()
    found = allocate(dataclasses.replace(view, leases=leases[:1]), 0.0)
    assert granted(found) == {"job:a": ["n/1", "n/2"]}


def test_slots_of_dead_cordoned_and_unconfirmed_nodes_are_not_granted_and_drained_ones_are_freed() -> None:
    nodes = (
        node("a", 1),
        node("b", 1, usable=False, why="dead"),
        node("c", 1, usable=False, drained=True, why="drained"),
    )
    held = lease("evaluation:c-0", (0,), node="c")
    view = ClusterView(nodes=nodes, demands=(training("x", 1, 3),), leases=(held,), quarantine=frozenset({"a/0"}))
    found = allocate(view, 0.0)
    assert not found.grants
    assert [revocation.lease for revocation in found.revocations] == [held.id]
    cordoned = dataclasses.replace(view, nodes=(nodes[0], dataclasses.replace(nodes[2], drained=False)))
    assert allocate(cordoned, 0.0).revocations[0].reason == "evaluation asks for nothing any more"


def test_no_plan_counts_on_a_slot_that_nobody_confirms() -> None:
    view = ClusterView(nodes=(node(slots=2),), demands=(training("a", 1, 2),), quarantine=frozenset({"n/0"}))
    assert not allocate(view, 0.0).grants, "it may be confirmed any moment: one transition instead of two"
    found = allocate(dataclasses.replace(view, stuck=frozenset({"n/0"})), 0.0)
    assert granted(found) == {"job:a": ["n/1"]}


def test_a_worker_started_by_hand_gets_the_slots_that_it_brought_and_no_one_else_does() -> None:
    own = node("w", 2, own="evaluation:w")
    view = ClusterView(nodes=(own,), demands=(training("a"),))
    found = allocate(view, 0.0)
    assert [(grant.holder, grant.slots) for grant in found.grants] == [("evaluation:w", (0, 1))]
    assert "needs" in found.waiting["job:a"]
    held = lease("evaluation:w", (0, 1), node="w")
    assert allocate(dataclasses.replace(view, leases=(held,)), 0.0).idle


def test_leases_of_one_tensor_group_stay_together() -> None:
    found = allocate(ClusterView(nodes=(node(slots=5),), demands=(training("tp", 2, 4, step=2),)), 0.0)
    assert [grant.slots for grant in found.grants] == [(0, 1), (2, 3)]


def test_with_nothing_queued_evaluation_keeps_its_loaded_engines_until_training_wants_the_slots() -> None:
    view = ClusterView(nodes=(node(),), demands=(evaluation(0.0),), leases=(lease("evaluation:n-0", (0,)),))
    assert allocate(view, 0.0).idle
    assert not allocate(dataclasses.replace(view, leases=()), 0.0).grants
    wanted = dataclasses.replace(view, demands=(evaluation(0.0), training("a", 3, 3)))
    assert len(allocate(wanted, 0.0).revocations) == 1


def test_another_planner_stands_behind_the_same_seam() -> None:
    def one_each(view: ClusterView, slots: int) -> Decision:
        counts = {demand.holder: 1 for demand in view.demands}
        return Decision(plan=Plan(counts, slots - len(counts), 0.0), reason="one each")

    view = ClusterView(nodes=(node(),), demands=(training("a"), training("b"), evaluation()))
    found = allocate(view, 0.0, one_each)
    assert {holder: len(slots) for holder, slots in granted(found).items()} == {"job:a": 1, "job:b": 1, "evaluation": 1}
    assert found.decision.reason == "one each"


def test_what_runs_on_a_cordoned_or_suspected_node_stays_and_counts() -> None:
    nodes = (node("a", 2, usable=False, kept=True, why="cordoned"), node("b", 1))
    leases = (lease("job:x", (0,), node="a", token=1), lease("job:x", (1,), node="a", token=2))
    view = ClusterView(nodes=nodes, demands=(training("x", 1, 4),), leases=leases)
    found = allocate(view, 0.0)
    assert found.revocations == ()
    assert granted(found) == {"job:x": ["b/0"]}
    only = dataclasses.replace(view, nodes=nodes[:1])
    assert allocate(only, 0.0).idle


def test_a_job_that_cannot_get_all_takes_what_it_can_when_nothing_more_is_to_come() -> None:
    nodes = (node("a", 2, usable=False, kept=True, why="suspected"), node("b", 3))
    leases = (lease("job:x", (0, 1), node="a", token=1),)
    demands = (training("x", 2, 2), training("y", 1, 4, weight=9.0))

    def greedy(view: ClusterView, slots: int) -> Decision:
        return Decision(plan=Plan({"job:x": 2, "job:y": 4}, 0, 0.0), reason="more than can be had")

    view = ClusterView(nodes=nodes, demands=demands, leases=leases)
    assert granted(allocate(view, 0.0, greedy)) == {"job:y": ["b/0", "b/1", "b/2"]}
    coming = dataclasses.replace(view, quarantine=frozenset({"b/0"}))
    assert not allocate(coming, 0.0, greedy).grants


@st.composite
def clusters(draw: st.DrawFn) -> ClusterView:
    nodes = tuple(
        NodeView(name=f"n{k}", slots=draw(st.integers(1, 4)), usable=draw(st.sampled_from([True, True, True, False])))
        for k in range(draw(st.integers(1, 3)))
    )
    demands = []
    for k in range(draw(st.integers(0, 4))):
        least, step = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        demands.append(training(f"j{k}", least, least + draw(st.integers(0, 4)), draw(st.floats(0.1, 9)), step))
    if draw(st.booleans()):
        demands.append(evaluation(draw(st.sampled_from([0.0, 50.0])), draw(st.integers(1, 6))))
    return ClusterView(nodes=nodes, demands=tuple(demands))


@settings(deadline=None, max_examples=150)
@given(first=clusters(), second=clusters())
def test_carried_out_round_by_round_it_settles_on_the_plan_and_stays(first: ClusterView, second: ClusterView) -> None:
    """Demands change at once; leases are granted in the model of the table; holders leave when revoked."""
    time = [0.0]
    table = LeaseModel(lambda: time[0])
    for one in first.nodes:
        table.register(one.name, {"boot": "b", "slots": one.slots})
    fence = table.lock("me", 1)
    table.confirm_free(list(table.quarantine().items()))
    for demands in (first.demands, second.demands):
        for _ in range(6):
            view = dataclasses.replace(first, demands=demands, leases=tuple(table.leases()))
            found = allocate(view, time[0])
            table.revoke(found.revocations, fence=fence)
            table.grant(found.grants, fence=fence)  # raises if a slot is held: the decision never asks for one
            for held in table.leases():
                if held.revoked is not None:
                    table.release(held.id, held.token)
            time[0] += 1.0
        settled = dataclasses.replace(first, demands=demands, leases=tuple(table.leases()))
        again = allocate(settled, time[0])
        assert again.idle, "unchanged input, yet something is to be done"
        held_by: dict[str, int] = {}
        for held in table.leases():
            held_by[demand_of(held)] = held_by.get(demand_of(held), 0) + len(held.slots)
        assert held_by == {holder: n for holder, n in again.decision.plan.assignments.items() if n}
        _check_plan(settled, again)


def _check_plan(view: ClusterView, found: Allocation) -> None:
    usable = sum(node.slots for node in view.nodes if node.usable)
    plan = found.decision.plan
    assert plan.slots + plan.unassigned == usable
    for demand in view.demands:
        count = plan.assignments[demand.holder]
        if demand.kind == "pretrain":
            assert count == 0 or (count in demand.feasible and count >= demand.min_slots)
        assert count <= demand.max_slots
        if count == 0:
            assert found.waiting[demand.holder]
