"""What is a loss spike and what is not, and how far a run goes back for one."""

from __future__ import annotations

import math
import random

import pytest

from planner.loss_watch import LASTING, LossWatch, Spike


def course(steps: int, seed: int = 1, level: float = 2.5, noise: float = 0.03) -> list[tuple[int, float, float]]:
    """A healthy run: a fast fall in the warm-up, then a slow one, with noise; the gradient's norm falls too."""
    random_ = random.Random(seed)
    return [
        (step, level + 8.0 * math.exp(-step / 12) + random_.gauss(0, noise), 1.0 + 5 * math.exp(-step / 8))
        for step in range(1, steps + 1)
    ]


def found(lines: list[tuple[int, float, float]]) -> list[Spike]:
    watch = LossWatch()
    return [spike for line in lines if (spike := watch.feed(*line)) is not None]


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_with_its_warm_up_and_schedule_has_no_spike(seed: int) -> None:
    lines = course(300, seed)
    stepped = [(step, loss - (0.2 if step > 150 else 0.0), norm) for step, loss, norm in lines]  # the rate drops
    warmed = [(step, loss * (1.08 if 200 < step < 230 else 1.0), norm * 2) for step, loss, norm in stepped]
    assert found(lines) == found(stepped) == found(warmed) == []


def test_one_bad_batch_comes_back_and_is_no_spike() -> None:
    lines = course(100)
    lines[60] = (61, 9.0, 50.0)
    lines[62:64] = [(63, 9.0, 50.0), (64, 7.0, 50.0)]
    assert found(lines) == []


def test_a_rise_that_lasts_is_found_at_its_third_step_and_once() -> None:
    lines = course(60) + [(step, 4.0, 1.0) for step in range(61, 90)]
    (spike,) = found(lines)
    assert (spike.first, spike.last) == (61, 60 + LASTING)


def test_a_gradient_that_explodes_counts_where_the_loss_rises_with_it() -> None:
    lines = course(60) + [(step, 2.95, 40.0) for step in range(61, 66)]
    (spike,) = found(lines)
    assert "gradient norm" in spike.reason
    assert found(course(60) + [(step, 2.5, 40.0) for step in range(61, 66)]) == []


def test_after_a_roll_back_the_same_steps_are_judged_anew() -> None:
    watch = LossWatch()
    for line in [*course(60), (61, 6.0, 1.0), (62, 6.0, 1.0)]:
        assert watch.feed(*line) is None
    assert watch.feed(63, 6.0, 1.0) is not None
    for line in course(60)[40:]:
        assert watch.feed(*line) is None, "it goes on at step 41 with other data"
    assert [watch.feed(step, 6.0, 1.0) is not None for step in (61, 62, 63)] == [False, False, True]


def test_missing_and_infinite_numbers_are_no_business_of_it() -> None:
    watch = LossWatch()
    watch.replay([(1, None, None), (2, math.nan, 1.0), *course(40)])
    assert watch.feed(41, math.inf, None) is None
