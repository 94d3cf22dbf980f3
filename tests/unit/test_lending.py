"""Lending: when reports are ready, what slots are worth, what a loan costs, and that nothing starves."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.lending import (
    Backlog,
    LendingPolicy,
    PendingReport,
    _counts,
    evaluation_values,
    horizon,
    lend,
    loan_cost,
    ready_times,
)
from planner.types import Job, ThroughputProfile

POLICY = LendingPolicy()


def report(seconds: float = 100.0, **more: float) -> PendingReport:
    base = PendingReport(name="r", slot_seconds=seconds, rate=1e15, probability=0.1)
    return replace(base, **more)  # type: ignore[arg-type]


def trainer(name: str = "train", **more: object) -> Job:
    rates = {1: 1.0e15, 2: 1.9e15, 3: 2.7e15, 4: 3.4e15}
    return replace(Job(name=name, profile=ThroughputProfile.of(rates), workers=4, transition_seconds=5.0), **more)  # type: ignore[arg-type]


def simulated(backlog: Backlog, slots: int, step: float = 0.01) -> list[float]:
    """T_i(k) by stepping through time."""
    resident = min(slots, backlog.resident)
    times, done, clock, target = [], 0.0, 0.0, 0.0
    for one in backlog.reports:
        target += one.slot_seconds
        while done < target - 1e-9:
            done += step * (slots if clock >= backlog.load_seconds else resident)
            clock += step
        start = 0.0 if resident else backlog.load_seconds
        times.append(max(clock, start + one.longest_seconds) + one.tail_seconds)
    return times


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_ready_times_are_those_of_a_simulated_fleet(resident: int) -> None:
    backlog = Backlog(
        reports=(report(30.0), report(55.0, tail_seconds=7.0), report(10.0, longest_seconds=40.0)),
        load_seconds=12.0,
        resident=resident,
    )
    for slots in (1, 2, 3, 5, 8):
        assert ready_times(backlog, slots) == pytest.approx(simulated(backlog, slots), abs=0.05)


def test_no_slot_never_finishes_and_more_slots_never_finish_later() -> None:
    backlog = Backlog(reports=(report(30.0), report(50.0)), load_seconds=20.0, resident=1)
    assert ready_times(backlog, 0) == [float("inf")] * 2
    lasts = [ready_times(backlog, slots)[-1] for slots in range(1, 9)]
    assert lasts == sorted(lasts, reverse=True)
    capped = replace(backlog, most_slots=2)
    assert ready_times(capped, 8) == ready_times(backlog, 2)


reports_st = st.lists(
    st.builds(
        PendingReport,
        name=st.just("r"),
        slot_seconds=st.floats(0, 500),
        rate=st.floats(0, 1e16),
        probability=st.floats(0, 1),
        tail_seconds=st.floats(0, 50),
        longest_seconds=st.floats(0, 100),
        waited_seconds=st.floats(0, 10_000),
    ),
    max_size=5,
)


@given(reports_st, st.floats(0, 60), st.integers(0, 4), st.floats(0, 900), st.integers(1, 8))
def test_the_value_of_k_slots_is_the_sum_over_reports(
    reports: list[PendingReport], load: float, resident: int, seconds: float, most_slots: int
) -> None:
    backlog = Backlog(reports=tuple(reports), load_seconds=load, resident=resident, most_slots=most_slots)
    values, needed = evaluation_values(backlog, 8, seconds, POLICY)
    assert values[0] == 0.0
    for slots in range(1, 9):
        expected = sum(
            (one.probability + one.waited_seconds / POLICY.ageing_seconds) * one.rate * (seconds - min(seconds, ready))
            for one, ready in zip(backlog.reports, ready_times(backlog, slots), strict=True)
        )
        assert values[slots] == pytest.approx(expected, rel=1e-9, abs=1e-3)
        answered = ready_times(
            replace(backlog, reports=tuple(replace(one, tail_seconds=0.0) for one in reports)), slots
        )
        assert needed[slots] == pytest.approx(min(seconds, max(answered, default=0.0)))
    assert (np.diff(values) >= -1e-6 * max(1.0, float(values.max()))).all(), "another slot never makes a report later"


def test_the_horizon_is_the_nearest_of_backlog_event_and_bound() -> None:
    backlog = Backlog(reports=(report(100.0),), resident=2)
    assert horizon(backlog, 2, float("inf"), POLICY) == 50.0
    assert horizon(backlog, 0, float("inf"), POLICY) == POLICY.horizon_bound
    assert horizon(backlog, 2, 20.0, POLICY) == 20.0
    assert horizon(Backlog(), 2, 20.0, POLICY) == 0.0


def test_a_loan_costs_the_rate_and_two_transitions_and_going_on_costs_no_new_one() -> None:
    job = trainer()
    assert loan_cost(job, 4, 3, 100.0) == pytest.approx((3.4e15 - 2.7e15) * 100 + (3.4e15 + 2.7e15) * 5)
    assert loan_cost(job, 4, 0, 100.0) == pytest.approx(3.4e15 * 100 + 3.4e15 * 5)
    assert loan_cost(job, 4, 4, 100.0) == 0.0
    lent = replace(job, workers=3)
    assert loan_cost(lent, 4, 3, 100.0) == pytest.approx((3.4e15 - 2.7e15) * 100)
    assert loan_cost(lent, 4, 2, 100.0) == pytest.approx((3.4e15 - 1.9e15) * 100 + 1.9e15 * 5)


def test_idle_slots_go_to_evaluation_for_nothing() -> None:
    plan = lend([trainer(workers=3)], {"train": 3}, Backlog(reports=(report(),)), slots=5, current=0)
    assert plan.assignments == {"train": 3}
    assert plan.evaluation == 2
    assert plan.cost == 0.0
    assert not plan.lent
    assert "all idle" in plan.reason


def test_without_a_backlog_nothing_is_lent() -> None:
    plan = lend([trainer()], {"train": 4}, Backlog(), slots=5, current=1)
    assert (plan.evaluation, plan.assignments) == (0, {"train": 4})
    assert plan.reason == "evaluation has no backlog"


def test_a_dear_report_is_worth_a_loan_and_a_cheap_one_is_not() -> None:
    urgent = Backlog(reports=(report(60.0, probability=0.9, rate=3.4e15),))
    plan = lend([trainer()], {"train": 4}, urgent, slots=4, current=0)
    assert plan.lent
    assert plan.evaluation == 4 - plan.assignments["train"] > 0
    assert plan.worth > plan.cost
    assert "lent by train 4 → " in plan.reason
    assert plan.alternatives[0].label.startswith("no slot to evaluation")
    assert plan.alternatives[0].cost == pytest.approx(plan.worth - plan.cost)
    idle = Backlog(reports=(report(60.0, probability=1e-4),))
    kept = lend([trainer()], {"train": 4}, idle, slots=4, current=0)
    assert (kept.evaluation, kept.assignments) == (0, {"train": 4})


@given(
    reports_st, st.floats(0, 60), st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.floats(60, 20000),
    st.sampled_from([0.0, 1e12, 3e14]),
)  # fmt: skip
@example([report(400.0, probability=0.5, rate=3e15), report(700.0, probability=0.9, rate=2e15, tail_seconds=20.0)],
         45.0, 0, 4, 3, 900.0, 0.0)  # fmt: skip
def test_the_lending_plan_is_the_best_of_all(
    reports: list[PendingReport], load: float, resident: int, of_a: int, of_b: int, bound: float, rent: float
) -> None:
    """Against trying everything; a long load makes the first slots worthless, so the value is not concave."""
    jobs = [trainer("a", workers=of_a), trainer("b", workers=of_b, transition_seconds=1.0)]
    planned = {"a": 4, "b": 3}
    backlog = Backlog(reports=tuple(reports), load_seconds=load, resident=resident)
    policy = LendingPolicy(horizon_bound=bound, slot_second_cost=rent)
    plan = lend(jobs, planned, backlog, slots=8, current=0, policy=policy)
    seconds = horizon(backlog, 0 if rent else 1, float("inf"), policy)
    assert plan.horizon == seconds
    values, needed = evaluation_values(backlog, 8 if reports else 0, seconds, policy)
    best = -float("inf")
    for a, b, k in itertools.product(range(5), range(4), range(len(values))):
        if a + b + k <= 8:
            cost = loan_cost(jobs[0], 4, a, float(needed[k])) + loan_cost(jobs[1], 3, b, float(needed[k]))
            best = max(best, float(values[k]) - float(needed[k]) * k * rent - cost)
    assert plan.worth - plan.cost == pytest.approx(best, rel=1e-9, abs=1e6)


def test_a_loan_is_paid_for_as_long_as_it_lasts() -> None:
    """A report that would wait for hours is worth minutes of a job's slots, whatever the horizon."""
    backlog = Backlog(reports=(report(120.0, probability=0.05, rate=3.4e15),))
    near, far = (lend([trainer()], {"train": 4}, backlog, slots=4, current=0, policy=LendingPolicy(horizon_bound=bound))
                 for bound in (300.0, 14400.0))  # fmt: skip
    assert not near.lent
    assert far.lent
    kept = far.assignments["train"]
    assert far.cost == pytest.approx(loan_cost(trainer(), 4, kept, 120.0 / far.evaluation))


def test_where_there_are_many_counts_some_are_weighed_and_the_present_one_among_them() -> None:
    assert _counts(16, 2, (5, 0)) == [5, 0, 2, 4, 6, 8, 10, 12, 14, 16]
    some = _counts(16384, 1, (777, 0, 3))
    assert some[:3] == [777, 0, 3]
    assert max(some) == 16384
    assert len(some) < 25
    assert len(set(some)) == len(some)


def test_a_loan_that_goes_on_is_not_called_back_by_its_own_transitions() -> None:
    backlog = Backlog(reports=(report(120.0, probability=0.8, rate=3.4e15),), resident=0)
    first = lend([trainer()], {"train": 4}, backlog, slots=4, current=0)
    assert first.lent
    later = replace(backlog, resident=first.evaluation)
    again = lend([trainer(workers=first.assignments["train"])], {"train": 4}, later, slots=4, current=first.evaluation)
    assert again.assignments == first.assignments
    assert again.evaluation == first.evaluation


def test_nothing_starves() -> None:
    """A report that is almost surely harmless gets a slot in the end, by ageing alone."""
    waited = 0.0
    while waited < 40 * POLICY.ageing_seconds:
        old = Backlog(reports=(report(60.0, probability=1e-6, waited_seconds=waited),))
        if lend([trainer()], {"train": 4}, old, slots=4, current=0).evaluation:
            break
        waited += POLICY.ageing_seconds / 4
    assert 0 < waited < 40 * POLICY.ageing_seconds


def test_rented_slots_are_not_taken_for_a_backlog_that_is_not_worth_them() -> None:
    backlog = Backlog(reports=(report(60.0, probability=0.01),))
    dear = LendingPolicy(slot_second_cost=1e16)
    assert lend([], {}, backlog, slots=4, current=0, policy=dear).evaluation == 0
    cheap = LendingPolicy(slot_second_cost=1e9)
    assert lend([], {}, backlog, slots=4, current=0, policy=cheap).evaluation > 0
