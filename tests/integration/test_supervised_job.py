"""A job under coordinator and agents that are real processes; the ranks do arithmetic, so all of it is quick."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from planner.events import JobState
from planner.leases import DEFAULT_TTL
from planner.redis_server import RedisServer
from planner.store import ClusterStore
from tests.support.cluster import Cluster, cluster, cluster_of_module, left_over, plain
from tests.support.redis import await_that, redis_of_session

__all__ = ["cluster", "cluster_of_module", "redis_of_session"]

KILL = {"at_step": 6, "rank": 1, "kind": "sigkill"}


@pytest.fixture(autouse=True)
def two_nodes(cluster: Cluster) -> None:
    """Two agents of one slot each, so that every job of two ranks runs across both."""
    cluster.ensure_agent("n1", 1)
    cluster.ensure_agent("n2", 1, "127.0.0.2")


def test_a_killed_rank_changes_neither_samples_nor_loss(cluster: Cluster) -> None:
    cluster.submit(plain(), "quiet")
    assert cluster.wait_state(job="quiet")["state"] == JobState.DONE
    cluster.submit(plain(faults=[KILL]), "hit")
    record = cluster.wait_state(job="hit")
    assert record["state"] == JobState.DONE
    assert record["incarnation"] == 2
    quiet, hit = cluster.kept("quiet"), cluster.kept("hit")
    assert hit == quiet, "samples and loss of every step"
    assert sorted(quiet) == list(range(1, 13))
    assert [len(ids) for ids, _ in quiet.values()] == [8] * 12
    (fault,) = record["faults"]
    assert (fault["step"], fault["rank"], fault["kind"]) == (6, 1, "sigkill")
    assert 0 < fault["recovered_seconds"] < 30
    # By time: that the fault was injected comes from the rank, that it was detected from its agent.
    story = [e["action"] for e in sorted(cluster.lines("events.jsonl", "hit"), key=lambda e: e["time"])]
    order = ["fault.injected", "fault.detected", "severity.decided", "decision.made", "fault.recovered"]
    assert [story.index(action) for action in order] == sorted(story.index(action) for action in order)
    assert cluster.events("fault.injected", "hit")[0]["index"] == 0
    await_that(lambda: not cluster.store.leases("job:hit"), 10, "the slots are given back")
    await_that(lambda: not left_over(cluster), 10, "no rank and no store is left")
    assert {rank["node"] for rank in cluster.events("rank.started", "hit")} == {"n1", "n2"}
    assert [e["workers"] for e in cluster.events("incarnation.started", "hit")] == [2, 2]
    assert (cluster.folder("hit") / "logs" / "inc-2-rank-1.log").exists()
    assert next(e["reason"] for e in cluster.events("rank.exited", "hit") if e["signal"]) == "ended by SIGKILL"


def test_ranks_train_on_without_a_coordinator_and_no_line_is_lost_or_doubled(cluster: Cluster) -> None:
    cluster.submit(plain(name="plain-100ms", steps=60, checkpoint={"every_steps": 100, "export": False}))
    for at in (5, 20):
        cluster.wait_step(at)
        pids = cluster.rank_pids()
        assert cluster.coordinator is not None
        cluster.coordinator.send_signal(signal.SIGKILL)
        cluster.coordinator.wait()
        if at == 5:  # what a coordinator had written and not committed when it died
            with (cluster.folder() / "metrics.jsonl").open("a") as stream:
                stream.write('{"step": 6, "loss": 0.0}\n{"step": 7, "lo')
        cluster.start_coordinator()
        assert cluster.rank_pids() == pids, "the same processes go on"
    record = cluster.wait_state()
    assert record["state"] == JobState.DONE
    assert record["incarnation"] == 1
    assert record["faults"] == []
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert [line["step"] for line in cluster.lines(file)] == list(range(1, 61)), file


def test_redis_away_for_longer_than_a_lease_lives_costs_the_job_nothing(
    cluster: Cluster, redis_of_session: RedisServer
) -> None:
    cluster.submit(plain(name="plain-100ms", steps=180, checkpoint={"every_steps": 50, "export": False}))
    cluster.wait_step(5)
    os.kill(redis_of_session.pid, signal.SIGSTOP)
    try:
        time.sleep(DEFAULT_TTL + 2.0)  # time itself is what is tested
    finally:
        os.kill(redis_of_session.pid, signal.SIGCONT)
    record = cluster.wait_state()
    stopped = [event["reason"] for event in cluster.events("incarnation.stopping")]
    assert (record["state"], record["incarnation"], record["faults"], stopped) == (JobState.DONE, 1, [], [])
    assert [line["step"] for line in cluster.lines("samples.jsonl")] == list(range(1, 181))


def test_an_agent_that_nobody_answers_for_too_long_ends_its_ranks_and_the_job_goes_on_afterwards(
    cluster: Cluster, redis_of_session: RedisServer
) -> None:
    for number, node in enumerate(("n1", "n2"), 1):
        cluster.end_agent(node, signal.SIGTERM)
        cluster.start_agent(node, 1, f"127.0.0.{number}", PLAIN_ABANDON_SECONDS="3")
    cluster.submit(plain(name="plain-100ms", steps=60, checkpoint={"every_steps": 5, "export": False}))
    cluster.wait_step(11)
    ranks = cluster.rank_pids().values()
    os.kill(redis_of_session.pid, signal.SIGSTOP)
    try:
        await_that(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 30, "no rank is left")
    finally:
        os.kill(redis_of_session.pid, signal.SIGCONT)
    record = cluster.wait_state()
    assert record["state"] == JobState.DONE
    assert sorted(cluster.kept()) == list(range(1, 61))
    for node in ("n1", "n2"):
        cluster.end_agent(node, signal.SIGTERM)


def test_an_agent_that_is_killed_and_comes_back_adopts_its_ranks(cluster: Cluster) -> None:
    cluster.submit(plain(name="plain-100ms", steps=60, checkpoint={"every_steps": 100, "export": False}))
    cluster.wait_step(5)
    pids = cluster.rank_pids()
    cluster.end_agent("n1")
    cluster.start_agent("n1", 1)
    cluster.wait_step(30)
    assert cluster.rank_pids() == pids
    record = cluster.wait_state()
    assert (record["state"], record["incarnation"]) == (JobState.DONE, 1)
    assert [line["step"] for line in cluster.lines("samples.jsonl")] == list(range(1, 61))
    await_that(lambda: not left_over(cluster), 15, "adopted ranks are ended and forgotten too")


def test_a_node_that_dies_takes_its_ranks_and_the_job_goes_on_elsewhere(cluster: Cluster) -> None:
    cluster.submit(plain(name="plain-100ms", steps=40, workers={"min": 1, "max": 2}))
    cluster.wait_step(5)
    await_that(lambda: len(cluster.rank_pids()) == 2, 20, "it runs on both nodes")
    pids = {rank["node"]: rank["pid"] for rank in cluster.record()["ranks"]}
    cluster.end_agent("n2")
    os.kill(pids["n2"], signal.SIGKILL)
    record = cluster.wait_state(seconds=90)
    assert record["state"] == JobState.DONE
    assert cluster.events("incarnation.started")[-1]["nodes"] == ["n1"]
    assert cluster.store.cordoned() == {}, "a node that is gone need not be kept out: it may come back at any time"
    assert [len(ids) for ids, _ in cluster.kept().values()] == [8] * 40


def test_pause_gives_the_slots_back_and_resume_goes_on_exactly(cluster: Cluster) -> None:
    cluster.submit(plain(name="plain-50ms", steps=40, checkpoint={"every_steps": 100, "export": False}))
    cluster.wait_step(5)
    cluster.store.send_request("pause", job=cluster.job)
    record = cluster.wait_state(JobState.PAUSED)
    assert record["state"] == JobState.PAUSED
    await_that(lambda: not cluster.store.leases(f"job:{cluster.job}"), 10, "its slots are free")
    paused_at = record["step"]
    assert record["published"] == [paused_at]
    cluster.store.send_request("resume", job=cluster.job)
    record = cluster.wait_state()
    assert (record["state"], record["incarnation"]) == (JobState.DONE, 2)
    steps = [line["step"] for line in cluster.lines("samples.jsonl")]
    assert steps == list(range(1, 41)), "nothing is done twice"


def test_cancel_ends_the_ranks_and_keeps_what_was_published(cluster: Cluster) -> None:
    cluster.submit(plain(name="plain-50ms", steps=1000))
    cluster.wait_step(9)
    cluster.store.send_request("cancel", job=cluster.job)
    record = cluster.wait_state()
    assert record["state"] == JobState.CANCELLED
    assert {4, 8} <= set(record["published"])
    await_that(lambda: not left_over(cluster), 10, "no process is left")
    await_that(lambda: not cluster.store.leases(f"job:{cluster.job}"), 10, "its slots are free")


def test_input_that_only_a_rank_can_find_wrong_fails_the_job_at_once(cluster: Cluster) -> None:
    cluster.submit(plain(name="refused", workers={"min": 1, "max": 1}))
    record = cluster.wait_state()
    assert (record["state"], record["incarnation"]) == (JobState.FAILED, 1)
    assert "data.train" in record["reason"]


def test_a_job_without_progress_is_given_up_after_three_incarnations(cluster: Cluster) -> None:
    cluster.submit(plain(workers={"min": 1, "max": 1}, name="hopeless"))
    record = cluster.wait_state()
    assert (record["state"], record["incarnation"]) == (JobState.FAILED, 3)
    assert "exited with code 13" in record["reason"]
    assert [fault["recovered_seconds"] for fault in record["faults"]] == [None] * 3


@pytest.mark.parametrize("name", ["bug", "mute-bug"])
def test_a_root_that_comes_back_before_any_progress_ends_the_job(cluster: Cluster, name: str) -> None:
    """The traceback is told in band, or stands in the rank's log alone; the peer sees a broken connection."""
    cluster.submit(plain(name=name))
    record = cluster.wait_state()
    assert (record["state"], record["incarnation"], record["step"]) == (JobState.FAILED, 2, 5)
    assert "STOP" in record["reason"]
    assert "key_error" in record["reason"]
    assert "router" in record["reason"]
    first, second = cluster.events("severity.decided")
    assert (first["severity"], first["diagnosis"]) == (second["severity"], second["diagnosis"]) == ("STOP", "key_error")
    assert [e["cure"] for e in cluster.events("decision.made")] == ["restart_all", "give_up"]


def test_a_root_of_class_stop_that_does_not_come_back_costs_one_restart(cluster: Cluster) -> None:
    cluster.submit(plain(name="bug-once"))
    record = cluster.wait_state()
    assert (record["state"], record["incarnation"], record["step"]) == (JobState.DONE, 2, 12)


def test_forged_commands_are_refused_and_nothing_is_started(cluster: Cluster) -> None:
    from planner.auth import seal
    from planner.messages import Leave

    began = time.time()
    forger = ClusterStore(cluster.store.url, "ab" * 32)
    forger.send_command("n1", Leave())
    body = {"node": "n1", "time": 0, "id": "x", "command": {"kind": "run_shell", "line": "rm -rf /"}}
    assert cluster.store.secret is not None
    raw = seal(cluster.store.secret, body)
    cluster.store.link.call(lambda client: client.xadd("planaria:commands:n1", {"d": raw}))
    refused = lambda: [e for e in cluster.store.last_events(200) if e.action == "message.refused" and e.time >= began]  # noqa: E731
    await_that(lambda: len(refused()) >= 2, 10, "both are refused")
    assert cluster.agents["n1"].poll() is None, "the agent stays up"
    forger.close()


def test_a_second_agent_of_the_same_name_and_folder_is_refused(cluster: Cluster) -> None:
    folder = cluster.state_dir
    again = subprocess.run(
        [os.sys.executable, "-m", "planner.cli", "agent", "--node", "n1", "--state-dir", str(folder / "agent-n1"),
         "--secret-file", str(folder / "secret")],
        env=cluster.environment, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert again.returncode == 2
    assert len(again.stderr.strip().splitlines()) == 1
    assert "n1" in again.stderr


@pytest.mark.parametrize("kind", ["exception", "exit"])
def test_exceptions_and_exits_are_told_apart(cluster: Cluster, kind: str) -> None:
    cluster.submit(plain(faults=[{"at_step": 6, "rank": 1, "kind": kind}]))
    record = cluster.wait_state()
    assert record["state"] == JobState.DONE
    (fault,) = record["faults"]
    assert (fault["kind"], fault["rank"]) == (kind, 1)
    assert bool(cluster.events("rank.exception")) == (kind == "exception") or kind == "exit"
