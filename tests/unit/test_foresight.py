"""The loop's decision: the table is built in the background and answers as solving would."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from planner.allocation import ClusterView, NodeView
from planner.allocator_settings import SETTINGS_FILE, SettingsWatch, read_settings
from planner.arrivals import Arrivals
from planner.cost_aware import CostAware, CostSettings, held_slots, training_jobs
from planner.demand import Demand
from planner.errors import BadInputError
from planner.foresight import Foresight
from planner.leases import Lease


def demand(name: str, **more: object) -> Demand:
    rates = {1: 1.0e9, 2: 1.8e9, 3: 2.4e9}
    return dataclasses.replace(Demand(f"job:{name}", "pretrain", 1.0, 1, 3, (1, 2, 3), rates, 2.0), **more)  # type: ignore[arg-type]


def lease(holder: str, index: int) -> Lease:
    return Lease(
        id=f"l{index}", token=index + 1, holder=holder, node="n", slots=(index,), granted=0.0, expires=9.0, ttl=10.0
    )


def view(*demands: Demand, slots: int = 4, leases: tuple[Lease, ...] = ()) -> ClusterView:
    return ClusterView(nodes=(NodeView(name="n", slots=slots, usable=True),), demands=demands, leases=leases)


RUNNING = (lease("job:a", 0), lease("job:a", 1), lease("job:b", 2), lease("job:b", 3))


def test_the_next_event_is_answered_from_the_table_as_by_solving() -> None:
    foresight = Foresight(CostSettings(gpus_per_node=1))
    try:
        now = view(demand("a"), demand("b"), leases=RUNNING)
        first = foresight(now, 0.0)
        foresight._thread.submit(lambda: None).result(timeout=60)  # the build was queued before this
        table = foresight.table
        assert table is not None
        struck = view(demand("a", faulted=True), demand("b"), leases=RUNNING)
        assert foresight(struck, 0.0).decision.plan == CostAware()(struck, 4).plan
        assert table.answer_for_state(*next(iter(table.by_state))) is not None
        assert first.decision.plan.assignments == {"job:a": 2, "job:b": 2}
    finally:
        foresight.close()


def test_a_job_like_the_last_one_that_came_is_answered_from_the_table() -> None:
    foresight = Foresight(CostSettings(gpus_per_node=1))
    try:
        foresight(view(demand("a"), leases=()), 0.0)
        running = RUNNING[:2]
        foresight._thread.submit(lambda: None).result(timeout=60)
        foresight(view(demand("a", throughput={2: 1.7e9}), leases=running), 1.0)
        foresight._thread.submit(lambda: None).result(timeout=60)
        table = foresight.table
        assert table is not None
        came = view(demand("a", throughput={2: 1.7e9}), demand("b"), leases=running)
        jobs = training_jobs(came, held_slots(came), {})
        found = table.answer_for_state(table.cluster, jobs)
        assert found is not None
        assert (
            found.plan == CostAware(CostSettings(gpus_per_node=1))(came, 4).plan == foresight(came, 2.0).decision.plan
        )
        assert found.plan.assignments["job:b"] > 0
    finally:
        foresight.close()


def test_the_likeliest_arrival_is_the_commonest_and_the_newest_in_a_tie() -> None:
    arrivals = Arrivals()
    assert arrivals.likeliest(1.0) is None
    arrivals.note([demand("old")], {"job:old": 2})
    assert arrivals.likeliest(1.0) is None, "it was there before"
    small, large = demand("s", weight=1.0), demand("l", weight=9.0)
    arrivals.note([demand("old"), small], {})
    arrivals.note([demand("old"), small, large], {"job:s": 1})
    newest = arrivals.likeliest(1.0)
    assert newest is not None
    assert newest.weight == 9.0
    arrivals.note([demand("old"), large, dataclasses.replace(small, holder="job:s2")], {})
    commonest = arrivals.likeliest(1.0)
    assert commonest is not None
    assert (commonest.weight, commonest.workers) == (1.0, 0)
    arrivals.note([demand("other", faulted=True)], {})
    assert arrivals.likeliest(1.0) == commonest, "a job that heals did not come now"


def test_a_job_that_lost_its_leases_is_priced_at_what_it_had() -> None:
    foresight = Foresight()
    try:
        foresight(view(demand("a"), leases=RUNNING[:2]), 0.0)
        after = foresight(view(demand("a", faulted=True), slots=3, leases=RUNNING[:1]), 0.0)
        (price,) = after.decision.prices
        assert price.old == 2
        assert price.transition_cost == 1.8e9 * 2.0
        again = foresight(view(demand("a", faulted=True), slots=3, leases=RUNNING[:1]), 0.0)
        assert again.decision.prices[0].old == 2, "as long as the fault is not healed"
        healed = foresight(view(demand("a"), slots=3, leases=RUNNING[:1]), 0.0)
        assert healed.decision.prices[0].old == 1
    finally:
        foresight.close()


def test_an_unchanged_state_is_not_planned_twice_and_close_ends_the_thread() -> None:
    before = threading.active_count()
    foresight = Foresight()
    now = view(demand("a"), leases=RUNNING[:2])
    foresight(now, 0.0)
    foresight._thread.submit(lambda: None).result(timeout=60)
    first = foresight.table
    foresight(now, 1.0)
    foresight(now, 2.0)
    assert foresight.table is first
    foresight.close()
    assert threading.active_count() == before


def test_a_table_that_cannot_be_built_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("planner.foresight.build", broken)
    foresight = Foresight()
    try:
        now = view(demand("a"), leases=RUNNING[:2])
        first = foresight(now, 0.0)
        foresight._thread.submit(lambda: None).result(timeout=60)
        assert foresight(now, 1.0).decision.plan == first.decision.plan
        assert foresight.table is None
        assert "next_events.failed reason=MemoryError: no room" in caplog.text
    finally:
        foresight.close()


def test_no_slots_no_jobs_and_no_table() -> None:
    foresight = Foresight()
    try:
        assert foresight(view(), 0.0).decision.plan.unassigned == 4
        assert foresight(view(demand("a"), slots=0), 0.0).decision.reason == "no slot is usable"
        assert foresight.table is None
    finally:
        foresight.close()


def test_settings_come_from_the_state_directory(tmp_path: Path) -> None:
    assert read_settings(None) == CostSettings()
    assert read_settings(tmp_path) == CostSettings()
    (tmp_path / SETTINGS_FILE).write_text("mtbf_gpu_hours: 50\nspares: 2\nrepair_seconds: 600\nageing_seconds: 60\n")
    found = read_settings(tmp_path)
    assert (found.mtbf_gpu_hours, found.spares, found.repair_seconds) == (50.0, 2, 600.0)
    assert found.lending.ageing_seconds == 60.0
    (tmp_path / SETTINGS_FILE).write_text("mtbf_gpu_hours: -1\n")
    with pytest.raises(BadInputError, match=r"allocator\.yaml: mtbf_gpu_hours"):
        read_settings(tmp_path)


def test_a_price_that_changes_is_seen_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    watch = SettingsWatch(tmp_path)
    assert not watch.changed()
    (tmp_path / SETTINGS_FILE).write_text("price_per_gpu_hour: 2.0\nflop_value: 1e15\n")
    assert watch.changed()
    assert watch.settings.price_per_gpu_hour == 2.0
    assert not watch.changed()
    (tmp_path / SETTINGS_FILE).write_text("price_per_gpu_hour: -2.0\n")
    assert not watch.changed()
    assert watch.settings.price_per_gpu_hour == 2.0
    (tmp_path / SETTINGS_FILE).unlink()
    assert watch.changed()
    assert watch.settings == CostSettings()
