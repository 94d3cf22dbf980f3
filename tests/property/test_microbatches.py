"""The share-out of micro-batches is a partition, balanced, and the same for everyone who computes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.microbatches import assign, reassign, share_out

counts = st.integers(0, 200)
sizes = st.integers(1, 40)


@given(counts, sizes)
def test_assign_is_a_balanced_partition(count: int, replicas: int) -> None:
    shares = assign(count, replicas)
    assert [batch for share in shares for batch in share] == list(range(count))
    lengths = [len(share) for share in shares]
    assert len(lengths) == replicas
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.sets(st.integers(0, 500), max_size=60), st.lists(st.integers(0, 30), min_size=1, max_size=20))
def test_share_out_gives_each_lost_one_once_and_fills_the_least_loaded(lost: set[int], remaining: list[int]) -> None:
    extra = share_out(lost, remaining)
    assert sorted(batch for part in extra for batch in part) == sorted(lost)
    totals = [left + len(part) for left, part in zip(remaining, extra, strict=True)]
    for total, part in zip(totals, extra, strict=True):
        assert not part or total - min(totals) <= 1, "who took something is never ahead of the least loaded by two"
    if max(remaining) - min(remaining) <= 1:
        assert max(totals) - min(totals) <= 1


@given(counts, st.integers(2, 40), st.data())
def test_a_dead_replica_costs_only_its_own_micro_batches(count: int, replicas: int, data: st.DataObject) -> None:
    shares = assign(count, replicas)
    dead = data.draw(st.sets(st.integers(0, replicas - 1), min_size=1, max_size=replicas - 1))
    survivors = [rank for rank in range(replicas) if rank not in dead]
    progress = {new: shares[old][: data.draw(st.integers(0, len(shares[old])))] for new, old in enumerate(survivors)}
    own = {new: shares[old] for new, old in enumerate(survivors)}
    todo = reassign(count, progress, len(survivors), own)
    ran = sorted([b for part in progress.values() for b in part] + [b for part in todo for b in part])
    assert ran == list(range(count)), "each micro-batch of the global batch counts exactly once"
    redone = {b for old in dead for b in shares[old]} & {b for part in todo for b in part}
    assert redone == {b for old in dead for b in shares[old]}
    lengths = [len(part) for part in todo]
    assert max(lengths) - min(lengths) <= 1
    for new, part in enumerate(todo):
        left = set(own[new]) - set(progress[new])
        assert left <= set(part) or set(part) <= left, "nobody runs another's while some of its own is run elsewhere"


@pytest.mark.parametrize(
    "call",
    [
        lambda: assign(4, 0),
        lambda: assign(-1, 2),
        lambda: share_out([1], []),
        lambda: share_out([], [-1]),
        lambda: reassign(4, {0: [1], 1: [1]}, 2),
        lambda: reassign(4, {0: [4]}, 2),
        lambda: reassign(4, {2: [0]}, 2),
    ],
)
def test_nonsense_is_refused(call: object) -> None:
    with pytest.raises(ValueError):
        call()  # type: ignore[operator]
