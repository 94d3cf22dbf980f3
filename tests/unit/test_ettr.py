"""The account of a job's time: each part where it belongs, and all of them the wall."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ettr import LOSSES, account
from planner.events import Action, Event, JobState


def event(time: float, action: Action, new: JobState | None = None, **details: Any) -> Event:
    return Event(time=time, action=action, new=new.value if new else None, job="j", incarnation=1, details=details)


def line(step: int, seconds: float, workers: int = 4, **more: Any) -> dict[str, Any]:
    return {"step": step, "seconds": seconds, "workers": workers, "incarnation": 1, "loss": 1.0} | more


def total(result: Any) -> float:
    return result.effective + sum(result.losses.values())


START = [
    event(100.0, Action.JOB_SUBMITTED),
    event(105.0, Action.JOB_STATE, JobState.STARTING),
    event(109.0, Action.INCARNATION_STARTED),
    event(111.0, Action.CHECKPOINT_LOADED),
    event(114.0, Action.STEP_COMPLETED, step=1),
]


def test_an_undisturbed_run() -> None:
    steps = [line(1, 3.0), *[line(step, 1.0) for step in range(2, 11)]]
    events = [*START, event(123.0, Action.JOB_STATE, JobState.DONE)]
    result = account(events, steps, now=999.0)
    assert result.wall == 18.0, "from the first start to the end, not to now"
    assert result.effective == 10.0
    assert result.losses["start"] == 4.0 + 2.0
    assert result.losses["load"] == 2.0
    assert total(result) == pytest.approx(result.wall, abs=1e-9)
    assert result.ettr == pytest.approx(10 / 18)


def test_a_fault_healed_in_place() -> None:
    events = [
        *START,
        event(120.2, Action.FAULT_INJECTED),
        event(120.5, Action.FAULT_DETECTED),
        event(120.5, Action.JOB_STATE, JobState.HEALING),
        event(120.6, Action.DECISION),
        event(120.6, Action.REFORM_STARTED),
        event(121.6, Action.REFORM_COMPLETED),
        event(123.6, Action.STEP_COMPLETED, step=8),
        event(123.6, Action.JOB_STATE, JobState.RUNNING),
        event(125.2, Action.JOB_STATE, JobState.DONE),
    ]
    steps = [line(step, 1.0) for step in range(1, 8)] + [line(8, 1.6, 3, redo_seconds=0.6), line(9, 1.5, 3)]
    result = account(events, steps, now=130.0)
    assert result.losses["detect"] == pytest.approx(0.3)
    assert result.losses["decide"] == pytest.approx(0.1)
    assert result.losses["reallocate"] == pytest.approx(1.0)
    assert result.losses["redo"] == pytest.approx(0.6)
    assert result.losses["degraded"] > 0
    assert total(result) == pytest.approx(result.wall, abs=1e-9)


def test_a_roll_back_counts_the_lost_steps_as_redone() -> None:
    events = [
        *START,
        event(118.0, Action.FAULT_DETECTED, occurred=117.5),
        event(118.1, Action.DECISION),
        event(118.2, Action.JOB_STATE, JobState.STARTING),
        event(120.0, Action.INCARNATION_STARTED),
        event(121.0, Action.CHECKPOINT_LOADED),
        event(123.0, Action.STEP_COMPLETED, step=2),
        event(130.0, Action.JOB_STATE, JobState.DONE),
    ]
    steps = [line(step, 1.0) for step in (1, 2, 3, 4)] + [line(step, 1.0) for step in (2, 3, 4, 5)]
    result = account(events, steps, now=130.0)
    assert result.steps_kept == 5
    assert result.losses["redo"] == pytest.approx(3.0)
    assert result.losses["detect"] == pytest.approx(0.5)
    assert total(result) == pytest.approx(result.wall, abs=1e-9)


def test_waiting_and_pausing() -> None:
    events = [
        *START,
        event(120.0, Action.JOB_STATE, JobState.PAUSED),
        event(150.0, Action.JOB_STATE, JobState.STARTING),
        event(155.0, Action.JOB_STATE, JobState.WAITING),
    ]
    result = account(events, [line(1, 1.0)], now=165.0)
    assert result.losses["waiting"] == 40.0


def test_stalls_are_taken_from_the_stepping_time() -> None:
    events = [
        *START,
        event(116.0, Action.SNAPSHOT_TAKEN, stall_seconds=0.5),
        event(118.0, Action.CHECKPOINT_SAVED, stall_seconds=1.0),
    ]
    result = account(events, [line(step, 1.0) for step in range(1, 4)], now=119.0)
    assert result.losses["checkpoint_stall"] == pytest.approx(1.5)


def test_a_job_that_never_started_has_an_empty_account() -> None:
    result = account([START[0]], [], now=200.0)
    assert (result.wall, result.ettr, total(result)) == (0.0, 0.0, 0.0)
    assert set(result.losses) == set(LOSSES)


def test_a_replacement_that_starts_in_the_background_is_no_loss_of_its_own() -> None:
    background = event(118.0, Action.RANK_STARTED)
    steps = [line(step, 1.0, 4) for step in range(1, 8)]
    ends = event(120.0, Action.JOB_STATE, JobState.DONE)
    assert account([*START, background, ends], steps, 120.0) == account([*START, ends], steps, 120.0)


moments = st.floats(0.0, 1000.0, allow_nan=False)
some_events = st.builds(
    lambda time, action, new, occurred, stall: event(
        time,
        action,
        new if action == Action.JOB_STATE else None,
        **({"occurred": occurred} if occurred is not None else {}),
        **({"stall_seconds": stall} if stall is not None else {}),
        step=3,
    ),
    moments,
    st.sampled_from(list(Action)),
    st.sampled_from(list(JobState)),
    st.none() | moments,
    st.none() | st.floats(0, 50),
)
some_lines = st.builds(
    line,
    st.integers(1, 30),
    st.floats(0.0, 20.0),
    st.integers(1, 4),
    redo_seconds=st.none() | st.floats(0, 3),
)


@given(st.lists(some_events, max_size=40), st.lists(some_lines, max_size=40), moments)
def test_whatever_the_events_the_parts_are_not_negative_and_sum_to_the_wall(
    events: list[Event], lines: list[dict[str, Any]], now: float
) -> None:
    events.append(event(0.0, Action.JOB_STATE, JobState.STARTING))
    result = account(events, lines, now)
    assert set(result.losses) == set(LOSSES)
    assert all(seconds >= 0 for seconds in result.losses.values())
    assert result.effective >= 0
    assert 0 <= result.ettr <= 1 + 1e-9
    assert math.isclose(total(result), result.wall, rel_tol=1e-9, abs_tol=1e-6)
    assert result.wall <= now


def test_the_account_of_a_preempted_job_goes_on_when_it_is_submitted_again() -> None:
    def state(time: float, old: JobState, new: JobState) -> Event:
        return Event(time=time, action=Action.JOB_STATE, old=old, new=new)

    events = [
        state(0.0, JobState.WAITING, JobState.STARTING),
        state(1.0, JobState.STARTING, JobState.RUNNING),
        state(11.0, JobState.RUNNING, JobState.PREEMPTED),
    ]
    assert account(events, [], 100.0).wall == 11.0
    events += [
        state(31.0, JobState.PREEMPTED, JobState.QUEUED),
        state(32.0, JobState.QUEUED, JobState.STARTING),
        state(33.0, JobState.STARTING, JobState.RUNNING),
        state(40.0, JobState.RUNNING, JobState.DONE),
    ]
    found = account(events, [], 100.0)
    assert found.wall == 40.0
    assert found.losses["waiting"] == 21.0
