"""Whatever runs and workers there are: no shard twice, no worker over its depth, and work wherever work can go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.packing import DEPTH, OutView, PendingShard, RunView, WorkerView, assign

SECONDS = st.floats(0.01, 1000.0)
RUNS = st.lists(
    st.tuples(st.floats(0, 5000), st.floats(0.1, 5), st.lists(st.tuples(SECONDS, st.floats(0, 6000)), max_size=8)),
    max_size=5,
)
WORKERS = st.lists(st.tuples(st.integers(0, 4), st.lists(SECONDS, max_size=3)), max_size=5)


def build(runs: list, workers: list) -> tuple[list[RunView], list[WorkerView]]:  # type: ignore[type-arg]
    views = [
        RunView(
            run=f"r{n}", created=created, model=f"m{n}", weight=weight,
            pending=tuple(
                PendingShard(shard=f"r{n}-{k}", seconds=s, after=after) for k, (s, after) in enumerate(shards)
            ),
        )
        for n, (created, weight, shards) in enumerate(runs)
    ]  # fmt: skip
    live = [
        WorkerView(
            worker=f"w{n}", model=f"m{model}",
            out=tuple(OutView(run="gone", shard=f"out-{n}-{k}", seconds=s) for k, s in enumerate(out)),
        )
        for n, (model, out) in enumerate(workers)
    ]  # fmt: skip
    return views, live


@given(RUNS, WORKERS, st.floats(0, 10_000))
def test_assignments_are_sound_and_leave_nobody_idle(runs: list, workers: list, now: float) -> None:  # type: ignore[type-arg]
    views, live = build(runs, workers)
    chosen = assign(views, live, now)
    sent = [one.shard for one in chosen if not one.second_copy]
    assert len(set(sent)) == len(sent)
    ready = {shard.shard for view in views for shard in view.pending if shard.after <= now}
    assert set(sent) <= ready
    for worker in live:
        got = sum(1 for one in chosen if one.worker == worker.worker)
        assert got == 0 or len(worker.out) + got <= DEPTH
    for worker in live:
        idle = not worker.out and all(one.worker != worker.worker for one in chosen)
        assert not idle or set(sent) == ready, "nobody is idle while work waits"
    assert assign(views, live, now) == chosen, "the same question has the same answer"
