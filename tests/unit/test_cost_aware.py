"""The cost-aware planner: from demands and leases to counts, priced and in words."""

from __future__ import annotations

import dataclasses

import pytest

from planner.allocation import ClusterView, NodeView, allocate
from planner.cost_aware import CostAware, CostSettings, job_of, typical_rate
from planner.demand import Demand
from planner.event_table import build
from planner.leases import Lease
from planner.lending import LendingPolicy
from planner.types import Trigger


def training(name: str, rates: dict[int, float] | None = None, **more: object) -> Demand:
    rates = rates if rates is not None else {1: 1.0e9, 2: 1.8e9, 3: 2.4e9}
    base = Demand(f"job:{name}", "pretrain", 1.0, 1, 3, (1, 2, 3), rates, 2.0)
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def evaluation(backlog: float = 100.0, **details: object) -> Demand:
    return Demand(
        "evaluation", "evaluation", 1.0, 0, 8, tuple(range(1, 9)), {}, 1.0, backlog_seconds=backlog, details=details
    )


def lease(holder: str, index: int) -> Lease:
    return Lease(
        id=f"l{index}", token=index + 1, holder=holder, node="n", slots=(index,), granted=0.0, expires=9.0, ttl=10.0
    )


def view(*demands: Demand, slots: int = 3, leases: tuple[Lease, ...] = ()) -> ClusterView:
    return ClusterView(nodes=(NodeView(name="n", slots=slots, usable=True),), demands=demands, leases=leases)


HARMLESS = CostSettings(stop_probability=1e-4, lending=LendingPolicy(ageing_seconds=6000.0))
"""Reports hardly ever stop a run: only waiting makes them worth a loan."""


def test_slots_go_where_they_are_worth_most() -> None:
    heavy = training("heavy", weight=3.0)
    plan = CostAware()(view(heavy, training("light"), slots=4), 4).plan
    assert plan.assignments == {"job:heavy": 3, "job:light": 1}


def test_evaluation_takes_idle_slots_for_nothing_and_more_only_at_a_price() -> None:
    idle = CostAware()(view(training("a"), evaluation(), slots=5), 5)
    assert idle.plan.assignments == {"job:a": 3, "evaluation": 2}
    assert idle.plan.unassigned == 0
    assert "all idle" in idle.reason
    none = CostAware(HARMLESS)(view(training("a"), evaluation(), slots=3), 3)
    assert none.plan.assignments == {"job:a": 3, "evaluation": 0}
    urgent = evaluation(60.0, reports=[{"slot_seconds": 60.0, "job": "job:a", "probability": 0.95}])
    lent = CostAware()(view(training("a"), urgent, slots=3), 3)
    assert lent.plan.assignments["evaluation"] > 0
    assert "lent by job:a" in lent.reason
    assert lent.details["lending"]["worth"] > lent.details["lending"]["cost"]
    assert any(other.label.startswith("no slot to evaluation") for other in lent.alternatives)


def test_a_backlog_that_has_waited_long_enough_gets_a_slot() -> None:
    old = dataclasses.replace(evaluation(), since=1.0)
    patient = CostAware(HARMLESS)
    assert patient(view(training("a"), old), 3, now=10.0).plan.assignments["evaluation"] == 0
    assert patient(view(training("a"), old), 3, now=50_000.0).plan.assignments["evaluation"] > 0


def test_without_a_backlog_loaded_engines_stay_on_what_nobody_wants() -> None:
    leases = (lease("evaluation:n-3", 3), lease("evaluation:n-4", 4))
    quiet = CostAware()(view(training("a"), evaluation(0.0), slots=6, leases=leases), 6)
    assert quiet.plan.assignments == {"job:a": 3, "evaluation": 2}
    assert quiet.plan.unassigned == 1
    wanted = CostAware()(view(training("a"), evaluation(0.0), slots=4, leases=leases), 4)
    assert wanted.plan.assignments == {"job:a": 3, "evaluation": 1}


def test_an_unmeasured_count_can_be_tried() -> None:
    job = job_of(training("a", {2: 2.0e9}), held=2)
    assert job.profile.rate(2) == 2.0e9
    assert job.profile.rate(1) == pytest.approx(2.0e9 * 0.5**0.9)
    assert job.profile.rate(3) > 2.0e9
    fresh = training("b", {})
    assert job_of(fresh, 0, typical_rate([training("a"), fresh])).rate(1) == 1.0e9
    assert CostAware()(view(fresh), 3).plan.assignments == {"job:b": 3}


def test_the_present_count_is_what_is_leased_and_a_fault_is_charged() -> None:
    leases = (lease("job:a", 0), lease("job:a", 1))
    decision = CostAware()(view(training("a", faulted=True), leases=leases), 3)
    (price,) = decision.prices
    assert (price.old, price.new) == (2, 3)
    assert price.transition_cost == 1.8e9 * 2.0


def test_counts_above_the_maximum_or_below_the_minimum_are_not_given() -> None:
    bounded = training("a", min_slots=2, max_slots=2)
    assert CostAware()(view(bounded), 3).plan.assignments == {"job:a": 2}
    assert CostAware()(view(bounded), 1).plan.assignments == {"job:a": 0}


def test_no_usable_slot_is_said() -> None:
    decision = CostAware()(view(training("a"), evaluation()), 0)
    assert decision.plan.assignments == {"job:a": 0, "evaluation": 0}
    assert decision.reason == "no slot is usable"


def test_a_foreseen_state_is_answered_from_the_table_and_an_unforeseen_one_by_solving() -> None:
    planner = CostAware()
    demands = (training("a"), training("b", weight=2.0))
    now = view(*demands, slots=4)
    before = planner(now, 4)
    jobs = tuple(job_of(demand, 0, typical_rate(demands)) for demand in demands)
    from planner.cost_aware import cluster_of

    table = build(cluster_of(4, jobs, planner.settings), jobs)
    quick = CostAware(table=table)
    assert quick(now, 4).plan == before.plan
    assert quick(now, 3).plan == planner(now, 3).plan
    assert quick(view(*demands, slots=4), 2).plan == planner(now, 2).plan


def test_prices_and_spares_enter_when_turned_on() -> None:
    rented = CostAware(CostSettings(price_per_gpu_hour=2.0, flop_value=1.0e18))
    assert rented(view(training("a")), 3).plan.assignments == {"job:a": 0}
    leases = (lease("job:a", 0), lease("job:a", 1))
    spare = CostAware(CostSettings(repair_seconds=1e9, spares=1, mtbf_gpu_hours=1.0))
    assert spare(view(training("a"), leases=leases), 3).plan.assignments == {"job:a": 2}


def test_tensor_groups_stay_on_one_node_and_the_plan_knows_what_nodes_have_room_for() -> None:
    wide = Demand("job:w", "pretrain", 1.0, 2, 6, (2, 4, 6), {2: 2e9, 4: 4e9, 6: 6e9}, 1.0, details={"group": 2})
    nodes = (NodeView(name="a", slots=3, usable=True), NodeView(name="b", slots=3, usable=True))
    found = allocate(ClusterView(nodes=nodes, demands=(wide, evaluation())), 0.0, CostAware())
    assert found.decision.plan.assignments == {"job:w": 4, "evaluation": 2}, "six slots have room for two groups only"
    mine = [grant for grant in found.grants if grant.holder == "job:w"]
    assert sorted((grant.node, len(grant.slots)) for grant in mine) == [("a", 2), ("b", 2)]
    assert sum(len(grant.slots) for grant in found.grants) == 6


def test_evaluation_takes_what_is_free_of_what_it_is_given() -> None:
    leaving = dataclasses.replace(lease("job:old", 0), revoked=5.0)
    found = allocate(view(evaluation(), slots=3, leases=(leaving,)), 0.0, CostAware())
    assert found.decision.plan.assignments == {"evaluation": 3}
    assert sorted(slot for grant in found.grants for slot in grant.slots) == [1, 2]


def test_training_takes_the_emptiest_node_and_evaluation_the_fullest() -> None:
    nodes = (NodeView(name="a", slots=4, usable=True), NodeView(name="b", slots=4, usable=True))
    other = Lease(id="x", token=1, holder="job:x", node="a", slots=(0,), granted=0.0, expires=9.0, ttl=9.0)
    demands = (training("x", {1: 1e9}, max_slots=1, feasible=(1,)), training("y", {3: 1e9}, min_slots=3, feasible=(3,)))
    small = dataclasses.replace(evaluation(), max_slots=1)
    found = allocate(ClusterView(nodes=nodes, demands=(*demands, small), leases=(other,)), 0.0, CostAware())
    where = {grant.holder.split(":")[0] + grant.holder[-2:]: grant.node for grant in found.grants}
    assert {node for holder, node in where.items() if holder.startswith("job")} == {"b"}
    assert {node for holder, node in where.items() if holder.startswith("evaluation")} == {"b"}, (
        "one slot is left there"
    )


def test_it_drives_the_allocation_and_settles() -> None:
    planner = CostAware()
    demands = (training("a"), evaluation())
    first = allocate(view(*demands, slots=4), 0.0, planner)
    assert {grant.holder.split(":")[0] for grant in first.grants} == {"job", "evaluation"}
    leases = tuple(
        dataclasses.replace(lease(grant.holder, number), slots=grant.slots) for number, grant in enumerate(first.grants)
    )
    again = allocate(dataclasses.replace(view(*demands, slots=4, leases=leases), trigger=Trigger.TIMER), 0.0, planner)
    assert again.idle
