"""A node check across agents, without any: answers and time drive it to the policy's verdict."""

from __future__ import annotations

import pytest

from planner.messages import NodeProbed, ProbeNode
from planner.node_check import NodeState
from pretrain.nodechecks import GATHER_SECONDS, ClusterCheck


class Nodes:
    """Answers for simulated nodes, one of which may be at fault: dead (silent), slow, or with a broken network."""

    def __init__(self, count: int, fault: str = "", node: str = "") -> None:
        self.now, self.fault, self.node = 0.0, fault, node
        self.sent: list[tuple[str, ProbeNode]] = []
        self.ended: set[str] = set()
        self.members: dict[str, list[str]] = {}
        names = [f"n{index:02d}" for index in range(count)]
        self.check = ClusterCheck("c", dict.fromkeys(names, "127.0.0.1"), self.send, self.now)

    def send(self, node: str, command: ProbeNode) -> None:
        self.sent.append((node, command))

    def run(self) -> dict[str, NodeState]:
        for _ in range(2000):
            if self.check.verdict is not None:
                break
            pending, self.sent = self.sent, []
            for node, command in pending:
                if command.op == "gather":
                    self.members.setdefault(command.group, []).append(node)
            for node, command in pending:
                self.answer(node, command)
            if not self.sent:
                self.now += 1.0
                self.check.proceed(self.now)
        assert self.check.verdict is not None
        assert self.now < 200
        ended = {node for node, command in self.sent if command.op == "end"}
        assert ended == self.check.nodes, "no probe is left"
        return {node: state for node, state in self.check.verdict.nodes.items() if state is not NodeState.GOOD}

    def answer(self, node: str, command: ProbeNode) -> None:
        if command.op == "end" or (self.fault == "dead" and node == self.node):
            return
        mine = node == self.node
        value: float | None = 0.2 if self.fault == "slow" and mine else 0.1
        if command.op == "listen":
            value = 5000
        elif command.op == "gather":
            broken = self.fault == "mute" and self.node in self.members[command.group]
            self.now += GATHER_SECONDS if broken else 0.0
            value = None if broken else 0.03
        report = NodeProbed(time=0.0, check="c", op=command.op, group=command.group, value=value)  # type: ignore[arg-type]
        self.check.answered(node, report, self.now)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_every_fault_is_found_and_nothing_else(count: int) -> None:
    assert Nodes(count).run() == {}
    for node in ("n00", f"n{count - 1:02d}"):
        assert Nodes(count, "dead", node).run() == {node: NodeState.DEAD}
        assert Nodes(count, "slow", node).run() == {node: NodeState.SLOW}
        if count > 2:
            assert Nodes(count, "mute", node).run() == {node: NodeState.FAULTY}


def test_a_node_that_stops_beating_is_not_waited_for() -> None:
    nodes = Nodes(3, "dead", "n01")
    nodes.check.gone("n01")
    assert nodes.run() == {"n01": NodeState.DEAD}
    assert nodes.now < 20


def test_answers_of_another_check_or_twice_change_nothing() -> None:
    nodes = Nodes(2)
    stray = NodeProbed(time=0.0, check="other", op="start", value=99.0)
    for report in (
        stray,
        stray.model_copy(update={"check": "c", "value": 0.1}),
        stray.model_copy(update={"check": "c"}),
    ):
        nodes.check.answered("n00", report, 0.0)
    assert nodes.run() == {}
