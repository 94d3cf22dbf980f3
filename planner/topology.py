"""The cluster as a graph: slots hang on nodes, nodes on leaf switches, switches on a spine (networkx)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Any

import networkx as nx

from planner.types import Node, Slot


class Distance(IntEnum):
    """How far apart two slots are, in links of the tree between them."""

    SAME_SLOT = 0
    SAME_NODE = 2  #: NVLink, or shared memory
    SAME_SWITCH = 4
    ACROSS = 6


@dataclass(frozen=True)
class Topology:
    """Nodes with their usable slots; ``lost`` slots (dead, quarantined) are no part of it."""

    nodes: tuple[Node, ...]
    lost: frozenset[Slot] = frozenset()

    @cached_property
    def graph(self) -> nx.Graph[Any]:
        """The tree: ``("spine",)`` – ``("switch", s)`` – ``("node", n)`` – ``("slot", n, i)``, edges weigh 1."""
        graph: nx.Graph[Any] = nx.Graph()
        for node in self.nodes:
            graph.add_edge(("spine",), ("switch", node.switch), weight=1)
            graph.add_edge(("switch", node.switch), ("node", node.name), weight=1)
            for slot in self.slots_of(node):
                graph.add_edge(("node", node.name), ("slot", slot.node, slot.index), weight=1)
        return graph

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    def slots_of(self, node: Node) -> tuple[Slot, ...]:
        """The node's usable slots, by index; none if it is cordoned."""
        if node.cordoned:
            return ()
        return tuple(slot for slot in node.slot_list() if slot not in self.lost)

    @cached_property
    def capacities(self) -> dict[str, int]:
        """Usable slots per node."""
        return {node.name: len(self.slots_of(node)) for node in self.nodes}

    @property
    def capacity(self) -> int:
        """Usable slots in all."""
        return sum(self.capacities.values())

    def distance(self, one: Slot, other: Slot) -> Distance:
        """Links between two slots: the length of the path in :attr:`graph`, without searching for it."""
        if one == other:
            return Distance.SAME_SLOT
        if one.node == other.node:
            return Distance.SAME_NODE
        return self.node_distance(one.node, other.node)

    def node_distance(self, one: str, other: str) -> Distance:
        """Links between slots of two nodes; nodes that are not known (any more) are far."""
        if one == other:
            return Distance.SAME_NODE
        first, second = self.by_name.get(one), self.by_name.get(other)
        if first is None or second is None or first.switch != second.switch:
            return Distance.ACROSS
        return Distance.SAME_SWITCH


def is_chain(groups: Sequence[int]) -> bool:
    """Whether each group size divides the next larger one."""
    ordered = sorted(set(groups))
    return all(large % small == 0 for small, large in pairwise(ordered))
