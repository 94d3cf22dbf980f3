"""WAF and the objective, by hand-computed numbers and by their definition."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planner.errors import BadInputError
from planner.objective import objective, options, price, slot_cost, spare_values, transition_cost, waf
from planner.solver import solve
from planner.types import Cluster, ClusterEvent, Job, Layout, Plan, Slot, ThroughputProfile, Trigger

RATES = {8: 1.0e15, 16: 1.9e15, 32: 3.2e15}
CLUSTER = Cluster(gpus=32, mtbf_gpu_hours=12000)


def job(**more: object) -> Job:
    base = Job(name="a", profile=ThroughputProfile.of(RATES), min_workers=8, workers=8, transition_seconds=120.0)
    return replace(base, **more)  # type: ignore[arg-type]


def test_d_running_is_the_mean_time_to_the_next_failure_of_the_cluster() -> None:
    assert CLUSTER.running_seconds == 12000 * 3600 / 32 == 1_350_000.0


def test_f_is_weight_times_throughput_at_listed_counts_from_the_minimum_on() -> None:
    assert job(weight=2.0).rate(16) == 3.8e15
    assert job().rate(9) == 0.0
    assert job().rate(0) == 0.0
    assert job(min_workers=9).rate(8) == 0.0


def test_the_objective_by_hand() -> None:
    grown = objective(CLUSTER, [job()], {"a": 16})
    assert grown == 1.9e15 * 1_350_000.0 - 1.0e15 * 120.0
    assert objective(CLUSTER, [job()], {"a": 8}) == 1.0e15 * 1_350_000.0
    assert objective(CLUSTER, [job(faulted=True)], {"a": 8}) == 1.0e15 * 1_350_000.0 - 1.0e15 * 120.0
    assert objective(CLUSTER, [job(workers=9)], {"a": 16}) == 1.9e15 * 1_350_000.0, (
        "an unlisted present count has no rate"
    )


def test_price_counts_only_together_with_what_a_flop_is_worth() -> None:
    rented = replace(CLUSTER, price_per_gpu_hour=2.0)
    assert slot_cost(16, rented) == 0.0
    assert slot_cost(16, replace(CLUSTER, flop_value=1e17)) == 0.0
    both = replace(rented, flop_value=1e17)
    assert slot_cost(16, both) == 16 * 2.0 * 1_350_000.0 / 3600 * 1e17
    assert price(job(), 16, both).value == 1.9e15 * 1_350_000.0 - 1.0e15 * 120.0 - slot_cost(16, both)


def test_a_price_above_every_gain_leaves_slots_unrented() -> None:
    dear = replace(CLUSTER, price_per_gpu_hour=2.0, flop_value=1.0e18)
    plan = solve(dear, [job()])
    assert plan.assignments == {"a": 0}
    assert plan.objective == -1.0e15 * 120.0, "stopping a running job is a transition too"
    middle = solve(replace(dear, flop_value=1.5e17), [job()])
    assert middle.assignments == {"a": 16}
    assert middle.unassigned == 16


def test_the_sum_is_taken_in_the_order_of_the_jobs() -> None:
    rates = (0.1, 1e16, -0.0, 3e-5)
    jobs = [Job(name=str(i), profile=ThroughputProfile.of({1: abs(rate)})) for i, rate in enumerate(rates)]
    total = 0.0
    for one in jobs:
        total += price(one, 1, CLUSTER).value
    assert objective(CLUSTER, jobs, dict.fromkeys("0123", 1)) == total
    assert waf(jobs, {"0": 1, "1": 1}) == 0.1 + 1e16


def test_options_list_zero_and_the_feasible_counts_that_fit() -> None:
    small = replace(CLUSTER, gpus=20)
    assert options(job(), small).counts.tolist() == [0, 8, 16]
    assert options(job(min_workers=9), small).counts.tolist() == [0, 16]
    assert options(job(), small).changed.tolist() == [True, False, True]
    assert options(job(faulted=True), small).changed.tolist() == [True, False, True]


def test_a_value_beyond_floating_point_is_refused() -> None:
    with pytest.raises(BadInputError, match="job a: weight × throughput"):
        options(job(weight=1e300), CLUSTER)


def test_a_transition_is_charged_for_a_change_or_a_fault_at_the_present_rate() -> None:
    assert transition_cost(job(), 8) == 0.0
    assert transition_cost(job(), 0) == 1.0e15 * 120.0
    assert transition_cost(job(faulted=True), 8) == 1.0e15 * 120.0
    assert transition_cost(job(workers=0), 8) == 0.0


def test_a_spare_is_kept_only_while_it_is_worth_more_than_its_use() -> None:
    jobs = [job(workers=16)]
    kept = solve(replace(CLUSTER, spare_values=(1e22,)), jobs)
    assert kept.assignments == {"a": 16}
    assert kept.objective == objective(CLUSTER, jobs, {"a": 16}) + 1e22
    assert solve(replace(CLUSTER, spare_values=(1e18,)), jobs).assignments == {"a": 32}
    assert solve(replace(CLUSTER, spare_values=(0.0, 0.0)), jobs).assignments == solve(CLUSTER, jobs).assignments


def test_the_worth_of_spares_falls_and_is_what_a_failure_would_cost() -> None:
    jobs = [job(workers=16)]
    values = spare_values(CLUSTER, jobs, repair_seconds=86400.0, most=3)
    mean = 86400.0 / CLUSTER.running_seconds
    saved = (1.9e15 - 1.0e15) * 86400.0
    assert values[0] == pytest.approx(saved * (1 - math.exp(-mean)))
    assert values[1] == pytest.approx(saved * (1 - math.exp(-mean) * (1 + mean)))
    assert list(values) == sorted(values, reverse=True)
    assert spare_values(CLUSTER, jobs, 86400.0, most=16, lost=8)[:8] == (0.0,) * 7 + (pytest.approx(values[0]),)
    assert spare_values(CLUSTER, [job(workers=0)], 86400.0, 3) == ()
    assert spare_values(CLUSTER, jobs, 0.0, 3) == ()


def test_types_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="ascend"):
        ThroughputProfile((8, 4), (1.0, 2.0))
    with pytest.raises(ValueError, match="positive"):
        ThroughputProfile((0,), (1.0,))
    with pytest.raises(ValueError, match="one rate"):
        ThroughputProfile((1, 2), (1.0,))
    with pytest.raises(ValueError, match="node"):
        Slot.parse("n2")
    assert Slot.parse("rack/n2/1") == Slot("rack/n2", 1)
    assert Layout(2, 3, 4).workers == 24
    assert ThroughputProfile.of({4: 1.0}, {4: Layout(4)}).layout(4) == Layout(4)
    assert ThroughputProfile.of({4: 1.0}).layout(4) is None


def test_an_event_changes_cluster_and_jobs() -> None:
    event = ClusterEvent(trigger=Trigger.NODE_LOST, slots=-8, faulted=frozenset({"a"}))
    cluster, (after,) = event.apply(CLUSTER, (job(),))
    assert cluster.gpus == 24
    assert after.faulted
    assert Plan({"a": 8}, 16, 1.0).slots == 8
