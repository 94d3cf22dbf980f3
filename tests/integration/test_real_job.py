"""A real Megatron job under real agents: the same losses and samples whether or not a rank is killed on the way."""

from __future__ import annotations

import pytest

from planner.events import JobState
from tests.support.cluster import Cluster, cluster, left_over
from tests.support.ranks import tiny
from tests.support.redis import await_that, redis_of_session, store

__all__ = ["cluster", "redis_of_session", "store"]

WORKERS = {"min": 1, "max": 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_changes_neither_the_loss_nor_the_samples_of_a_job_across_two_nodes(cluster: Cluster) -> None:
    cluster.start_agent("n1", 1, "127.0.0.1", real=True)
    cluster.start_agent("n2", 1, "127.0.0.2", real=True)
    steps = 40
    cluster.submit(tiny(workers=WORKERS, steps=steps, checkpoint={"every_steps": 10}), "quiet")
    cluster.wait_state(job="quiet", seconds=240)
    faults = [{"at_step": 16, "rank": 1, "kind": "sigkill"}]
    cluster.submit(tiny(workers=WORKERS, steps=steps, checkpoint={"every_steps": 10}, faults=faults), "hit")
    record = cluster.wait_state(job="hit", seconds=240)
    assert [cluster.record(job)["state"] for job in ("quiet", "hit")] == [JobState.DONE, JobState.DONE], record[
        "reason"
    ]
    assert cluster.events("incarnation.started", "quiet")[0]["nodes"] == ["n1", "n2"]
    quiet, hit = cluster.kept("quiet"), cluster.kept("hit")
    assert sorted(quiet) == sorted(hit) == list(range(1, steps + 1))
    for step in quiet:
        assert hit[step][0] == quiet[step][0], f"samples of step {step}"
        assert hit[step][1] == pytest.approx(quiet[step][1], abs=1e-5), f"loss of step {step}"
    (fault,) = record["faults"]
    assert (fault["step"], fault["rank"], fault["kind"]) == (16, 1, "sigkill")
    assert fault["recovered_seconds"] is not None
    assert record["ettr"] is not None
    folder = cluster.state_dir / "jobs" / "hit" / "checkpoints"
    assert {p.name for p in folder.glob("step-*")} == {f"step-{n:08d}" for n in (10, 20, 30, 40)}
    await_that(lambda: not left_over(cluster), 20, "no rank, store or persister is left")


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
