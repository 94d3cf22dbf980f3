"""The estimate of what is left: right within 30% after the first tenth, whatever the priors' error."""

from __future__ import annotations

import random

import pytest

from evalsched.pace import Pace
from evalsched.types import RequestId


def requests(scoring: int, generation: int) -> dict[RequestId, float]:
    rng = random.Random(1)
    found = {RequestId("loglikelihood", "a", n, 0, 0): rng.uniform(0.1, 1.0) for n in range(scoring)}
    return found | {RequestId("generate_until", "b", n, 0, 0): rng.uniform(0.1, 1.0) for n in range(generation)}


@pytest.mark.parametrize(("scoring", "generation"), [(200, 0), (0, 200), (150, 50), (50, 150)])
@pytest.mark.parametrize(("slow", "slower"), [(1.0, 1.0), (3.0, 3.0), (0.2, 5.0)])
def test_within_thirty_percent_after_the_first_tenth(scoring: int, generation: int, slow: float, slower: float) -> None:
    """Shards of both kinds are interleaved, as the feeding does it; each kind's estimates err by their own factor."""
    cost = requests(scoring, generation)
    truth = {one: cost[one] * (slower if one.request_type == "generate_until" else slow) for one in cost}
    pace, now = Pace(), 100.0
    pace.begin(cost)
    order = sorted(cost, key=lambda one: (one.doc_id // 5, one.request_type, one.doc_id))
    checked = 0
    for start in range(0, len(order), 5):
        shard = order[start : start + 5]
        seconds = sum(truth[one] for one in shard)
        now += seconds
        pace.closed(shard, now)
        pace.shard(shard, seconds)
        left = sum(truth[one] for one in order[start + 5 :])
        both = scoring == 0 or generation == 0 or start + 5 < 2 * min(scoring, generation)
        if 0.1 <= pace.share <= 0.9 and both:
            estimate = pace.left(1, now)
            assert estimate == pytest.approx(left, rel=0.3)
            assert pace.left(4, now) == pytest.approx(left / 4, rel=0.3)
            checked += 1
    assert checked > 5
    assert pace.share == pytest.approx(1.0)
    assert pace.left(1, now) == pytest.approx(0.0, abs=1e-6)


def test_loading_does_not_count_and_nothing_is_said_without_an_answer() -> None:
    cost = requests(100, 0)
    pace = Pace()
    pace.begin(cost)
    assert pace.left(1, 1000.0) is None
    ids = list(cost)
    pace.closed(ids[:10], 1000.0)
    assert pace.left(1, 1000.0) is None
    pace.closed(ids[10:30], 1020.0)
    expected = 20.0 / sum(cost[one] for one in ids[10:30]) * sum(cost[one] for one in ids[30:])
    assert pace.left(1, 1020.0) == pytest.approx(expected)
