"""Every single fault among 2 to 64 simulated nodes is found, and nothing else is."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import networkx as nx
import pytest

from planner.errors import BadInputError
from planner.node_check import CheckVerdict, GroupResult, NodeResult, NodeState, first_round, judge, second_round

Measure = Callable[[tuple[str, ...]], GroupResult]


def cluster(seed: int, *, dead: str | None = None, slow: str | None = None, link: tuple[str, str] | None = None,
            nic: str | None = None, slow_nic: str | None = None) -> Measure:  # fmt: skip
    """A simulated cluster with at most one fault; times have 10 % noise."""
    noise = random.Random(seed)

    def measure(group: tuple[str, ...]) -> GroupResult:
        broken = dead in group or nic in group or (link is not None and set(link) <= set(group))
        gather = 0.03 * (8.0 if slow_nic in group else 1.0) * (3.0 if slow in group else 1.0)
        results = {}
        for node in group:
            compute = None if node == dead else 0.1 * (2.0 if node == slow else 1.0) * noise.uniform(0.95, 1.05)
            results[node] = NodeResult(compute, None if broken or node == dead else gather * noise.uniform(0.95, 1.05))
        return GroupResult(group, results)

    return measure


@functools.lru_cache(maxsize=256)
def groups_of(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return first_round(names)


def run(names: Sequence[str], measure: Measure) -> CheckVerdict:
    first = [measure(group) for group in groups_of(tuple(names))]
    second = [measure(group) for group in second_round(first)]
    return judge(first, second)


def names(count: int) -> list[str]:
    return [f"n{index:02d}" for index in range(count)]


@pytest.mark.parametrize("count", range(2, 65))
def test_every_single_node_fault_is_found(count: int) -> None:
    everyone = names(count)
    for node in everyone:
        for kind, wanted in (("dead", NodeState.DEAD), ("slow", NodeState.SLOW)):
            verdict = run(everyone, cluster(count, **{kind: node}))
            found = {name: state for name, state in verdict.nodes.items() if state is not NodeState.GOOD}
            assert found == {node: wanted}, (count, node, kind, verdict)
            assert verdict.bad_links == ()


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 33, 64])
def test_a_bad_link_between_good_nodes_is_the_link(count: int) -> None:
    everyone = names(count)
    tested = [pair for group in first_round(everyone) for pair in itertools.combinations(sorted(group), 2)]
    for link in tested:
        verdict = run(everyone, cluster(count, link=link))
        assert verdict.bad_links == (link,), (count, link, verdict)
        assert set(verdict.nodes.values()) == {NodeState.GOOD}


@pytest.mark.parametrize("count", [3, 4, 5, 8, 9, 33, 64])
def test_a_bad_or_slow_network_card_is_the_node(count: int) -> None:
    everyone = names(count)
    for node in everyone:
        verdict = run(everyone, cluster(count, nic=node))
        assert {name for name, state in verdict.nodes.items() if state is NodeState.FAULTY} == {node}, (count, node)
        verdict = run(everyone, cluster(count, slow_nic=node))
        assert {name for name, state in verdict.nodes.items() if state is NodeState.SLOW} == {node}, (count, node)


@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_a_healthy_cluster_is_healthy(count: int) -> None:
    for seed in range(20):
        assert run(names(count), cluster(seed)).healthy


def test_pairs_stay_under_their_switch_and_cover_everybody() -> None:
    topology = nx.Graph()
    everyone = names(9)
    for index, node in enumerate(everyone):
        topology.add_edge(node, f"switch{index % 2}")
    topology.add_edge("switch0", "switch1")
    groups = first_round(everyone, topology)
    assert sorted(node for group in groups for node in group) == everyone
    assert sorted(len(group) for group in groups) == [2, 2, 2, 3]
    across = [group for group in groups if len({int(node[1:]) % 2 for node in group[:2]}) == 2]
    assert across == []


@pytest.mark.parametrize(("given", "word"), [([], "two nodes"), (["a"], "two nodes"), (["a", "a"], "twice")])
def test_too_few_nodes(given: list[str], word: str) -> None:
    with pytest.raises(BadInputError, match=word):
        first_round(given)
