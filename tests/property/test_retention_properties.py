"""Retention never touches what a recovery could need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.retention import deletable, deletable_exports

STEPS = st.sets(st.integers(0, 500), max_size=30)


@given(STEPS, st.integers(1, 6), st.none() | st.integers(1, 50), st.integers(0, 500), st.sets(st.integers(0, 500)))
def test_what_must_stay_stays(
    steps: set[int], keep: int, keep_every: int | None, verified: int, protected: set[int]
) -> None:
    gone = set(deletable(steps, keep=keep, keep_every=keep_every, newest_verified=verified, protected=protected))
    left = steps - gone
    assert gone <= steps
    assert set(sorted(steps)[-keep:]) <= left
    assert verified not in gone
    assert not gone & protected
    assert all(step < verified for step in gone)
    if keep_every:
        assert {step for step in steps if step % keep_every == 0} <= left


@given(STEPS, st.integers(1, 6), st.integers(1, 50))
def test_disk_use_is_bounded(steps: set[int], keep: int, keep_every: int) -> None:
    """C9: with every save verified, what stays is the newest few and the multiples, nothing else."""
    verified = max(steps, default=None)
    left = steps - set(deletable(steps, keep=keep, keep_every=None, newest_verified=verified))
    assert len(left) <= keep
    left = steps - set(deletable(steps, keep=keep, keep_every=keep_every, newest_verified=verified))
    assert len([step for step in left if step % keep_every]) <= keep


@given(STEPS, st.integers(1, 6))
def test_nothing_goes_while_nothing_is_known_to_verify(steps: set[int], keep: int) -> None:
    assert deletable(steps, keep=keep, keep_every=None, newest_verified=None) == []


@pytest.mark.parametrize(("keep", "keep_every"), [(0, None), (1, 0)])
def test_senseless_settings_are_refused(keep: int, keep_every: int | None) -> None:
    with pytest.raises(ValueError, match=r"at least 1|positive"):
        deletable([1, 2], keep=keep, keep_every=keep_every, newest_verified=2)


@given(st.dictionaries(st.integers(0, 50), st.booleans()), st.sets(st.integers(0, 50)), st.sets(st.integers(0, 50)))
def test_exports_go_with_their_checkpoint_unless_a_trial_needs_them(
    exported: dict[int, bool], published: set[int], evaluated: set[int]
) -> None:
    """C9: those that nobody evaluates go too; one whose evaluation was asked for only when its results are there."""
    gone = deletable_exports(exported, published=published, evaluated=evaluated.__contains__)
    assert gone == sorted(gone)
    for step, wanted in exported.items():
        assert (step in gone) == (step not in published and (step in evaluated or not wanted))
