"""Health of nodes: decided from heartbeats and leases with the time given."""

from __future__ import annotations

from planner.events import Action
from planner.health import NodeState, judge, judge_all, transitions
from planner.leases import Lease


def _lease(node: str, expires: float) -> Lease:
    return Lease(id="l", token=1, holder="job:a", node=node, slots=(0,), granted=0.0, expires=expires, ttl=10.0)


def test_alive_suspected_dead_as_time_moves() -> None:
    assert judge(2.9, 105.0, 100.0)[0] is NodeState.ALIVE
    assert judge(3.0, 105.0, 100.0)[0] is NodeState.SUSPECTED
    assert judge(60.0, 100.1, 100.0)[0] is NodeState.SUSPECTED, "dead only when its leases have ended"
    assert judge(60.0, 100.0, 100.0)[0] is NodeState.DEAD
    assert judge(9.9, None, 100.0)[0] is NodeState.SUSPECTED
    assert judge(10.0, None, 100.0)[0] is NodeState.DEAD
    assert "8.0 s" in judge(8.0, None, 100.0)[1]


def test_a_node_that_never_sent_a_heartbeat_counts_from_when_it_was_first_seen() -> None:
    found = judge_all(["a", "b"], {"a": 99.0}, [_lease("a", 105.0)], 100.0, known_since={"b": 95.0})
    assert found["a"][0] is NodeState.ALIVE
    assert found["b"][0] is NodeState.SUSPECTED


def test_each_change_is_one_event() -> None:
    alive, suspected, dead = ((state, "why") for state in NodeState)
    assert [t.action for t in transitions({}, {"a": alive})] == [Action.NODE_JOINED]
    assert transitions({"a": NodeState.ALIVE}, {"a": alive}) == []
    (change,) = transitions({"a": NodeState.ALIVE}, {"a": suspected})
    assert (change.action, change.old, change.new) == (Action.NODE_SUSPECTED, "alive", "suspected")
    assert [t.action for t in transitions({"a": NodeState.SUSPECTED}, {"a": dead})] == [Action.NODE_DEAD]
    assert [t.action for t in transitions({"a": NodeState.DEAD}, {"a": alive})] == [Action.NODE_RECOVERED]
    assert [t.action for t in transitions({"a": NodeState.DEAD}, {})] == [Action.NODE_LEFT]
    assert [t.action for t in transitions({}, {"a": dead})] == [Action.NODE_JOINED, Action.NODE_DEAD]
