"""Edges of the sample order, and that it never changes between versions: a resumed job depends on it."""

from __future__ import annotations

import itertools

import pytest

from pretrain.order import SampleOrder, permuted

FIRST = [841, 189, 505, 901, 109, 765, 158, 913]
ACROSS = [241, 580, 1003, 1626]


def test_the_order_is_part_of_the_format() -> None:
    assert SampleOrder(1000, 1234).batch(0, 8) == FIRST
    assert SampleOrder(1000, 1234).batch(998, 4) == ACROSS


def test_a_huge_corpus_needs_no_table() -> None:
    order = SampleOrder(10**15, 5)
    assert len(set(order.batch(10**14, 1000))) == 1000


def test_neighbours_in_the_order_are_far_apart_in_the_text() -> None:
    ids = SampleOrder(100_000, 3).batch(0, 1000)
    near = sum(abs(a - b) < 100 for a, b in itertools.pairwise(ids))
    assert near < 20, "a random order has about 2"


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        permuted(position, 5, 1)


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        SampleOrder(0, 1)
