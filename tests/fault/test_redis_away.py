"""Redis is killed under a whole stack and comes back later than a lease lives: nothing is lost, nothing is doubled."""

from __future__ import annotations

import time
from pathlib import Path

from planner.demand import Demand
from planner.events import Action
from planner.redis_server import start_redis
from planner.stack import start_stack, stop_stack
from planner.store import ClusterStore
from tests.support.redis import await_that, end_server

AWAY = 12.0
"""Longer than a lease lives (10 s)."""


def _demand(name: str) -> Demand:
    return Demand(f"job:{name}", "pretrain", 1.0, 1, 1, (1,), {1: 1e9}, 1.0)


def test_leases_live_through_an_outage_and_work_goes_on(tmp_path: Path) -> None:
    server = start_redis(tmp_path / "redis")
    state = tmp_path / "state"
    try:
        stack = start_stack(state, slots=2, url=server.url, components=("coordinator", "agent"), remember=False)
        store = ClusterStore(server.url, stack.secret, patience=30.0)
        store.set_demand("job:a", _demand("a"))
        await_that(lambda: store.leases("job:a"), 20.0, "granted")
        (before,) = store.leases("job:a")
        lock = store.coordinator()
        assert lock is not None
        time.sleep(1.5)
        end_server(server)
        time.sleep(AWAY)
        server = start_redis(tmp_path / "redis", password=server.password, port=server.port)

        def epoch_raised() -> bool:
            now = store.coordinator()
            return now is not None and now.token > lock.token

        await_that(epoch_raised, 30.0, "the coordinator raised the epoch")
        store.set_demand("job:b", _demand("b"))
        await_that(lambda: store.leases("job:b"), 30.0, "a new job gets its slot")
        (after,) = store.leases("job:a")
        assert (after.id, after.token) == (before.id, before.token)
        assert store.leases("job:b")[0].token > before.token
        renewed = after.expires
        await_that(lambda: store.leases("job:a")[0].expires > renewed, 10.0, "the agent renews again")
        actions = [event.action for event in store.last_events(500)]
        assert Action.LEASE_EXPIRED not in actions
        assert Action.NODE_DEAD not in actions
        assert actions.count(Action.LEASE_GRANTED) == 2
        store.close()
    finally:
        stop_stack(state)
        end_server(server)
