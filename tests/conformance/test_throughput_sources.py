"""What every source of throughput must do, and how measurements refine the model."""

from __future__ import annotations

import json
import math

import pytest

from planner.throughput import (
    AnalyticSource,
    MeasuredTable,
    Rate,
    RefinedSource,
    ThroughputSource,
    candidate_counts,
    profile,
)
from planner.throughput_model import A100, ModelShape, Training
from planner.types import Layout

SHAPE = ModelShape(layers=24, hidden=2048, ffn_hidden=8192, heads=16, kv_heads=16, seq_length=2048, vocab=51200)
MODEL = AnalyticSource(SHAPE, Training(global_batch=256), A100)
MEASURED = MeasuredTable().record(8, 2.0, 3e15, layout=Layout(1, 1, 8)).record(16, 2.0, 5e15, layout=Layout(1, 1, 16))
SOURCES = {"analytic": MODEL, "measured": MEASURED, "refined": RefinedSource(MEASURED, MODEL)}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_source_knows_positive_rates_or_says_that_it_does_not(source: ThroughputSource) -> None:
    assert source.rate(0) is None
    known = [count for count in range(1, 65) if source.rate(count)]
    assert {8, 16} <= set(known)
    for count in known:
        rate = source.rate(count)
        assert rate is not None
        assert math.isfinite(rate.flops)
        assert rate.flops > 0
        assert rate.layout is not None
        assert rate.layout.workers == count
    made = profile(source, range(1, 65))
    assert made.counts == tuple(known)
    assert made.rate(8) == source.rate(8).flops  # type: ignore[union-attr]
    assert made.layout(16) == source.rate(16).layout  # type: ignore[union-attr]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_source_gives_the_same_answer_twice(source: ThroughputSource) -> None:
    assert [source.rate(count) for count in (1, 8, 24)] == [source.rate(count) for count in (1, 8, 24)]


def test_a_measured_count_wins_and_its_neighbours_are_corrected() -> None:
    model = {count: MODEL.rate(count).flops for count in (4, 8, 12, 16, 32)}  # type: ignore[union-attr]
    slow = MeasuredTable().record(8, 1.0, model[8] * 0.5).record(16, 1.0, model[16] * 0.8)
    refined = RefinedSource(slow, MODEL)
    corrections = {count: refined.rate(count).flops / model[count] for count in model}  # type: ignore[union-attr]
    assert corrections[8] == pytest.approx(0.5)
    assert corrections[16] == pytest.approx(0.8)
    assert corrections[4] == pytest.approx(0.5), "constant below the measured counts"
    assert corrections[32] == pytest.approx(0.8), "and above"
    assert 0.5 < corrections[12] < 0.8
    assert RefinedSource(MeasuredTable(), MODEL).rate(4) == MODEL.rate(4)


def test_the_table_is_refined_as_steps_complete_and_forgets() -> None:
    table = MeasuredTable()
    for _ in range(50):
        table = table.record(2, 4.0, 1e12)
    assert table.rate(2) == Rate(2.5e11)
    for _ in range(1000):
        table = table.record(2, 2.0, 1e12)
    assert table.rate(2).flops == pytest.approx(5e11, rel=0.01)  # type: ignore[union-attr]
    once = table.record(2, 1000.0, 5e14, steps=500)
    assert once.rate(2) == Rate(5e11), "more steps than the window replace it"
    assert table.record(2, 1.0, 1e12, layout=Layout(2)).rate(2) == Rate(1e12, Layout(2)), "another layout starts anew"


def test_a_table_survives_json() -> None:
    assert MeasuredTable.from_json(json.loads(json.dumps(MEASURED.to_json()))) == MEASURED


NONSENSE = [(0, 1.0, 1.0, 1), (1, 0.0, 1.0, 1), (1, math.nan, 1.0, 1), (1, 1.0, math.inf, 1), (1, 1.0, 1.0, 0)]


@pytest.mark.parametrize(("workers", "seconds", "flops", "steps"), NONSENSE)
def test_nonsense_is_no_measurement(workers: int, seconds: float, flops: float, steps: int) -> None:
    with pytest.raises(ValueError, match="not a measurement"):
        MeasuredTable().record(workers, seconds, flops, steps)


def test_candidate_counts_are_few_and_in_whole_nodes_above_one() -> None:
    assert candidate_counts(1, 24, 8) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24]
    many = candidate_counts(8, 16384, 8)
    assert len(many) < 50
    assert all(count % 8 == 0 for count in many)
    assert many[0] == 8
    assert many[-1] == 16384
    assert candidate_counts(5, 4, 8) == []
