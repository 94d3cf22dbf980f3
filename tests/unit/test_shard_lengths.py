"""Shards are cut to the length that was asked for, and cut anew once it shows that they are not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evalsched.runs import RECUT_SHARDS, SHARDS_PER_WORKER, Run, RunSpec
from evalsched.types import EvalSettings, Request

ESTIMATE = 5.0
"""Estimated seconds of each document."""


def begun(documents: int, workers: int = 1) -> tuple[Run, list[Request]]:
    """A run that was cut by its estimates."""
    requests = [
        Request(request_type="loglikelihood", task="t", doc_id=n, idx=0, occurrence=0, arguments=("a", "b"), digest="")
        for n in range(documents)
    ]
    spec = RunSpec(model="m", settings=EvalSettings(tasks=("t",)), output=str(Path()), created=time.time())
    run = Run(spec=spec, id="r")
    run.open = {request.id for request in requests}
    run.pace.begin(dict.fromkeys(run.open, ESTIMATE))
    run.cut(requests, workers)
    return run, requests


def finish(run: Run, shards: int, truth: float, workers: int = 1) -> None:
    """Shards end after ``truth`` seconds per document."""
    for name in list(run.waiting)[:shards]:
        shard = run.waiting.pop(name).shard
        run.answered([request.id for request in shard.requests], now=100.0)
        run.pace.shard((request.id for request in shard.requests), truth * len(shard.requests))
    run.recut(workers)


def lengths(run: Run) -> list[int]:
    return [len(one.shard.requests) for one in run.waiting.values()]


def test_as_long_as_asked_for_and_some_for_each_worker() -> None:
    run, requests = begun(100)
    assert set(lengths(run)) == {1}, "5 s of documents of 5 s"
    assert len(begun(9, workers=1)[0].waiting) >= SHARDS_PER_WORKER
    assert sum(lengths(run)) == len(requests)


@pytest.mark.parametrize("truth", [0.4, 0.1])
def test_far_too_short_ones_are_joined(truth: float) -> None:
    run, requests = begun(400)
    finish(run, RECUT_SHARDS, truth)
    found = lengths(run)
    assert sum(found) == len(requests) - RECUT_SHARDS
    assert all(0.6 * 5.0 <= count * truth <= 5.0 + truth for count in found), found
    waiting = [request.id for one in run.waiting.values() for request in one.shard.requests]
    assert set(waiting) == run.open
    assert len(waiting) == len(run.open)
    finish(run, 4, truth)
    assert lengths(run) == found[4:], "nothing changes while the lengths are right"


def test_far_too_long_ones_are_cut() -> None:
    run, _ = begun(400)
    finish(run, RECUT_SHARDS, 0.05)
    long = max(lengths(run))
    finish(run, 1, 20.0)
    assert max(lengths(run)) < long / 2


def test_estimates_that_are_about_right_and_too_few_measurements_change_nothing() -> None:
    for shards, truth in ((RECUT_SHARDS, 3.0), (RECUT_SHARDS, 6.0), (RECUT_SHARDS - 1, 0.1)):
        run, _ = begun(50)
        names = list(run.waiting)
        finish(run, shards, truth)
        assert list(run.waiting) == names[shards:]


def test_what_failed_or_came_back_keeps_its_name_and_count() -> None:
    run, _ = begun(50)
    failed, back = list(run.waiting)[-2:]
    run.waiting[failed].attempts, run.waiting[back].back = 2, True
    finish(run, RECUT_SHARDS, 0.1)
    assert run.waiting[failed].attempts == 2
    assert run.waiting[back].back
    assert len(run.waiting) < 10


def test_shards_that_take_no_time_and_a_run_with_nothing_left() -> None:
    run, _ = begun(50)
    finish(run, RECUT_SHARDS, 0.0)
    assert 0 < len(run.waiting) <= SHARDS_PER_WORKER
    assert run.view().finest > 0
    usual = run.usual
    finish(run, len(run.waiting), 50.0)
    assert run.waiting == {}
    assert run.usual == usual, "nothing was cut"
