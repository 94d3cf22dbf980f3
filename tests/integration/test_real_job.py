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
def test_a_spike_and_then_a_nan_go_back_to_earlier_checkpoints_and_leave_their_data_out(cluster: Cluster) -> None:
    cluster.start_agent("n1", 1, real=True)
    faults = [{"at_step": step, "kind": "loss_spike"} for step in (20, 21, 22)]
    faults.append({"at_step": 31, "kind": "nan_loss"})
    config = tiny(
        workers={"min": 1, "max": 1}, steps=34, checkpoint={"every_steps": 5, "keep": 20, "export": False},
        faults=faults, health={"on_bad_gradient": "roll_back"},
    )  # fmt: skip
    batch = config.batch.global_
    cluster.submit(config)
    record = cluster.wait_state(seconds=300)
    assert record["state"] == JobState.DONE, record["reason"]
    cures = [(fault["cause"], fault["cure"]) for fault in record["faults"]]
    assert cures == [("loss_spike", "roll_back"), ("nan_loss", "roll_back")]
    # The second comes before the run is well past the first, so it goes further back.
    assert [event["step"] for event in cluster.events("checkpoint.loaded")] == [15, 10]
    skipped = [event for event in cluster.events("samples.skipped") if event["verdict"] == "rolled back"]
    # The first run drew 22 batches, of which 15 are in the checkpoint; the second 16 more, to step 31.
    assert [(event["step"], len(event["ids"])) for event in skipped] == [(15, 7 * batch), (10, 28 * batch)]
    kept = cluster.kept()
    drawn = [sample for ids, _ in kept.values() for sample in ids]
    assert sorted(kept) == list(range(1, 35))
    assert len(set(drawn)) == len(drawn) == 34 * batch, "nothing is drawn twice"
    assert not set(drawn) & {sample for event in skipped[-1:] for sample in event["ids"]}
