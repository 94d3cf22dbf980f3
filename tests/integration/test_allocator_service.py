"""The allocator's loop on a real Redis: grants, hand-over, node health, drains, and who may decide."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from planner.allocation import Allocation, ClusterView, allocate
from planner.demand import Demand
from planner.errors import FencedError
from planner.events import Action
from planner.service import Allocator
from planner.store import ClusterStore, NodeFacts
from planner.types import Trigger
from tests.support.redis import SlotAgent, await_that


class Coordinating:
    """A lock and an allocator, ticked by hand."""

    def __init__(self, store: ClusterStore, state_dir: Path | None = None) -> None:
        self.store = store
        token = store.table.lock("me:1:x", 1, 60.0)
        store.fence = lambda: token
        self.allocator = Allocator(store, state_dir)

    def tick_until(self, condition: object, what: str, seconds: float = 20.0) -> None:
        def ready() -> bool:
            self.allocator.tick(time.time())
            assert callable(condition)
            return bool(condition())

        await_that(ready, seconds, what)


def _training(name: str, least: int, most: int) -> Demand:
    counts = tuple(range(least, most + 1))
    return Demand(f"job:{name}", "pretrain", 1.0, least, most, counts, {c: 1e9 * c for c in counts}, 5.0)


def _evaluation(backlog: float = 60.0) -> Demand:
    return Demand("evaluation", "evaluation", 1.0, 0, 8, tuple(range(1, 9)), {}, 1.0, backlog_seconds=backlog)


def _slots(store: ClusterStore, holder: str) -> int:
    return sum(len(lease.slots) for lease in store.leases(holder))


def _actions(store: ClusterStore) -> list[Action]:
    return [event.action for event in store.last_events(500)]


def test_evaluation_gives_slots_to_a_new_job_and_gets_them_back(store: ClusterStore) -> None:
    with SlotAgent(store, "n1", 3):
        us = Coordinating(store)
        store.set_demand("evaluation", _evaluation())
        us.tick_until(lambda: _slots(store, "evaluation:") == 3, "evaluation has all slots")
        store.set_demand("job:a", _training("a", 2, 2))
        us.tick_until(lambda: sum(x.revoked is not None for x in store.leases("evaluation:")) == 2, "two revoked")
        assert _slots(store, "job:a") == 0, "granted before its holder left"
        for lease in store.leases("evaluation:"):
            if lease.revoked is not None:
                store.release(lease)
        us.tick_until(lambda: _slots(store, "job:a") == 2, "the job has its slots")
        store.drop_demand("job:a")
        for lease in store.leases("job:a"):
            store.release(lease)
        us.tick_until(lambda: _slots(store, "evaluation:") == 3, "evaluation has them again")
    decisions = [event for event in store.last_events(500) if event.action is Action.DECISION]
    triggers = [event.details["trigger"] for event in decisions]
    assert "job_submitted" in triggers
    assert all(event.reason for event in decisions)
    assert any(event.details["alternatives"] or event.details["waiting"] for event in decisions)
    tokens = [event.details["token"] for event in store.last_events(500) if event.action is Action.LEASE_GRANTED]
    assert tokens == sorted(tokens)
    decided = store.document("decision")
    assert decided is not None
    assert "gave 3 slots to evaluation" in decided["reason"]


def test_a_revoked_lease_that_is_not_given_back_ends_and_its_slot_waits_for_the_agents_word(
    store: ClusterStore,
) -> None:
    with SlotAgent(store, "n1", 1) as agent:
        us = Coordinating(store)
        store.set_demand("job:a", _training("a", 1, 1))
        us.tick_until(lambda: _slots(store, "job:a") == 1, "granted")
        agent.holds = {"n1/0"}  # a process sits on the device and does not go
        from planner.leases import Revocation

        (lease,) = store.leases("job:a")
        store.table.revoke([Revocation(lease=lease.id, grace_seconds=0.3, reason="test")], fence=store.fence())
        us.tick_until(lambda: not store.leases("job:a"), "it ended with its grace")
        us.tick_until(lambda: "n1/0" in store.quarantine("n1"), "in quarantine")
        for _ in range(5):
            us.allocator.tick(time.time())
        assert not store.leases("job:a"), "granted while a process still holds the device"
        agent.holds = set()
        us.tick_until(lambda: _slots(store, "job:a") == 1, "granted after the agent's word")
    assert Action.LEASE_EXPIRED in _actions(store)


def test_a_silent_node_is_suspected_then_dead_and_its_slots_go_to_no_one(
    store: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.health.SUSPECTED_AFTER", 0.5)
    monkeypatch.setattr("planner.health.judge.__kwdefaults__", {"ttl": 1.0})
    agent = SlotAgent(store, "n1", 2)
    with SlotAgent(store, "n2", 1):
        agent.__enter__()
        us = Coordinating(store)
        us.tick_until(lambda: Action.NODE_JOINED in _actions(store), "joined")
        agent.stop()
        us.tick_until(lambda: Action.NODE_SUSPECTED in _actions(store), "suspected")
        us.tick_until(lambda: Action.NODE_DEAD in _actions(store), "dead")
        store.set_demand("job:a", _training("a", 1, 3))
        us.tick_until(lambda: _slots(store, "job:a") == 1, "granted on the living node")
        assert {lease.node for lease in store.leases("job:a")} == {"n2"}
        Allocator(store).tick(time.time())  # another coordinator tells nothing twice
        with SlotAgent(store, "n1", 2):
            us.tick_until(lambda: Action.NODE_RECOVERED in _actions(store), "recovered")
    assert _actions(store).count(Action.NODE_DEAD) == 1


def test_a_drained_node_is_left_and_a_cordoned_one_keeps_what_runs(store: ClusterStore) -> None:
    with SlotAgent(store, "n1", 1), SlotAgent(store, "n2", 1):
        us = Coordinating(store)
        store.set_demand("job:a", _training("a", 1, 1))
        us.tick_until(lambda: _slots(store, "job:a") == 1, "granted")
        (lease,) = store.leases("job:a")
        store.cordon(lease.node, "cordon")
        for _ in range(3):
            us.allocator.tick(time.time())
        assert [one.id for one in store.leases("job:a")] == [lease.id]
        store.cordon(lease.node, "drain")
        us.tick_until(lambda: any(x.revoked for x in store.leases(node=lease.node)), "revoked")
        store.release(next(x for x in store.leases(node=lease.node)))
        us.tick_until(lambda: Action.NODE_DRAINED in _actions(store), "drained")
        us.tick_until(lambda: {x.node for x in store.leases("job:a")} == {"n1", "n2"} - {lease.node}, "moved")


def test_a_coordinator_that_was_overtaken_can_change_nothing(store: ClusterStore) -> None:
    with SlotAgent(store, "n1", 1):
        old = Coordinating(store)
        store.link.call(lambda client: client.hset("planaria:coordinator", "expires", "0"))
        store.table.lock("other:2:y", 2)
        store.set_demand("job:a", _training("a", 1, 1))
        with pytest.raises(FencedError):
            old.allocator.tick(time.time())
        assert store.leases() == []


def test_the_decision_is_made_anew_only_when_something_happened(store: ClusterStore) -> None:
    made: list[Trigger] = []

    def decide(view: ClusterView, now: float) -> Allocation:
        made.append(view.trigger)
        return allocate(view, now)

    us = Coordinating(store)
    us.allocator = Allocator(store, decide=decide)
    with SlotAgent(store, "n1", 1):
        store.set_demand("job:a", _training("a", 1, 1))
        us.tick_until(lambda: _slots(store, "job:a") == 1, "granted")
        us.allocator.tick(time.time())
        us.allocator.tick(time.time())
        before = len(made)
        for _ in range(5):
            us.allocator.tick(time.time())
        assert len(made) == before, "nothing happened, yet a plan was made"
        store.tell(Action.EXPORT_PUBLISHED, job="a", step=5)
        us.allocator.tick(time.time())
        assert made[-1] is Trigger.CHECKPOINT_PUBLISHED
        store.drop_demand("job:a")
        us.allocator.tick(time.time())
        assert made[-1] is Trigger.JOB_ENDED


def test_one_demand_that_is_none_stops_no_other(store: ClusterStore) -> None:
    with SlotAgent(store, "n1", 1):
        us = Coordinating(store)
        good = _training("a", 1, 1)
        store.set_demand("job:a", good)
        bad = good.to_json() | {"weight": -1.0}
        for key, text in (("x", "not JSON"), ("y", json.dumps(bad)), ("z", "{}"), ("q", "[]")):
            store.link.call(lambda client, k=key, t=text: client.set(f"planaria:demand:job:{k}", t))
        us.tick_until(lambda: _slots(store, "job:a") == 1, "granted")
        assert store.demands() == [good]
    assert _actions(store).count(Action.MESSAGE_REFUSED) == 4


def test_time_in_which_nobody_decided_counts_against_no_node(
    store: ClusterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.service.SWEEP_GUARD", 0.5)
    monkeypatch.setattr("planner.health.SUSPECTED_AFTER", 0.6)
    store.register_node(NodeFacts(name="n1", address="127.0.0.1", slots=1, boot="b"))
    store.heartbeat("n1")
    us = Coordinating(store)
    us.allocator.tick(time.time())
    time.sleep(0.8)  # Redis or the coordinator is away: no heartbeat could be seen
    us.allocator.tick(time.time())
    assert Action.NODE_SUSPECTED not in _actions(store)
    us.tick_until(lambda: Action.NODE_SUSPECTED in _actions(store), "it is silent although everyone is back")


def test_state_dir_is_no_part_of_the_decision(store: ClusterStore, tmp_path: Path) -> None:
    store.table.lock("me:1:x", 1)
    Allocator(store, tmp_path).tick(time.time())
    assert list(tmp_path.iterdir()) == []


def test_a_price_that_rises_while_it_runs_leaves_slots_unrented(store: ClusterStore, tmp_path: Path) -> None:
    with SlotAgent(store, "n1", 2):
        us = Coordinating(store, tmp_path)
        store.set_demand("job:a", _training("a", 1, 2))
        us.tick_until(lambda: _slots(store, "job:a") == 2, "the job has both")
        (tmp_path / "allocator.yaml").write_text("price_per_gpu_hour: 3600.0\nflop_value: 2.0e+9\n")
        us.tick_until(lambda: all(x.revoked is not None for x in store.leases("job:a")), "both are given back")
    decided = [event for event in store.last_events(500) if event.action is Action.DECISION]
    assert decided[-1].details["trigger"] == Trigger.PRICE_CHANGED
