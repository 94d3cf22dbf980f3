"""Two real jobs on one cluster of three nodes, through whatever befalls nodes and coordinator.

Both train the same model on the same data, so at each step both must have the same samples and the same loss, whatever
was done to either of them. The tests are chapters of one life: each begins with the cluster as the last one left it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.events import JobState
from tests.support.cluster import Cluster, cluster_of_module, left_over
from tests.support.ranks import tiny
from tests.support.redis import await_that, redis_of_session

__all__ = ["cluster_of_module", "redis_of_session"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NODES = {"n1": "127.0.0.1", "n2": "127.0.0.2", "n3": "127.0.0.3"}
SECONDS = 90.0


def job(weight: float, most: int, **more: Any) -> Any:
    settings: dict[str, Any] = {"steps": 100_000, "weight": weight, "workers": {"min": 1, "max": most}} | more
    return tiny(
        **settings, batch={"global": 12, "micro": 1}, checkpoint={"every_steps": 20, "snapshot_every_steps": 10}
    )


@pytest.fixture(scope="module")
def life(cluster_of_module: Cluster) -> Cluster:
    """``big`` trains on two nodes, ``dear`` (five times its weight) on the third."""
    life = cluster_of_module
    for node, address in NODES.items():
        life.start_agent(node, 1, address, real=True)
    life.submit(job(1.0, 2), "big")
    life.submit(job(5.0, 1), "dear")
    life.wait_step(3, "big", SECONDS)
    life.wait_step(3, "dear", SECONDS)
    grown(life)
    return life


def places(life: Cluster, name: str) -> set[str]:
    return {rank["node"] for rank in life.record(name)["ranks"] if not rank["gone"]}


def steady(life: Cluster, name: str) -> dict[str, Any] | None:
    """The job's record where it runs and nothing is open."""
    record = life.record(name)
    quiet = record["stage"] == "running" and record["state"] == JobState.RUNNING and record["fault"] is None
    return record if quiet and record["progressed"] else None


def grown(life: Cluster, ranks: int = 2) -> None:
    """Wait until ``big`` trains on so many ranks."""
    await_that(
        lambda: (record := steady(life, "big")) and len(record["ranks"]) == ranks and not record["joiners"],
        SECONDS, f"big on {ranks} ranks: {life.record('big').get('reason')}",
    )  # fmt: skip


def ranks_of(life: Cluster, name: str) -> dict[str, int]:
    """Node → process id of its rank."""
    return {rank["node"]: rank["pid"] for rank in life.record(name)["ranks"] if not rank["gone"]}


def goes_on(life: Cluster, name: str) -> None:
    """Wait until the job completed three more steps."""
    life.wait_step(life.record(name)["step"] + 3, name, SECONDS)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def since(life: Cluster, action: str, name: str, began: float) -> list[dict[str, Any]]:
    return [event for event in life.events(action, name) if event["time"] >= began]


def planaria(life: Cluster, *arguments: str) -> None:
    command = [sys.executable, "-m", "planner.cli", *arguments, "--url", life.store.url]
    subprocess.run(command, env=life.environment, check=True, capture_output=True, timeout=60)


def kill_coordinator(life: Cluster) -> None:
    assert life.coordinator is not None
    life.coordinator.send_signal(signal.SIGKILL)
    life.coordinator.wait()


def test_ranks_train_on_while_the_coordinator_is_dead(life: Cluster) -> None:
    before = ranks_of(life, "big"), ranks_of(life, "dear")
    kill_coordinator(life)
    time.sleep(1.0)  # some steps are taken meanwhile
    life.start_coordinator()
    goes_on(life, "big")
    assert (ranks_of(life, "big"), ranks_of(life, "dear")) == before
    assert life.record("big")["faults"] == []


def test_a_coordinator_that_dies_in_the_middle_of_a_heal_finds_the_ranks_and_ends_it(life: Cluster) -> None:
    began = time.time()
    record = life.record("big")
    survivor, victim = (rank["pid"] for rank in record["ranks"])
    os.kill(survivor, signal.SIGSTOP)  # it cannot say that it left, so the heal stays in its first stage
    os.kill(victim, signal.SIGKILL)
    await_that(lambda: life.record("big")["stage"] == "leaving", 10, "the heal has begun")
    kill_coordinator(life)
    os.kill(survivor, signal.SIGCONT)
    life.start_coordinator()
    await_that(lambda: steady(life, "big"), SECONDS, "it healed")
    assert survivor in ranks_of(life, "big").values(), "in the same process"
    (fault,) = life.record("big")["faults"]
    assert fault["cure"] == "restart"
    assert not since(life, "checkpoint.loaded", "big", began), "nobody went back to a checkpoint"
    grown(life)
    assert [event["bytes"] > 0 for event in since(life, "rank.joined", "big", began)] == [True]


def test_a_node_that_one_job_loses_makes_the_allocator_change_both(life: Cluster) -> None:
    life.wait_step(25, "dear", SECONDS)
    began = time.time()
    (home,) = places(life, "dear")
    orphan = ranks_of(life, "dear")[home]
    others = ranks_of(life, "big")
    life.end_agent(home)  # its rank lives on and nobody answers for it: the node is dead when its lease has ended
    await_that(lambda: steady(life, "dear") and places(life, "dear") != {home}, SECONDS, "dear has another node")
    goes_on(life, "dear")
    goes_on(life, "big")
    assert len(places(life, "big")) == 1
    assert set(ranks_of(life, "big").values()) < set(others.values()), "big gave a slot away without a restart"
    assert not since(life, "checkpoint.loaded", "big", began)
    (loaded,) = since(life, "checkpoint.loaded", "dear", began)
    redone = max(line["step"] for line in life.lines("metrics.jsonl", "dear") if line["incarnation"] == 1)
    assert 0 <= redone - loaded["step"] <= 21, "from the newest state, and no step is left out that nobody heard of"
    decisions = [
        event
        for event in life.store.last_events(500)
        if event.action == "decision.made" and event.time >= began and "assignments" in event.details
    ]
    shares = [event.details["assignments"] for event in decisions]
    assert {"job:big": 1, "job:dear": 1} in shares, shares
    life.start_agent(home, 1, NODES[home], real=True)
    await_that(lambda: gone(orphan), SECONDS, "the rank of the dead agent is ended")
    grown(life)


def test_an_agent_that_comes_back_in_time_keeps_its_ranks(life: Cluster) -> None:
    before = ranks_of(life, "big"), ranks_of(life, "dear")
    node = sorted(before[0])[0]
    life.end_agent(node)
    life.start_agent(node, 1, NODES[node], real=True)
    goes_on(life, "big")
    assert (ranks_of(life, "big"), ranks_of(life, "dear")) == before


@pytest.mark.parametrize("how", ["drain", "sigterm"])
def test_a_node_that_goes_shrinks_the_job_at_a_step_s_end_and_its_return_grows_it(life: Cluster, how: str) -> None:
    began = time.time()
    faults = len(life.record("big")["faults"])
    node = sorted(places(life, "big"))[-1]
    stays, goes = (rank["pid"] for rank in sorted(life.record("big")["ranks"], key=lambda rank: rank["node"] == node))
    back: Callable[[], None]
    if how == "drain":
        planaria(life, "drain", node)
        await_that(lambda: not life.store.leases(node=node), 30, "nothing is left on the node")
        back = lambda: planaria(life, "uncordon", node)  # noqa: E731
    else:
        life.end_agent(node, signal.SIGTERM)
        back = lambda: life.start_agent(node, 1, NODES[node], real=True)  # noqa: E731
    await_that(lambda: gone(goes), 20, "its rank has left")
    grown(life, 1)
    goes_on(life, "big")
    assert list(ranks_of(life, "big").values()) == [stays]
    assert len(life.record("big")["faults"]) == faults, "that is no fault"
    assert not since(life, "checkpoint.loaded", "big", began)
    assert not since(life, "incarnation.ended", "big", began)
    back()
    grown(life)


def test_all_that_changed_nothing_of_what_was_learned(life: Cluster) -> None:
    big, dear = life.kept("big"), life.kept("dear")
    both = sorted(big.keys() & dear.keys())
    assert both == list(range(1, len(both) + 1)), "no step is missing"
    assert len(both) > 50
    assert [big[step][0] for step in both] == [dear[step][0] for step in both], "samples"
    # Sums in another order differ in their last bit, and training makes more of it with every step: over hundreds of
    # steps two undisturbed runs of different sizes drift apart too.
    for steps, allowed in ((50, 1e-5), (len(both), 1e-3)):
        worst = max(abs(big[step][1] - dear[step][1]) for step in both[:steps])
        assert worst <= allowed, f"losses differ by {worst} over {steps} steps"
    for name in ("big", "dear"):
        life.store.send_request("cancel", job=name)
    for name in ("big", "dear"):
        assert life.wait_state(job=name)["state"] == JobState.CANCELLED
    await_that(lambda: not left_over(life), 30, "no rank, store or persister is left")
    await_that(lambda: not life.store.leases("job:"), 20, "all slots are free")
