"""The two-round node check: which groups to test, and what their results say (pure).

Source: Acme, section 6.1 (fast fault detection): round one in pairs, one group of three where the number is odd; round
two puts each suspect beside a node known good. Pairs come from a matching on the topology graph, so that neighbours
are tested over their own link first. Each node also times a matrix product alone, which tells a slow node from a
slow link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from statistics import median

import networkx as nx

from planner.errors import BadInputError

SLOW_COMPUTE = 1.5
"""A node is slow when its matrix product takes this many times the median of all."""
SLOW_GATHER = 2.5
"""A group's all-gather is slow at this many times the median of all groups of the round."""


GATHER_FLOOR_SECONDS = 0.05
"""No all-gather of the check's size (1 MB a node) below this is slow: on shared hosts short times are noise."""


class NodeState(StrEnum):
    """What the check says of a node."""

    GOOD = "good"
    DEAD = "dead"  #: gave no answer at all
    SLOW = "slow"  #: computes or communicates far below the others
    FAULTY = "faulty"  #: computes, but no group with it completes


@dataclass(frozen=True)
class NodeResult:
    """One node in one group; ``compute_seconds`` None: no answer; ``gather_seconds`` None: the all-gather failed."""

    compute_seconds: float | None
    gather_seconds: float | None


@dataclass(frozen=True)
class GroupResult:
    """What a group of two or three measured, per node."""

    nodes: tuple[str, ...]
    results: Mapping[str, NodeResult]

    def completed(self) -> bool:
        """Whether every node of the group finished the all-gather."""
        return all(self.results[node].gather_seconds is not None for node in self.nodes)

    def gather_seconds(self) -> float | None:
        """The slowest node's all-gather, None if it did not complete."""
        times = [self.results[node].gather_seconds for node in self.nodes]
        return max(time for time in times if time is not None) if self.completed() else None


@dataclass(frozen=True)
class CheckVerdict:
    """State of every node, and links between good nodes that are bad or slow."""

    nodes: Mapping[str, NodeState]
    bad_links: tuple[tuple[str, str], ...]
    reasons: Mapping[str, str]

    @property
    def healthy(self) -> bool:
        """Nothing was found."""
        return not self.bad_links and all(state is NodeState.GOOD for state in self.nodes.values())


def first_round(nodes: Sequence[str], topology: nx.Graph[str] | None = None) -> list[tuple[str, ...]]:
    """Pairs of nodes, near ones first (fewest hops in ``topology``), one group of three where the number is odd.

    Raises:
        BadInputError: fewer than two nodes, or a name given twice.
    """
    if len(set(nodes)) != len(nodes):
        raise BadInputError(f"node check: a node is named twice in {list(nodes)}")
    if len(nodes) < 2:
        raise BadInputError(f"node check: two nodes are needed, {len(nodes)} given")
    ordered = sorted(nodes)
    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(ordered)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            graph.add_edge(one, other, weight=-_hops(topology, one, other))
    matching = nx.max_weight_matching(graph, maxcardinality=True)
    pairs = sorted((min(pair), max(pair)) for pair in matching)
    paired = {node for pair in pairs for node in pair}
    left = [node for node in ordered if node not in paired]
    groups: list[tuple[str, ...]] = list(pairs)
    if left:
        nearest = min(range(len(groups)), key=lambda index: (_hops(topology, left[0], groups[index][0]), index))
        groups[nearest] = (*groups[nearest], left[0])
    return groups


def _hops(topology: nx.Graph[str] | None, one: str, other: str) -> int:
    if topology is None or one not in topology or other not in topology or not nx.has_path(topology, one, other):
        return 1
    return int(nx.shortest_path_length(topology, one, other))


def suspects_of(results: Iterable[GroupResult]) -> list[str]:
    """Nodes of groups that failed or were slow, without those that are known dead or slow by themselves.

    A single group of three has nothing to be compared with: all its nodes are suspects.
    """
    groups = list(results)
    alone = _by_compute(groups)
    odd = groups if len(groups) == 1 and len(groups[0].nodes) > 2 else _odd_groups(groups)
    return sorted(node for group in odd for node in group.nodes if node not in alone)


def second_round(results: Sequence[GroupResult]) -> list[tuple[str, ...]]:
    """For each suspect a pair with a node known good; where there is none, all pairs of the suspects."""
    suspects = suspects_of(results)
    alone = _by_compute(results)
    good = sorted({node for group in results for node in group.nodes} - set(suspects) - set(alone))
    if not suspects:
        return []
    if not good:
        return list(combinations(suspects, 2)) if len(suspects) > 2 else []
    pairs: list[tuple[str, ...]] = [(suspect, good[index % len(good)]) for index, suspect in enumerate(suspects)]
    for group in _odd_groups(results):
        if len(group.nodes) > 2:
            pairs += combinations(sorted(node for node in group.nodes if node in suspects), 2)
    return pairs


def judge(first: Sequence[GroupResult], second: Sequence[GroupResult]) -> CheckVerdict:
    """What both rounds say together."""
    everyone = sorted({node for group in first for node in group.nodes})
    states = dict.fromkeys(everyone, NodeState.GOOD)
    reasons: dict[str, str] = {}
    for node, (state, reason) in _by_compute(first).items():
        states[node], reasons[node] = state, reason
    suspects = suspects_of(first)
    usual = _usual_gather([*first, *second])
    tested = {node: [group for group in second if node in group.nodes] for node in suspects}
    for node in suspects:
        if tested[node] and all(_is_odd(group, usual) for group in tested[node]):
            slow = all(group.completed() for group in tested[node])
            states[node] = NodeState.SLOW if slow else NodeState.FAULTY
            reasons[node] = "its all-gather is " + ("slow" if slow else "failing") + " with every partner"
    links = _links([*first, *second], states, usual)
    if not second and suspects:
        return _two_alone(states, reasons, first, suspects)
    return CheckVerdict(states, links, reasons)


def _two_alone(
    states: dict[str, NodeState], reasons: dict[str, str], first: Sequence[GroupResult], suspects: Sequence[str]
) -> CheckVerdict:
    """No second round was possible: two nodes that compute but do not reach each other have a bad link; a node whose
    only partner is out by itself counts as good, since one fault explains all that was seen."""
    links = tuple(sorted((min(group.nodes), max(group.nodes)) for group in first if set(group.nodes) <= set(suspects)))
    for node in suspects:
        if not any(node in link for link in links):
            reasons[node] = "computes; its partner is out, so its network was not tested"
    return CheckVerdict(states, links, reasons)


def _links(
    groups: Sequence[GroupResult], states: Mapping[str, NodeState], usual: float | None
) -> tuple[tuple[str, str], ...]:
    """Links between nodes that are both good with others, yet failed or were slow together."""
    found = {
        (min(group.nodes), max(group.nodes))
        for group in groups
        if len(group.nodes) == 2
        and _is_odd(group, usual)
        and all(states[node] is NodeState.GOOD for node in group.nodes)
    }
    return tuple(sorted(found))


def _by_compute(groups: Iterable[GroupResult]) -> dict[str, tuple[NodeState, str]]:
    times = {node: group.results[node].compute_seconds for group in groups for node in group.nodes}
    known = [time for time in times.values() if time is not None]
    usual = (min(known) if len(known) <= 3 else median(known)) if known else None
    found: dict[str, tuple[NodeState, str]] = {}
    for node, time in times.items():
        if time is None:
            found[node] = (NodeState.DEAD, "gave no answer")
        elif usual is not None and time > SLOW_COMPUTE * usual:
            found[node] = (NodeState.SLOW, f"its matrix product took {time / usual:.1f} × the usual time")
    return found


def _usual_gather(groups: Iterable[GroupResult]) -> float | None:
    """Lower quartile of the groups' times: one slow node spoils several groups of a small cluster."""
    times = sorted(time for group in groups if (time := group.gather_seconds()) is not None)
    if not times:
        return None
    return times[0] if len(times) <= 4 else times[len(times) // 4]


def _is_odd(group: GroupResult, usual: float | None) -> bool:
    time = group.gather_seconds()
    return time is None or (usual is not None and time > max(SLOW_GATHER * usual, GATHER_FLOOR_SECONDS))


def _odd_groups(groups: Sequence[GroupResult]) -> list[GroupResult]:
    usual = _usual_gather(groups)
    return [group for group in groups if _is_odd(group, usual)]
