"""Shards that no live rank replicates (the distributed optimizer's): a loss costs a start of all ranks and the redo."""

from __future__ import annotations

from typing import Any

import pytest

from planner.events import JobState
from tests.support.cluster import Cluster, cluster_of_module
from tests.support.ranks import tiny
from tests.support.redis import await_that, redis_of_session

__all__ = ["cluster_of_module", "redis_of_session"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NODES = {"n1": "127.0.0.1", "n2": "127.0.0.2"}
SECONDS = 90.0


def job(**more: Any) -> Any:
    """``heal_in_place: false`` plays the distributed optimizer, whose shards nobody else holds."""
    return tiny(
        steps=50,
        workers={"min": 2, "max": 2},
        batch={"global": 12, "micro": 1},
        checkpoint={"every_steps": 20, "snapshot_every_steps": 10},
        health={"heal_in_place": False},
        **more,
    )


def test_a_lost_shard_is_redone_from_the_nearest_snapshot_and_the_allocator_knows_its_price(
    cluster_of_module: Cluster,
) -> None:
    life = cluster_of_module
    for node, address in NODES.items():
        life.start_agent(node, 1, address, real=True)
    prices: set[float] = set()

    def over(name: str) -> bool:
        prices.update(demand.transition_seconds for demand in life.store.demands() if demand.faulted)
        return life.record(name)["state"] == JobState.DONE

    life.submit(job(faults=[{"at_step": 37, "rank": 1, "kind": "sigkill"}]), "shards")
    await_that(lambda: over("shards"), SECONDS, "the job with the fault is done")
    record = life.record("shards")
    (fault,) = record["faults"]
    assert (fault["kind"], fault["cure"], record["incarnation"]) == ("sigkill", "restart_all", 2)
    (loaded,) = life.events("checkpoint.loaded", "shards")
    assert loaded["step"] == 30, "the nearest snapshot, newer than the checkpoint of step 20"
    steps = [(line["step"], line["incarnation"]) for line in life.lines("metrics.jsonl", "shards")]
    assert steps == [(step, 1) for step in range(1, 37)] + [(step, 2) for step in range(31, 51)], "six steps are redone"
    assert prices
    assert min(prices) > 5.0, "the allocator knows that a change costs a start of all ranks and the redo"

    life.submit(job(), "calm")
    await_that(lambda: over("calm"), SECONDS, "the undisturbed job is done")
    calm, shards = life.kept("calm"), life.kept("shards")
    assert sorted(calm) == sorted(shards) == list(range(1, 51))
    assert all(calm[step][0] == shards[step][0] for step in calm), "the same samples"
    assert max(abs(calm[step][1] - shards[step][1]) for step in calm) <= 1e-5
