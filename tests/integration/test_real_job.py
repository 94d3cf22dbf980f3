"""A real Megatron job under a real agent whose loss spikes and turns into nonsense."""

from __future__ import annotations

import pytest

from planner.events import JobState
from tests.support.cluster import Cluster, cluster, cluster_of_module
from tests.support.ranks import tiny
from tests.support.redis import redis_of_session

__all__ = ["cluster", "cluster_of_module", "redis_of_session"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_loss_spike_goes_back_to_an_earlier_checkpoint_and_leaves_its_data_out(cluster: Cluster) -> None:
    cluster.start_agent("n1", 1, real=True)
    faults = [{"at_step": step, "kind": "loss_spike"} for step in (20, 21, 22)]
    config = tiny(
        workers={"min": 1, "max": 1}, steps=34, checkpoint={"every_steps": 5, "keep": 20, "export": False},
        faults=faults,
    )  # fmt: skip
    batch = config.batch.global_
    cluster.submit(config)
    record = cluster.wait_state(seconds=300)
    assert record["state"] == JobState.DONE, record["reason"]
    assert [(fault["cause"], fault["cure"]) for fault in record["faults"]] == [
        ("loss_spike", "roll_back"),
    ]  # fmt: skip
    assert [event["step"] for event in cluster.events("checkpoint.loaded")] == [15]
    skipped = [event for event in cluster.events("samples.skipped") if event["verdict"] == "rolled back"]
    # The first run drew 22 batches, of which 15 are in the checkpoint.
    assert [(event["step"], len(event["ids"])) for event in skipped] == [(15, 7 * batch)]
    kept = cluster.kept()
    drawn = [sample for ids, _ in kept.values() for sample in ids]
    assert sorted(kept) == list(range(1, 35))
    assert len(set(drawn)) == len(drawn) == 34 * batch, "nothing is drawn twice"
    assert not set(drawn) & {sample for event in skipped[-1:] for sample in event["ids"]}
