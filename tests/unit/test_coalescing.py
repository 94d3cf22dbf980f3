"""When evaluation falls behind: which checkpoints are left out, and how far a limit is lowered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.coalescing import LEAST_LIMIT, PATIENCE, WaitingReport, interval, lowered_limit, skips

REPORTS = st.lists(
    st.tuples(st.integers(1, 10_000), st.floats(0.1, 500), st.booleans()), max_size=12, unique_by=lambda r: r[0]
)


def report(step: int, seconds: float = 100.0, begun: bool = False) -> WaitingReport:
    return WaitingReport(run=f"r{step}", step=step, seconds=seconds, begun=begun)


def test_nothing_is_skipped_while_evaluation_keeps_up() -> None:
    waiting = [report(10), report(20)]
    assert skips(waiting, 1, 100.0) == []
    assert skips(waiting, 1, None) == [], "with one checkpoint there is no pace to keep up with"
    assert [one.run for one in skips(waiting, 1, 99.0)] == ["r10"]


def test_what_is_left_is_spread_over_the_steps() -> None:
    waiting = [report(step) for step in (10, 20, 30, 40, 50, 60, 70)]
    left = {one.run for one in waiting} - {one.run for one in skips(waiting, 1, 200.0)}
    assert left == {"r20", "r40", "r60", "r70"}


@given(REPORTS, st.integers(1, 8), st.floats(0.1, 300))
def test_the_newest_and_what_was_begun_stay_and_no_more_goes_than_must(
    rows: list[tuple[int, float, bool]], slots: int, seconds: float
) -> None:
    waiting = [report(*row) for row in rows]
    chosen = [one.run for one in skips(waiting, slots, seconds)]
    by_run = {one.run: one for one in waiting}
    assert len(set(chosen)) == len(chosen)
    assert not any(by_run[name].begun for name in chosen)
    if waiting:
        assert max(waiting, key=lambda one: one.step).run not in chosen
    left = sum(one.seconds for one in waiting if one.run not in chosen)
    bound = PATIENCE * seconds * slots
    movable = [one for one in sorted(waiting, key=lambda one: one.step)[:-1] if not one.begun and one.run not in chosen]
    assert left <= bound or not movable
    if chosen:
        assert left + by_run[chosen[-1]].seconds > bound


def test_the_limit_is_halved_until_it_fits() -> None:
    assert lowered_limit(None, 400, 100.0, 0.0, 1, 60.0) is None
    found = lowered_limit(None, 400, 400.0, 0.0, 1, 60.0)
    assert found is not None
    assert found.limit == 100
    assert "100 documents per task instead of 400" in found.reason
    floor = lowered_limit(100, 400, 1e6, 1e6, 1, 60.0)
    assert floor is not None
    assert floor.limit >= LEAST_LIMIT
    assert lowered_limit(LEAST_LIMIT, 400, 1e6, 1e6, 1, 60.0) is None


def test_the_interval_is_the_middle_of_the_last_gaps() -> None:
    assert interval([5.0]) is None
    assert interval([0.0, 10.0, 20.0, 1000.0]) == 10.0
