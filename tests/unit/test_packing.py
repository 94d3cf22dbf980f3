"""Which shard goes to which worker: newest first with ageing, residency, depth, second copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.packing import (
    AGEING_SECONDS,
    DEPTH,
    HOLD_SECONDS,
    Assignment,
    OutView,
    PendingShard,
    RunView,
    WorkerView,
    assign,
    piece_seconds,
    slots_wanted,
    urgency,
)


def run(name: str, created: float, *seconds: float, model: str = "", weight: float = 1.0) -> RunView:
    shards = tuple(PendingShard(shard=f"{name}-{n}", seconds=s) for n, s in enumerate(seconds))
    return RunView(run=name, created=created, model=model or name, pending=shards, weight=weight)


def test_no_worker_gets_more_than_the_depth() -> None:
    chosen = assign([run("a", 0, *[1.0] * 20)], [WorkerView(worker=w, model=None) for w in ("w1", "w2", "w3")], 1.0)
    assert len(chosen) == 3 * DEPTH
    assert len({one.shard for one in chosen}) == len(chosen)
    assert {one.worker for one in chosen} == {"w1", "w2", "w3"}


def test_a_full_worker_gets_nothing() -> None:
    full = WorkerView(
        worker="w", model="a", out=(OutView(run="a", shard="x", seconds=1), OutView(run="a", shard="y", seconds=1))
    )
    assert assign([run("a", 0, 1.0)], [full], 1.0) == []


def test_long_shards_go_first_and_to_the_idle_worker() -> None:
    busy = WorkerView(worker="busy", model="a", out=(OutView(run="a", shard="x", seconds=9),))
    chosen = assign([run("a", 0, 1.0, 5.0, 3.0)], [busy, WorkerView(worker="idle", model="a")], 1.0, depth=2)
    assert (chosen[0].worker, chosen[0].shard) == ("idle", "a-1")


def test_the_newest_checkpoint_goes_first() -> None:
    chosen = assign(
        [run("old", 0.0, 1.0), run("new", 500.0, 1.0)], [WorkerView(worker="w", model=None)], 500.0, depth=1
    )
    assert chosen[0].run == "new"


def test_nothing_starves_behind_newer_checkpoints() -> None:
    """A new checkpoint arrives all the time; the oldest is served in the end."""
    now, old = 0.0, run("old", 0.0, 1.0)
    while True:
        now += 60.0
        fresh = run("fresh", now, 1.0)
        if assign([old, fresh], [WorkerView(worker="w", model="fresh")], now, depth=1)[0].run == "old":
            break
        assert now < 3 * AGEING_SECONDS
    assert now > 600


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_urgency_falls_and_then_grows_without_bound(weight: float) -> None:
    one = run("a", 0.0, 1.0, weight=weight)
    values = [urgency(one, t) for t in (0.0, 60.0, 600.0, 5_000.0, 50_000.0)]
    assert values[0] == weight
    assert values[1] < values[0]
    assert values[3] > values[0]
    assert values[4] > values[3]


def test_a_resident_model_is_kept_where_urgency_is_close() -> None:
    runs = [run("a", 99.0, 1.0), run("b", 100.0, 1.0)]
    assert assign(runs, [WorkerView(worker="w", model="a")], 101.0, depth=1)[0].run == "a"
    assert assign(runs, [WorkerView(worker="w", model=None)], 101.0, depth=1)[0].run == "b"


def test_a_failed_shard_waits_and_goes_to_another_worker() -> None:
    failed = PendingShard(shard="s", seconds=1.0, attempts=1, after=10.0, last_worker="w1")
    view = RunView(run="a", created=0.0, model="a", pending=(failed,))
    workers = [WorkerView(worker="w1", model="a"), WorkerView(worker="w2", model="a")]
    assert assign([view], workers, 9.0) == []
    assert [one.worker for one in assign([view], workers, 10.0)] == ["w2"]
    assert [one.worker for one in assign([view], workers[:1], 10.0)] == ["w1"], "alone, it must take it itself"


@pytest.mark.parametrize("how", [{"attempts": 1, "last_worker": "w9"}, {"back": True}])
def test_what_came_back_from_a_worker_goes_first(how: dict[str, Any]) -> None:
    failed = PendingShard(shard="z", seconds=1.0, **how)
    others = tuple(PendingShard(shard=name, seconds=9.0, tail=100.0) for name in "abc")
    view = RunView(run="a", created=0.0, model="a", pending=(*others, failed))
    chosen = assign([view], [WorkerView(worker=name, model="a") for name in ("w1", "w2")], 10.0)
    assert chosen[0].shard == "z"


def test_what_a_dead_worker_had_begun_waits_behind_nothing() -> None:
    one = run("a", 0, 1.0, 1.0, 1.0)
    begun = replace(one.pending[1], attempts=1, last_worker="dead", after=1.0)
    given_back = replace(one.pending[2], back=True)
    one = replace(one, pending=(one.pending[0], begun, given_back))
    busy = WorkerView(worker="busy", model="a", out=(OutView(run="a", shard="x", seconds=9),))
    assert assign([one], [busy], 1.0) == [], "nothing else is put before it either"
    chosen = assign([one], [busy, WorkerView(worker="new", model="a")], 1.0)
    assert (chosen[0].worker, chosen[0].shard) == ("new", "a-1")
    later = assign([one], [busy], 1.0 + HOLD_SECONDS)
    assert [each.shard for each in later] == ["a-1"], "that worker may be waiting for what was lost"


def test_a_straggler_is_run_twice_only_when_nothing_else_is_left() -> None:
    late = OutView(run="a", shard="s", seconds=2.0, begun=1.0)
    workers = [WorkerView(worker="w1", model="a", out=(late,)), WorkerView(worker="w2", model="a")]
    assert assign([], workers, 3.0) == []
    (copy,) = assign([], workers, 60.0)
    assert (copy.worker, copy.shard, copy.second_copy) == ("w2", "s", True)
    assert not any(one.second_copy for one in assign([run("b", 0.0, 1.0)], workers, 60.0))
    twice = OutView(run="a", shard="s", seconds=2.0, begun=1.0, copies=2)
    assert assign([], [WorkerView(worker="w1", model="a", out=(twice,)), workers[1]], 60.0) == []


def test_what_waits_behind_something_long_is_run_by_an_idle_worker_too() -> None:
    out = (OutView(run="a", shard="long", seconds=60.0, begun=9.0), OutView(run="a", shard="next", seconds=5.0))
    workers = [WorkerView(worker="w1", model="a", out=out), WorkerView(worker="w2", model="a")]
    (copy,) = assign([], workers, 10.0)
    assert (copy.worker, copy.shard, copy.second_copy) == ("w2", "next", True)


def test_an_estimate_that_is_known_well_is_late_sooner_than_a_vague_one() -> None:
    def chosen(high: float) -> list[Assignment]:
        out = (OutView(run="a", shard="s", seconds=10.0, begun=1.0, high=high),)
        return assign([], [WorkerView(worker="w1", model="a", out=out), WorkerView(worker="w2", model="a")], 30.0)

    assert chosen(22.0)
    assert not chosen(60.0)


def test_long_metrics_go_first_even_where_their_inference_is_short() -> None:
    pending = (
        PendingShard(shard="quick metric", seconds=10.0),
        PendingShard(shard="programs", seconds=2.0, tail=40.0),
    )
    view = RunView(run="a", created=0.0, model="a", pending=pending)
    assert assign([view], [WorkerView(worker="w", model="a")], 1.0, depth=1)[0].shard == "programs"


def test_a_slow_worker_leaves_at_the_end_what_a_fast_one_finishes_sooner() -> None:
    busy = (OutView(run="a", shard="x", seconds=3.0),)
    workers = [
        WorkerView(worker="fast", model="a", speed=4.0, out=busy),
        WorkerView(worker="slow", model="a", speed=0.5),
    ]
    chosen = assign([run("a", 0.0, 10.0)], workers, 1.0)
    assert [(one.worker, one.shard) for one in chosen] == [("fast", "a-0")]
    much = assign([run("a", 0.0, *[10.0] * 30)], workers, 1.0)
    assert {one.worker for one in much} == {"fast", "slow"}, "while much is left, everybody works"


def test_pieces_get_finer_towards_the_end() -> None:
    assert piece_seconds(1000.0, 8.0, 5.0) == 5.0
    assert piece_seconds(16.0, 8.0, 5.0) == 1.0
    assert piece_seconds(0.1, 8.0, 5.0) == 0.5, "a tenth of the usual piece at the least"
    assert piece_seconds(0.1, 8.0, 5.0, finest=0.8) == 0.8
    view = RunView(run="a", created=0, model="a", usual=5.0, pending=(PendingShard(shard="s", seconds=6.0),))
    chosen = assign([view], [WorkerView(worker=f"w{n}", model="a") for n in range(3)], 1.0, depth=1)
    assert [one.seconds for one in chosen] == [pytest.approx(1.0), pytest.approx(5 / 6), pytest.approx(25 / 36)]
    failed = PendingShard(shard="s", seconds=6.0, attempts=1)
    (whole,) = assign([replace(view, pending=(failed,))], [WorkerView(worker="w", model="a")], 1.0)
    assert whole.seconds is None, "what failed keeps its id, so that its attempts are counted"


def test_a_worker_goes_on_with_the_prefix_that_it_holds() -> None:
    pending = tuple(PendingShard(shard=f"s{n}", seconds=5.0 - n / 10, group="ab"[n % 2]) for n in range(4))
    view = RunView(run="a", created=0, model="a", pending=pending)
    assert assign([view], [WorkerView(worker="w", model="a", group="b")], 1.0, depth=1)[0].shard == "s1"
    assert assign([view], [WorkerView(worker="w", model="a", group="c")], 1.0, depth=1)[0].shard == "s0"


def test_a_deadline_presses_when_it_needs_all_workers() -> None:
    old = replace(run("dated", 0.0, 100.0), deadline=1000.0)
    runs = [old, run("fresh", 700.0, 1.0)]
    workers = [WorkerView(worker="w", model=None)]
    assert assign(runs, workers, 700.0, depth=1)[0].run == "fresh"
    assert assign([old, run("fresh", 950.0, 1.0)], workers, 950.0, depth=1)[0].run == "dated"


def test_slots_follow_the_backlog() -> None:
    assert slots_wanted(0.0, 0, 8) == 0
    assert slots_wanted(1.0, 1, 8) == 1
    assert slots_wanted(300.0, 100, 8) == 8
    assert slots_wanted(300.0, 3, 8) == 3
    assert slots_wanted(90.0, 100, 8, target_seconds=30.0) == 3
