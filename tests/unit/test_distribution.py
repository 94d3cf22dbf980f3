"""Who loads a model from whom: storage is read once per tree, holders are never overloaded, a death holds nobody up."""

from __future__ import annotations

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.distribution import FANOUT, Source, choose_source
from planner.simulation.distribution import direct, spread
from planner.simulation.parameters import default_path, read_parameters


def test_the_first_reads_storage_and_the_others_wait_for_it() -> None:
    assert choose_source("a", {}, 0) == Source("storage")
    assert choose_source("b", {}, 1) == Source("wait")
    assert choose_source("b", {"a": 0}, 0) == Source("peer", "a")
    assert choose_source("c", {"a": FANOUT}, 0) == Source("wait")
    assert choose_source("c", {"a": FANOUT, "b": 0}, 0) == Source("peer", "b")
    assert choose_source("a", {"a": 0}, 0) == Source("storage"), "it lost its own copy, and nobody else has one"


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3)), st.integers(0, 2), st.integers(1, 3))
def test_a_holder_is_never_overloaded_and_storage_is_read_only_where_nobody_has_it(
    holders: dict[str, int], reading: int, fanout: int
) -> None:
    found = choose_source("x", holders, reading, fanout)
    if found.kind == "peer":
        assert found.peer is not None
        assert holders[found.peer] < fanout
    if found.kind == "storage":
        assert not holders
        assert not reading


def test_256_loads_cost_storage_one_read_and_far_less_time() -> None:
    """Acme's 7B over 25 Gb/s network cards."""
    trial = read_parameters(default_path()).trial
    size, nic, storage = trial.model_bytes, trial.nic_bytes_per_second, trial.storage_bytes_per_second
    found = spread(256, size, nic, storage)
    assert found.storage_reads == 1
    assert found.seconds == pytest.approx(size / min(nic, storage) + ceil(log2(256)) * size / nic)
    alone = direct(256, size, nic, storage)
    assert alone.storage_reads == 256
    assert found.seconds < alone.seconds / 4


def test_holders_that_die_cost_their_downloads_only() -> None:
    found = spread(64, 1e9, 1e9, 1e9, broken=frozenset({2, 5, 9}))
    assert found.storage_reads == 1
    assert found.seconds < 1.5 * spread(64, 1e9, 1e9, 1e9).seconds
    lonely = spread(3, 1e9, 1e9, 1e9, broken=frozenset({1}))
    assert lonely.storage_reads == 2, "the only holder died: storage is read again"
