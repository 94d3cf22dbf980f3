"""The node check between real processes over gloo: one fault each, four nodes."""

from __future__ import annotations

import sys

import pytest

from planner.node_check import NodeState
from pretrain.nodecheck import LocalCheck, local_probe

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
