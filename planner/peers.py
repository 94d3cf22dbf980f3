"""Which nodes keep copies of which node's snapshot, so that a node and its switch are not lost together. Pure.

The assignment is a minimum-cost flow: every node sends ``copies`` snapshots and keeps at most a bounded number for
others; a copy behind the same switch costs far more than one behind another, and of those the network-nearest is
taken. With one switch alone the copies stay behind it, and the reason says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx

_SAME_SWITCH = 10_000
"""Cost of a copy that a failing switch would take along; above any distance in a real network."""


@dataclass(frozen=True)
class PeerPlan:
    """Who keeps whose snapshots."""

    peers: Mapping[str, tuple[str, ...]]
    """Node → nodes that keep its copies, nearest first."""
    exposed: tuple[str, ...]
    """Nodes with no copy behind another switch: losing their switch loses snapshot and copies."""
    reason: str


def topology(switch_of: Mapping[str, str], links: Mapping[str, str] | None = None) -> nx.Graph[tuple[str, str]]:
    """The network as a graph: nodes below their switch, switches below what ``links`` names (a spine as a rule)."""
    graph: nx.Graph[tuple[str, str]] = nx.Graph()
    for node, switch in sorted(switch_of.items()):
        graph.add_node(("node", node))
        graph.add_edge(("node", node), ("switch", switch))
    for lower, upper in sorted((links or dict.fromkeys(set(switch_of.values()), "spine")).items()):
        graph.add_edge(("switch", lower), ("switch", upper))
    return graph


def choose_peers(
    switch_of: Mapping[str, str],
    *,
    copies: int = 1,
    keeps: int | None = None,
    links: Mapping[str, str] | None = None,
) -> PeerPlan:
    """Choose the nodes that keep each node's copies.

    Args:
        switch_of: node → the switch it hangs on.
        copies: nodes that get each snapshot.
        keeps: most snapshots that one node keeps for others (its memory bound in snapshots); ``copies`` when None,
            so that everybody keeps as many as it sends.
        links: switch → the switch above it; one spine over all when None.

    Raises:
        ValueError: ``copies`` or ``keeps`` is below 1.
    """
    if copies < 1 or (keeps is not None and keeps < 1):
        raise ValueError(f"copies {copies}, keeps {keeps}: at least 1 is needed")
    nodes = sorted(switch_of)
    if len(nodes) < 2:
        return PeerPlan(dict.fromkeys(nodes, ()), tuple(nodes), "one node alone has no peer")
    distance = dict(nx.all_pairs_shortest_path_length(topology(switch_of, links)))
    flow: nx.DiGraph[Any] = nx.DiGraph()
    for node in nodes:
        flow.add_edge("source", ("from", node), capacity=copies, weight=0)
        flow.add_edge(("to", node), "sink", capacity=keeps or copies, weight=0)
    for position, node in enumerate(nodes):
        for offset in range(1, len(nodes)):
            peer = nodes[(position + offset) % len(nodes)]
            hops = distance[("node", node)].get(("node", peer), _SAME_SWITCH // 10)
            shared = switch_of[node] == switch_of[peer]
            # The last term spreads equal choices around the ring, so that the answer does not depend on luck.
            cost = (_SAME_SWITCH + hops if shared else hops) * len(nodes) + offset
            flow.add_edge(("from", node), ("to", peer), capacity=1, weight=cost)
    chosen = nx.max_flow_min_cost(flow, "source", "sink")
    peers = {
        node: tuple(
            sorted(
                (peer for (_, peer), used in chosen[("from", node)].items() if used),
                key=lambda peer, node=node: (switch_of[peer] == switch_of[node], peer),  # type: ignore[misc]
            )
        )
        for node in nodes
    }
    exposed = tuple(node for node in nodes if all(switch_of[peer] == switch_of[node] for peer in peers[node]))
    if len(set(switch_of.values())) == 1:
        reason = f"all nodes hang on one switch ({switch_of[nodes[0]]}); a copy survives a node, not the switch"
    elif exposed:
        reason = f"{', '.join(exposed)}: no room behind another switch"
    else:
        reason = "every node has a copy behind another switch"
    return PeerPlan(peers, exposed, reason)
