"""Retry, restart, isolate, give up; and what gives a budget back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.escalation import (
    Cure,
    Event,
    FaultSeen,
    HealFailed,
    Limits,
    RanksStarted,
    State,
    StepCompleted,
    decide,
)
from planner.severity import Severity


def fault(severity: Severity, **more: object) -> FaultSeen:
    given_fields = {"cause": "c", "node": "n0", "process_alive": True} | more
    return FaultSeen(severity=severity, **given_fields)  # type: ignore[arg-type]


def run(events: list[Event], state: State = State()) -> tuple[list[Cure | None], State]:
    cures = []
    for event in events:
        decision = decide(state, event)
        cures.append(decision.cure)
        state = decision.state
        assert decision.reason
    return cures, state


def test_a_failed_retry_becomes_a_restart_and_a_failed_restart_an_isolation() -> None:
    cures, _ = run([fault(Severity.SEV3)] * 6)
    assert cures == [Cure.RETRY] * 3 + [Cure.RESTART] * 2 + [Cure.ISOLATE]


def test_each_severity_starts_at_its_own_cure() -> None:
    assert run([fault(Severity.SEV3)])[0] == [Cure.RETRY]
    assert run([fault(Severity.SEV2)])[0] == [Cure.RESTART]
    assert run([fault(Severity.SEV1)])[0] == [Cure.ISOLATE]
    assert run([fault(Severity.STOP, final=True)])[0] == [Cure.GIVE_UP]


def test_a_stop_needs_the_same_root_twice_before_progress() -> None:
    key = fault(Severity.STOP, root="key_error")
    assert run([key, key])[0] == [Cure.RESTART, Cure.GIVE_UP]
    assert run([key, fault(Severity.STOP, root="type_error")])[0] == [Cure.RESTART, Cure.RESTART]
    assert run([key, StepCompleted(1), key])[0] == [Cure.RESTART, None, Cure.RESTART]
    kept = State.from_json(run([key])[1].to_json())
    assert run([key], kept)[0] == [Cure.GIVE_UP], "a new coordinator goes on counting"


def test_a_dead_process_cannot_be_retried() -> None:
    assert run([fault(Severity.SEV3, process_alive=False)])[0] == [Cure.RESTART]


def test_progress_gives_budgets_back_and_repeating_old_steps_does_not() -> None:
    spent = [StepCompleted(5), *[fault(Severity.SEV3)] * 3]
    assert run([*spent, StepCompleted(6), fault(Severity.SEV3)])[0][-1] == Cure.RETRY
    assert run([*spent, StepCompleted(4), StepCompleted(5), fault(Severity.SEV3)])[0][-1] == Cure.RESTART


def test_three_starts_without_progress_end_the_job_with_the_root_cause() -> None:
    crash = fault(Severity.SEV2, process_alive=False, can_heal=False, cause="exited_abnormally: signal 9")
    state = State()
    for _ in range(2):
        state = decide(state, RanksStarted()).state
        decision = decide(state, crash)
        assert decision.cure == Cure.RESTART_ALL
        state = decision.state
    state = decide(state, RanksStarted()).state
    decision = decide(state, crash)
    assert decision.cure == Cure.GIVE_UP
    assert "signal 9" in decision.reason
    fresh = decide(decide(state, StepCompleted(1)).state, crash)
    assert fresh.cure == Cure.RESTART_ALL, "one step of progress and the count starts anew"


def test_the_only_node_is_isolated_by_a_node_fault_alone() -> None:
    dead = fault(Severity.SEV2, process_alive=False, other_nodes=False)
    assert run([dead] * 4)[0] == [Cure.RESTART] * 4
    assert run([fault(Severity.SEV1, other_nodes=False)])[0] == [Cure.ISOLATE]


def test_healing_that_fails_falls_back_to_starting_all_ranks() -> None:
    assert run([RanksStarted(), HealFailed("time-out")])[0] == [None, Cure.RESTART_ALL]
    assert run([RanksStarted()] * 3 + [HealFailed("time-out")])[0][-1] == Cure.GIVE_UP


def test_nodes_have_budgets_of_their_own() -> None:
    cures, _ = run([fault(Severity.SEV2, node=f"n{index % 3}") for index in range(6)])
    assert cures == [Cure.RESTART] * 6


def test_state_survives_the_job_record() -> None:
    _, state = run([StepCompleted(3), fault(Severity.SEV2), fault(Severity.SEV3), RanksStarted()])
    assert State.from_json(state.to_json()) == state
    assert State.from_json({}) == State()


events = st.one_of(
    st.builds(
        fault,
        st.sampled_from(list(Severity)),
        node=st.sampled_from(["a", "b"]),
        process_alive=st.booleans(),
        can_heal=st.booleans(),
        other_nodes=st.booleans(),
    ),
    st.just(HealFailed("x")),
    st.builds(StepCompleted, st.integers(1, 5)),
)


@given(st.lists(events, max_size=60), st.integers(1, 5))
def test_without_progress_starts_are_bounded(stream: list[Event], allowed: int) -> None:
    limits = Limits(incarnations=allowed)
    state = decide(State(), RanksStarted(), limits).state
    since_progress = 1
    for event in stream:
        before = state.best_step
        decision = decide(state, event, limits)
        state = decision.state
        if state.best_step > before:
            since_progress = 0
        if decision.cure == Cure.RESTART_ALL:
            state = decide(state, RanksStarted(), limits).state
            since_progress += 1
        assert since_progress <= allowed
        assert state.best_step >= before
        if decision.cure == Cure.GIVE_UP:
            return
