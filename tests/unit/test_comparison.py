"""Comparison of checkpoints and the gate."""

from __future__ import annotations

import math
import random

import pytest

from evalsched.comparison import decide_gate, delta, independent_stderr, paired_stderr


def test_paired_errors_take_the_documents_own_difficulty_out() -> None:
    rng = random.Random(1)
    easy = [rng.random() * 10 for _ in range(100)]
    old, new = [v + rng.gauss(0, 0.1) for v in easy], [v + 0.5 + rng.gauss(0, 0.1) for v in easy]
    paired = paired_stderr(old, new)
    assert paired is not None
    assert paired < 0.02
    spread = math.sqrt(sum((v - sum(easy) / 100) ** 2 for v in easy) / 99 / 100)
    independent = independent_stderr(spread, spread)
    assert independent is not None
    assert independent > 10 * paired


def test_paired_ratio_of_equal_weights_is_that_of_the_means() -> None:
    rng = random.Random(2)
    old, new = [[rng.random() for _ in range(20)] for _ in range(2)]
    ratio = paired_stderr([(v, 1) for v in old], [(v, 1) for v in new])
    mean = paired_stderr(old, new)
    assert ratio is not None
    assert mean is not None
    assert math.isclose(ratio, mean)


@pytest.mark.parametrize(
    ("old", "new"), [([], []), ([1.0], [2.0]), ([1, 2], [1, 2, 3]), (["a", "b"], ["c", "d"]), ([(1, 0), (2, 0)],) * 2]
)
def test_what_cannot_be_paired_is_none(old: list[object], new: list[object]) -> None:
    assert paired_stderr(old, new) is None


@pytest.mark.parametrize(
    ("old", "new", "higher", "verdict"),
    [(0.5, 0.7, True, "better"), (0.5, 0.3, True, "worse"), (2.0, 1.5, False, "better"), (0.5, 0.51, True, "same")],
)
def test_verdicts_follow_the_metrics_direction(old: float, new: float, higher: bool, verdict: str) -> None:
    found = delta("t", "m", old, new, higher_is_better=higher, stderr=0.05, paired=True)
    assert found.verdict == verdict
    assert found.z is not None
    assert (found.z > 0) == (verdict in ("better", "same"))


def test_without_a_standard_error_there_is_no_verdict() -> None:
    assert delta("t", "m", 0.1, 0.9, higher_is_better=True, stderr=None, paired=False).z is None
    assert delta("t", "m", 0.5, 0.5, higher_is_better=True, stderr=0.0, paired=True).z == 0


def _fall(task: str, z: float) -> object:
    return delta(task, "acc", 0.5, 0.5 - 0.01 * z, higher_is_better=True, stderr=0.01, paired=True)


def test_the_gate_is_shared_over_the_tasks() -> None:
    alone = decide_gate([_fall("a", 2.5)], {})  # type: ignore[list-item]
    among = decide_gate([_fall("a", 2.5), *(_fall(f"t{n}", 0.0) for n in range(30))], {})  # type: ignore[list-item]
    assert (alone.verdict, among.verdict) == ("regress", "pass")
    assert alone.threshold < among.threshold
    assert decide_gate([_fall("a", 9.0), *(_fall(f"t{n}", 0) for n in range(30))], {}).verdict == "regress"  # type: ignore[list-item]


def test_many_even_checkpoints_raise_few_alarms() -> None:
    rng = random.Random(4)
    alarms = 0
    for _ in range(500):
        alarms += decide_gate([_fall(f"t{n}", rng.gauss(0, 1)) for n in range(20)], {}).verdict == "regress"  # type: ignore[list-item]
    assert alarms / 500 < 0.06


def test_a_task_that_broke_regresses_and_nothing_is_nothing() -> None:
    assert decide_gate([], {"t": "no number any more"}).verdict == "regress"
    assert decide_gate([], {}).verdict == "none"
