"""The node check between real processes over gloo: one fault each, four nodes; and through the cluster's agents."""

from __future__ import annotations

import signal
import sys

import pytest

from planner.node_check import NodeState
from pretrain.nodecheck import LocalCheck, local_probe
from tests.support.cluster import Cluster, cluster, cluster_of_module
from tests.support.redis import await_that, redis_of_session

__all__ = ["cluster", "cluster_of_module", "redis_of_session"]

NODES = ["n-0", "n-1", "n-2", "n-3"]


@pytest.mark.parametrize(
    ("kind", "state"), [("dead", NodeState.DEAD), ("slow", NodeState.SLOW), ("mute", NodeState.FAULTY)]
)
def test_one_fault_among_four_nodes(kind: str, state: NodeState) -> None:
    def command(node: str) -> list[str]:
        return [sys.executable, "-m", "tests.support.faulty_probe", kind] if node == "n-2" else local_probe(node)

    with LocalCheck(NODES, command) as check:
        verdict = check.run()
    found = {node: found for node, found in verdict.nodes.items() if found is not NodeState.GOOD}
    assert found == {"n-2": state}, verdict
    assert verdict.bad_links == ()


@pytest.mark.slow
def test_agents_check_a_cordoned_node_by_themselves_and_a_dead_one_on_request(cluster: Cluster) -> None:
    """As after a SEV1: n2 carries the mark, passes beside n1 and takes work again; then its agent stops answering."""
    for node, address in (("n1", "127.0.0.1"), ("n2", "127.0.0.2")):
        cluster.start_agent(node, 1, address)
    cluster.store.cordon("n2", "check")
    await_that(lambda: not cluster.store.cordoned(), 60, "the node passes and takes work again")
    said = {"node.checked", "node.uncordoned"}
    await_that(lambda: said <= {event.action for event in cluster.store.last_events(200)}, 10, "and it is said")
    cluster.agents["n2"].send_signal(signal.SIGSTOP)
    try:
        cluster.store.send_request("nodecheck", check="c1", nodes=["n1", "n2"])
        await_that(lambda: cluster.store.document("nodecheck:c1"), 60, "the check has a verdict")
    finally:
        cluster.agents["n2"].send_signal(signal.SIGCONT)
    document = cluster.store.document("nodecheck:c1") or {}
    assert {row["node"]: row["state"] for row in document["nodes"]} == {"n1": "good", "n2": "dead"}
    assert cluster.store.cordoned() == {}, "a node that does not beat is out anyway, and is welcome when it is back"
    cluster.store.send_request("nodecheck", check="c2", nodes=["n1", "n9"])
    await_that(lambda: cluster.store.document("nodecheck:c2"), 10, "a request for an unknown node is answered")
    assert "n9" in (cluster.store.document("nodecheck:c2") or {})["error"]
