"""Intervals: known values, honest ends, and what has none."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from evalsched.intervals import of_mean, of_metric, of_ratio, wilson


def test_wilson_at_the_ends_says_more_than_zero() -> None:
    none, all_ = wilson(0, 20), wilson(20, 20)
    assert (none.low, round(none.high, 4)) == (0.0, 0.1611)
    assert (round(all_.low, 4), all_.high) == (0.8389, 1.0)


def test_wilson_textbook_value() -> None:
    found = wilson(81, 263)  # Newcombe 1998, table I, method 3: 0.2553 to 0.3662
    assert (round(found.low, 4), round(found.high, 4)) == (0.2553, 0.3662)


@pytest.mark.parametrize(("successes", "n"), [(-1, 5), (6, 5), (0, 0)])
def test_wilson_refuses_what_is_no_proportion(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        wilson(successes, n)


def test_mean_agrees_with_the_statistics_module() -> None:
    values = [0.1, 0.9, 0.4, 0.7]
    found = of_mean(values)
    assert found is not None
    assert math.isclose(found.stderr, statistics.stdev(values) / 2)


def test_ratio_of_equal_weights_is_the_mean() -> None:
    values = [random.Random(n).random() for n in range(30)]
    ratio, mean = of_ratio([(v, 1.0) for v in values]), of_mean(values)
    assert ratio is not None
    assert mean is not None
    assert math.isclose(ratio.stderr, mean.stderr)
    assert math.isclose(ratio.low, mean.low)


def test_ratio_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    hits = 0
    for _ in range(400):
        pairs = [(w * 1.5 + rng.gauss(0, 20), w) for w in (rng.randrange(500, 1500) for _ in range(60))]
        found = of_ratio(pairs)
        assert found is not None
        hits += found.low <= 1.5 <= found.high
    assert 0.92 <= hits / 400 <= 0.98


def test_bits_per_byte_and_perplexity_follow_from_each_other() -> None:
    pairs = [(-700.0 - n, 1000) for n in range(10)]
    bits = of_metric("bits_per_byte", pairs)
    perplexity = of_metric("weighted_perplexity", pairs)
    assert bits is not None
    assert perplexity is not None
    assert math.isclose(2**bits.low, perplexity.low)
    assert math.isclose(2**bits.high, perplexity.high)
    assert bits.low < 704.5 / 1000 / math.log(2) < bits.high


def test_what_has_no_honest_interval_has_none() -> None:
    assert of_metric("bleu", [1, 2, 3]) is None
    assert of_metric("mean", []) is None
    assert of_metric("mean", [0.5, math.inf]) is None
    assert of_metric("mean", ["a"]) is None
    assert of_metric("bits_per_byte", [(-5.0, 10)]) is None
    assert of_metric("bits_per_byte", [1.0, 2.0]) is None


def test_a_mean_of_zeros_and_ones_is_a_proportion() -> None:
    found = of_metric("mean", [True, False, 1, 0.0])
    assert found is not None
    assert (found.method, found.n) == ("wilson", 4)
