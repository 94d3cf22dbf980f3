"""Hangs and stragglers: found, named, and not invented."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.detection import Average, Kind, LearnedLimits, Monitor
from planner.pretrain_config import HealthLimits

HEALTH = HealthLimits(start_seconds=60, first_step_seconds=100, hang_floor_seconds=2)


def trained(step_seconds: float = 1.0, ranks: int = 4, steps: int = 10) -> tuple[Monitor, float]:
    monitor = Monitor(HEALTH)
    now = 0.0
    monitor.start(range(ranks), now)
    for rank in range(ranks):
        monitor.enter(rank, "first_step", 1, now)
    now += 50.0
    for step in range(1, steps + 1):
        now += step_seconds
        for rank in range(ranks):
            monitor.step_completed(rank, step, 50.0 if step == 1 else step_seconds, ranks, now, first=step == 1)
    return monitor, now


def test_a_hang_is_three_times_the_average_and_names_the_rank_that_is_least_far() -> None:
    monitor, now = trained(step_seconds=1.0)
    for rank in range(4):
        monitor.enter(rank, "step", 11, now, order=1 if rank == 2 else 5)
    assert monitor.hangs(now + 2.9, 4) == []
    found = monitor.hangs(now + 3.1, 4)
    assert [(finding.kind, finding.rank, finding.collective) for finding in found] == [(Kind.HANG, 2, None)]
    assert "rank 2" in found[0].reason
    assert monitor.hangs(now + 4, 4) == [], "once per incarnation"


def test_the_floor_holds_for_fast_steps() -> None:
    monitor, now = trained(step_seconds=0.01)
    assert monitor.hangs(now + 1.9, 4) == []
    assert len(monitor.hangs(now + 2.1, 4)) == 4


def test_where_all_are_equally_far_nobody_is_singled_out() -> None:
    monitor, now = trained()
    found = monitor.hangs(now + 10, 4)
    assert [finding.rank for finding in found] == [0, 1, 2, 3]
    assert all(finding.collective for finding in found)


def test_r1_long_saves_first_steps_and_validation_are_no_hangs() -> None:
    monitor, now = trained(step_seconds=0.2)
    for phase in ("save", "validate", "export"):
        for rank in range(4):
            monitor.enter(rank, phase, 11, now)
        assert monitor.hangs(now + 90, 4) == [], phase
    monitor.start(range(4), now, "first_step", 12)
    assert monitor.hangs(now + 99, 4) == []
    assert len(monitor.hangs(now + 101, 4)) == 4, "but not for ever"


def test_a_save_is_learned_and_then_has_a_limit_of_its_own() -> None:
    monitor, now = trained(step_seconds=0.2, ranks=2)
    for step in range(11, 16):
        for rank in range(2):
            monitor.enter(rank, "save", step, now)
        now += 2.0
        for rank in range(2):
            monitor.enter(rank, "step", step + 1, now)
    for rank in range(2):
        monitor.enter(rank, "save", 20, now)
    assert monitor.hangs(now + 17, 2) == []
    assert len(monitor.hangs(now + 19, 2)) == 2


def test_r2_a_slow_first_step_neither_disables_nor_widens_detection() -> None:
    monitor, now = trained(step_seconds=1.0)
    assert monitor.limits.average("step", 4) == 1.0
    assert len(monitor.hangs(now + 3.5, 4)) == 4


def test_r3_a_finding_comes_again_in_the_next_incarnation() -> None:
    monitor, now = trained()
    assert monitor.hangs(now + 10, 4)
    assert monitor.hangs(now + 11, 4) == []
    monitor.start(range(4), now + 20, "step", 11)
    assert len(monitor.hangs(now + 30, 4)) == 4


def test_fewer_ranks_are_slower_not_hung() -> None:
    monitor, now = trained(step_seconds=1.0, ranks=4)
    for step in range(11, 16):
        now += 5.0
        for rank in range(3):
            monitor.step_completed(rank, step, 5.0, 3, now, first=False)
    assert monitor.limits.hang_limit("step", 3) == 15.0
    assert monitor.limits.hang_limit("step", 4) == 3.0
    assert monitor.limits.hang_limit("step", 2) == 15.0, "a size never seen: the slowest known counts"


def test_a_dropped_rank_is_not_watched() -> None:
    monitor, now = trained(ranks=2)
    monitor.drop(1)
    assert [finding.rank for finding in monitor.hangs(now + 10, 1)] == [0]


def test_stragglers_are_named_by_their_own_work() -> None:
    monitor, now = trained()
    assert monitor.stragglers(11, {0: 1.0, 1: 1.0, 2: 1.05, 3: 1.0}, now) == []
    assert monitor.stragglers(12, {0: 1.0, 1: 1.0, 2: 1.2, 3: 1.0}, now) == [], "one slow step is noise"
    found = monitor.stragglers(13, {0: 1.0, 1: 1.0, 2: 1.2, 3: 1.0}, now)
    assert [(finding.kind, finding.rank) for finding in found] == [(Kind.STRAGGLER, 2)]
    assert monitor.stragglers(14, {0: 1.0, 1: 1.0, 2: 1.2, 3: 1.0}, now) == []


def test_a_clear_straggler_is_named_at_once_and_a_single_rank_never() -> None:
    monitor, now = trained()
    assert [f.rank for f in monitor.stragglers(11, {0: 0.2, 1: 1.2}, now)] == [1]
    assert monitor.stragglers(12, {0: 9.0}, now) == []


@given(st.lists(st.floats(0.001, 10.0), min_size=3, max_size=200))
def test_the_limit_is_never_below_the_floor_and_follows_the_average(durations: list[float]) -> None:
    limits = LearnedLimits(HEALTH)
    average = Average()
    for seconds in durations:
        limits.observe("step", seconds, 2)
        average = average.observe(seconds)
    limit = limits.hang_limit("step", 2)
    assert limit is not None
    assert limit == max(2.0, 3.0 * average.seconds)
    assert min(durations) * 0.999 <= average.seconds <= max(durations) * 1.001
    assert all(seconds <= limit for seconds in durations if seconds <= 3 * average.seconds)
