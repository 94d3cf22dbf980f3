"""Copies never share a switch with their origin where that can be helped, and memory bounds hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.peers import choose_peers

CLUSTERS = st.dictionaries(
    st.integers(0, 30).map("n{:02}".format), st.integers(0, 4).map("s{}".format), min_size=2, max_size=12
)


@settings(deadline=None, max_examples=60)
@given(CLUSTERS, st.integers(1, 2))
def test_bounds_and_separation(switch_of: dict[str, str], copies: int) -> None:
    plan = choose_peers(switch_of, copies=copies)
    received = Counter(peer for chosen in plan.peers.values() for peer in chosen)
    assert all(count <= copies for count in received.values())
    for node, chosen in plan.peers.items():
        assert node not in chosen
        assert len(set(chosen)) == len(chosen) <= copies
    largest = max(Counter(switch_of.values()).values())
    if copies == 1 and 2 * largest <= len(switch_of):
        assert not plan.exposed, "an even exchange across switches exists, so nobody is exposed"
        assert all(len(chosen) == 1 for chosen in plan.peers.values())


@settings(deadline=None, max_examples=20)
@given(CLUSTERS)
def test_the_answer_does_not_depend_on_the_order_of_the_question(switch_of: dict[str, str]) -> None:
    backwards = dict(reversed(list(switch_of.items())))
    assert choose_peers(switch_of).peers == choose_peers(backwards).peers


def test_one_switch_is_said_to_be_a_risk() -> None:
    plan = choose_peers({"a": "s", "b": "s", "c": "s"})
    assert plan.exposed == ("a", "b", "c")
    assert "one switch" in plan.reason
    assert all(plan.peers.values())


def test_a_node_alone_has_nobody() -> None:
    assert choose_peers({"a": "s"}).peers == {"a": ()}
    with pytest.raises(ValueError, match="at least 1"):
        choose_peers({"a": "s", "b": "t"}, copies=0)
