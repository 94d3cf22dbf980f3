"""Survivors' plans count every micro-batch once; rank maps keep coordinates; both for any layout and any fault."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.alignment import MisalignedError, Stage, Standing, align
from planner.microbatches import assign
from planner.rank_map import Grid, enlarged, grid, without

grids = st.builds(Grid, st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))


@given(grids, st.data())
def test_survivors_keep_their_coordinates_and_nobody_of_a_broken_replica_survives(
    now: Grid, data: st.DataObject
) -> None:
    dead = data.draw(st.sets(st.integers(0, now.world - 1), min_size=1))
    result = without(now, dead)
    lost = {now.replica(rank) for rank in dead}
    if len(lost) == now.data:
        assert result is None
        return
    assert result is not None
    after, names = result
    assert sorted(names.values()) == list(range(after.world))
    assert set(names) == set(range(now.world)) - now.broken(dead)
    for old, new in names.items():
        assert old % now.tensor == new % after.tensor
        assert old // (now.tensor * now.data) == new // (after.tensor * after.data)
    order = [after.replica(names[now.members(replica)[0]]) for replica in range(now.data) if replica not in lost]
    assert order == sorted(order)


@given(grids, st.integers(0, 4))
def test_growth_leaves_replicas_where_they_are(now: Grid, more: int) -> None:
    after, names, new = enlarged(now, more)
    assert after.data == now.data + more
    assert sorted([*names.values(), *new]) == list(range(after.world))
    for old, renamed in names.items():
        assert now.replica(old) == after.replica(renamed)
    assert [after.replica(rank) for rank in new] == sorted(after.replica(rank) for rank in new)


def test_grids_that_do_not_divide_are_refused() -> None:
    assert grid(8, 2, 2) == Grid(2, 2, 2)
    for world, tensor, pipeline in ((3, 2, 1), (1, 2, 1), (0, 1, 1)):
        with pytest.raises(ValueError, match="do not make replicas"):
            grid(world, tensor, pipeline)
    with pytest.raises(ValueError, match="not one of"):
        Grid(1, 1, 2).replica(2)
    with pytest.raises(ValueError, match="cannot join"):
        enlarged(Grid(1, 1, 2), -1)


@given(st.integers(1, 40), grids, st.data())
def test_each_micro_batch_counts_once_and_only_lost_ones_are_done_again(
    count: int, now: Grid, data: st.DataObject
) -> None:
    shares = assign(count, now.data)
    dead = data.draw(st.sets(st.integers(0, now.world - 1), max_size=now.world - 1))
    result = without(now, dead)
    if result is None:
        return
    after, names = result
    survivors = sorted({now.replica(rank) for rank in names})
    progress = {replica: data.draw(st.integers(0, len(shares[replica]))) for replica in survivors}
    dirty = data.draw(st.sets(st.sampled_from(sorted(names)))) if names else set()
    standings = [
        Standing(
            replica=after.replica(new),
            newcomer=False,
            attempt=5,
            done=shares[now.replica(old)][: progress[now.replica(old)]],
            clean=old not in dirty,
        )
        for old, new in sorted(names.items(), key=lambda item: item[1])
    ]
    plan = align(standings, count)
    kept = {}
    for standing in standings:
        if standing.replica in plan.keep:
            kept[standing.replica] = standing.done
    ran = [batch for done in kept.values() for batch in done] + [batch for part in plan.todo for batch in part]
    assert sorted(ran) == list(range(count))
    spoilt = {after.replica(names[old]) for old in dirty}
    assert plan.keep == set(range(after.data)) - spoilt
    assert not plan.forward_only


def standing(replica: int, **more: object) -> Standing:
    return Standing(replica=replica, newcomer=False, attempt=3, **more)  # type: ignore[arg-type]


def test_a_reduction_that_all_survivors_completed_stays() -> None:
    survivors = [
        standing(0, done=(0, 1), reduced=frozenset({0, 1}), buckets=3),
        standing(1, done=(4,), reduced=frozenset({0}), buckets=3),
    ]
    plan = align(survivors, 5)
    assert plan.finished_buckets == {0}
    assert sorted(batch for part in plan.todo for batch in part) == [2, 3]
    assert not plan.forward_only


def test_where_all_is_reduced_only_losses_are_missing() -> None:
    plan = align([standing(0, done=(0, 1), reduced=frozenset({0}))], 3)
    assert plan.forward_only
    assert plan.todo == ((2,),)


def test_who_is_behind_has_finished_nothing_and_begins_empty() -> None:
    ahead = Standing(replica=0, newcomer=False, attempt=4, done=(0,))
    behind = Standing(replica=1, newcomer=False, attempt=3, done=(2, 3), reduced=frozenset({0}))
    plan = align([ahead, behind], 4)
    assert plan.lead == (4, Stage.GRADIENT)
    assert plan.keep == {0}
    assert plan.finished_buckets == frozenset()
    assert sorted(plan.todo[0] + plan.todo[1]) == [1, 2, 3]


def test_at_a_boundary_there_is_nothing_to_share_out() -> None:
    plan = align([standing(0, stage=Stage.SAVE), standing(1, stage=Stage.VALIDATE)], 4)
    assert plan.lead == (3, Stage.SAVE)
    assert plan.todo == ()


def test_a_newcomer_begins_empty_and_does_not_inherit_buckets() -> None:
    new = Standing(replica=1, newcomer=True)
    plan = align([standing(0, done=(0,)), new], 4)
    assert plan.keep == {0}
    assert sorted(plan.todo[0] + plan.todo[1]) == [1, 2, 3]
    redo = align([standing(0, done=(0, 1), reduced=frozenset({0})), new], 4)
    assert (redo.keep, redo.finished_buckets) == (frozenset(), frozenset())
    assert sorted(redo.todo[0] + redo.todo[1]) == [0, 1, 2, 3]


def test_states_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(MisalignedError, match="no rank holds"):
        align([Standing(replica=0, newcomer=True)], 4)
    with pytest.raises(MisalignedError, match="no single fault"):
        align([Standing(replica=0, newcomer=False, attempt=1), Standing(replica=1, newcomer=False, attempt=3)], 4)
