"""Events go to a line and come back; details cannot hide a field."""

from __future__ import annotations

import pytest

from planner.events import TERMINAL, Action, Event, JobState


def test_round_trip() -> None:
    event = Event(time=1.0, action=Action.JOB_STATE, job="j", old=JobState.RUNNING, new=JobState.HEALING,
                  reason="rank 1 died", details={"rank": 1})  # fmt: skip
    line = event.to_json()
    assert line["rank"] == 1
    assert Event.from_json(line) == event


def test_details_may_not_redefine_a_field() -> None:
    with pytest.raises(ValueError, match="reason"):
        Event(time=1.0, action=Action.JOB_STATE, details={"reason": "x"}).to_json()


def test_terminal_states_are_the_ended_ones() -> None:
    assert {state.value for state in TERMINAL} == {"done", "failed", "cancelled", "preempted"}
