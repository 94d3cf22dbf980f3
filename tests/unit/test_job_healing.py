"""Healing in place as the supervisor decides it: pure, with agents and ranks played by hand."""

from __future__ import annotations

from typing import Any

import pytest

from planner import job_healing
from planner.detection import Finding, Kind
from planner.events import Action, JobState
from planner.job_events import (
    Exited,
    Holding,
    JobAction,
    JobEvent,
    NodeLeaving,
    NodeUp,
    Release,
    Said,
    Send,
    Started,
    StartJoiners,
    StartSpecs,
    StoreAt,
    Stuck,
    Tell,
    Tick,
    Write,
)
from planner.job_machine import decide
from planner.job_record import JobRecord, RankRecord
from planner.leases import Lease
from planner.messages import (
    LeaveCollective,
    RankCheckpoint,
    RankDone,
    RankException,
    RankFault,
    RankHello,
    RankLeaving,
    RankLeft,
    RankPhase,
    RankReformed,
    RankStep,
    Reform,
    StartStore,
    StopRanks,
    TellRanks,
)
from planner.rank_map import Grid
from tests.support.ranks import tiny


class Play:
    """A job under way on one node of six slots, and everything that was decided."""

    def __init__(self, ranks: int = 4, slots: int = 4, **config: Any) -> None:
        settings = tiny(steps=50, workers={"min": config.pop("least", 1), "max": ranks}, **config)
        self.job = JobRecord(id="j", name="tiny", folder="/f", config=settings.to_json(), submitted=0.0)
        self.now = 100.0
        self.actions: list[JobAction] = []
        self.slots = list(range(slots))
        self.lease = self.make_lease("a", self.slots)
        self.leases = [self.lease]
        self.hold()
        self.do(StoreAt(1, "n", "127.0.0.1", 4000))
        for rank in range(self.job.size):
            self.do(Started(1, rank, 10 + rank))
            self.say(rank, RankHello(token="t", job="j", incarnation=1, rank=rank, pid=10 + rank, heals=True))
            self.say(rank, RankPhase(phase="step", step=1, time=self.now))
        self.step(1)

    @staticmethod
    def make_lease(name: str, slots: list[int], revoked: float | None = None) -> Lease:
        return Lease(
            id=name, node="n", slots=tuple(slots), holder="job:j", token=1, expires=1e9, revoked=revoked, granted=0.0,
            ttl=1e9,
        )  # fmt: skip

    def do(self, event: JobEvent, later: float = 0.1) -> list[JobAction]:
        """One event; what was decided."""
        self.now += later
        decision = decide(self.job, event, self.now)
        self.job = decision.job
        self.actions += decision.actions
        return list(decision.actions)

    def hold(self) -> list[JobAction]:
        return self.do(Holding(tuple(self.leases)))

    def say(self, rank: int, message: Any, incarnation: int | None = None) -> list[JobAction]:
        return self.do(Said(incarnation or self.job.incarnation, rank, message))

    def step(self, step: int) -> None:
        """All ranks complete a step."""
        for rank in reversed(range(self.job.size)):
            self.say(
                rank,
                RankStep(
                    step=step, loss=2.0, grad_norm=1.0, tokens=10, seconds=0.1, lr=0.1, workers=self.job.size, ids=[],
                    batch=[7, 8] if rank == 0 else [], incarnation=self.job.incarnation, time=self.now,
                ),
            )  # fmt: skip

    def left(self, rank: int, *, own: bool = False, kind: str = "RuntimeError", text: str = "Read error") -> None:
        self.say(
            rank,
            RankLeft(
                incarnation=self.job.incarnation, step=1, phase="step", own=own, type=kind, message=text,
                collective="reduce" if kind == "RuntimeError" else None, time=self.now,
            ),
        )  # fmt: skip

    def exit(self, rank: int, number: int = 9, incarnation: int | None = None) -> None:
        self.do(Exited(incarnation or self.job.incarnation, rank, None, number, False, "tail"))

    def reformed(self, *, joined: tuple[int, ...] = ()) -> None:
        for rank in range(self.job.size):
            self.say(
                rank,
                RankReformed(
                    incarnation=self.job.incarnation, step=1, joined=rank in joined, seconds=0.2, time=self.now
                ),
            )

    def orders(self) -> list[Reform]:
        return [
            action.command.message
            for action in self.actions
            if isinstance(action, Send)
            and isinstance(action.command, TellRanks)
            and isinstance(action.command.message, Reform)
        ]

    def sent(self, kind: type) -> list[Any]:
        return [a.command for a in self.actions if isinstance(a, Send) and isinstance(a.command, kind)]

    def told(self, action: Action) -> list[Any]:
        return [a.event for a in self.actions if isinstance(a, Tell) and a.event.action == action]

    def heal(self, dead: int) -> None:
        """A rank is killed and the others heal."""
        self.exit(dead)
        for rank in [rank.rank for rank in self.job.alive()]:
            self.left(rank)
        self.reformed()


def test_a_dead_rank_costs_a_re_form_and_its_slot_is_filled_again() -> None:
    play = Play()
    play.exit(2)
    assert play.job.stage == "leaving"
    leave = [c.message for c in play.sent(TellRanks) if isinstance(c.message, LeaveCollective)]
    assert leave[-1].ranks == [2]
    for rank in (0, 1, 3):
        play.left(rank)
    order = play.orders()[-1]
    assert (order.incarnation, order.world_size, order.ranks) == (2, 3, {0: 0, 1: 1, 3: 2})
    assert not order.at_boundary
    assert play.job.state == JobState.HEALING
    play.reformed()
    assert play.job.stage == "running"
    play.step(2)
    assert play.job.state == JobState.RUNNING
    fault = play.job.history[-1].summary()
    assert (fault["kind"], fault["severity"], fault["cure"]) == ("sigkill", "SEV2", "restart")
    play.hold()
    starts = [action for action in play.actions if isinstance(action, StartJoiners)]
    assert len(starts) == 1
    joiner = play.job.joiners[0]
    assert (joiner.slot, joiner.origin) == (2, 2), "the dead rank's slot, and its place in fault coordinates"
    play.say(joiner.rank, RankPhase(phase="ready", step=0, time=play.now))
    play.hold()
    grow = play.orders()[-1]
    assert (grow.incarnation, grow.at_boundary, grow.joining) == (3, True, [3])
    assert grow.ranks[joiner.rank] == 3
    assert grow.sources == {3: 0}
    play.reformed(joined=(3,))
    assert play.told(Action.RANK_JOINED)
    play.step(3)
    assert (play.job.size, play.job.stage, play.job.state) == (4, "running", JobState.RUNNING)
    assert len([a for a in play.actions if isinstance(a, StartSpecs)]) == 1, "nobody was started from a checkpoint"


def test_state_comes_from_the_nearest_peer_and_the_load_is_shared() -> None:
    """Two replicas on two nodes, tensor 2; three new replicas: one beside each of them and one on a third node."""
    names = {rank: rank for rank in range(4)}
    nodes = ["n1", "n1", "n2", "n2", "n1", "n1", "n2", "n2", "n3", "n3"]
    records = [
        RankRecord(rank=rank, origin=rank, node=node, slot=rank, lease="l", lease_token=1)
        for rank, node in enumerate(nodes)
    ]
    job = Play().job.model_copy(update={"ranks": records[:4], "joiners": records[4:]})
    found = job_healing._sources(job, Grid(2, 1, 5), names, {rank: rank for rank in range(4, 10)})
    assert {rank: found[rank] for rank in range(4, 8)} == {4: 0, 5: 1, 6: 2, 7: 3}
    assert found[8] in (0, 2)
    assert found[9] in (1, 3)


def test_a_retry_keeps_everybody() -> None:
    play = Play()
    play.left(1, own=True, kind="DistBackendError", text="NCCL error: ncclRemoteError: remote process exited")
    for rank in (0, 2, 3):
        play.left(rank)
    order = play.orders()[-1]
    assert order.ranks == {0: 0, 1: 1, 2: 2, 3: 3}
    assert play.job.fault is not None
    assert (play.job.fault.severity, play.job.fault.cure) == ("SEV3", "retry")


def test_a_rank_that_does_not_leave_is_ended() -> None:
    play = Play()
    late = Finding(Kind.HANG, 0, "step", 2, 30.0, 20.0, 70.0, None)
    play.do(Stuck(late))
    for rank in (0, 1, 3):
        play.left(rank)
    assert not play.orders()
    play.do(Tick(), later=2.0)
    stop = play.sent(StopRanks)[-1]
    assert (stop.ranks, stop.capture_stack) == ([2], True)
    assert play.orders()[-1].ranks == {0: 0, 1: 1, 3: 2}, "the others need not wait until it is gone"
    play.exit(2, incarnation=1)
    assert play.job.parting == []
    assert play.job.fault is not None
    assert play.job.fault.cause == "task_hang"
    assert play.job.fault.rank == 2, "not the rank that was found late, but the one that did not leave"


@pytest.mark.parametrize("collective", [None, "unknown"])
def test_a_false_alarm_ends_nobody(collective: str | None) -> None:
    play = Play()
    play.do(Stuck(Finding(Kind.HANG, 0, "step", 2, 30.0, 20.0, 70.0, collective)))
    for rank in range(4):
        play.left(rank)
    assert play.orders()[-1].ranks == {0: 0, 1: 1, 2: 2, 3: 3}
    assert not play.sent(StopRanks)
    assert play.job.fault is not None
    assert play.job.fault.cure == "retry"


def test_a_whole_replica_goes_with_its_dead_member() -> None:
    play = Play(parallel={"tensor": 2}, least=2)
    play.exit(3)
    for rank in (0, 1, 2):
        play.left(rank)
    order = play.orders()[-1]
    assert order.ranks == {0: 0, 1: 1}
    assert play.sent(StopRanks)[-1].ranks == [2]
    assert [(one.incarnation, one.rank) for one in play.job.parting] == [(1, 2)]
    play.exit(2, incarnation=1)
    assert play.job.parting == []


def test_a_fault_while_re_forming_begins_again() -> None:
    play = Play()
    play.exit(0)
    for rank in (1, 2, 3):
        play.left(rank)
    play.exit(3, incarnation=1)  # its agent had not heard of the new incarnation yet
    assert play.job.stage == "leaving"
    assert [rank.gone for rank in play.job.ranks] == [False, False, True]
    for rank in (0, 1):
        play.left(rank)
    assert play.orders()[-1].ranks == {0: 0, 1: 1}
    play.reformed()
    play.step(2)
    assert play.job.size == 2


def test_re_forming_that_does_not_end_falls_back_to_starting_all() -> None:
    play = Play()
    play.exit(0)
    for rank in (1, 2, 3):
        play.left(rank)
    play.do(Tick(), later=61.0)
    assert play.job.stage == "stopping"
    for rank in range(3):
        play.exit(rank)
    assert play.job.stage == "none"
    assert play.told(Action.DECISION)[-1].details["cure"] == "restart_all"
    play.hold()
    assert (play.job.stage, play.job.incarnation, play.job.size) == ("store", 3, 4)


def test_nobody_left_is_a_start_from_the_newest_state() -> None:
    play = Play(ranks=2, slots=2)
    play.exit(0)
    play.exit(1)
    assert play.job.stage in ("none", "store")
    assert not play.orders()


def test_an_error_that_comes_back_ends_the_job() -> None:
    play = Play()
    play.job.escalation = {"roots": ["file_not_found"]}
    play.say(
        1,
        RankException(
            type="FileNotFoundError", message="no such file", traceback="", step=2, phase="step", time=play.now
        ),
    )
    for rank in (0, 2, 3):
        play.left(rank)
    assert play.sent(StopRanks)
    for rank in (0, 1, 2, 3):
        play.exit(rank)
    assert play.job.state == JobState.FAILED
    assert "STOP" in play.job.reason


def test_slots_that_are_taken_back_are_given_back_at_a_steps_end() -> None:
    play = Play()
    play.leases = [play.make_lease("a", [0, 1, 2, 3])]
    play.job.ranks[3].lease = "b"
    play.leases = [play.make_lease("a", [0, 1, 2]), play.make_lease("b", [3], revoked=play.now + 30)]
    play.hold()
    order = play.orders()[-1]
    assert (order.at_boundary, order.ranks) == (True, {0: 0, 1: 1, 2: 2})
    assert not any(isinstance(action, Release) for action in play.actions)
    play.reformed()
    play.exit(3, incarnation=1)
    play.hold()
    released = [action for action in play.actions if isinstance(action, Release)]
    assert released[-1].leases == {"b"}
    assert play.job.stage == "running"


def test_a_joiner_that_dies_is_started_again_after_a_pause() -> None:
    play = Play()
    play.heal(3)
    play.step(2)
    play.hold()
    first = play.job.joiners[0].rank
    play.exit(first)
    assert play.job.joiners == []
    play.hold()
    assert play.job.joiners == []
    play.do(Tick(), later=10.0)
    play.hold()
    assert play.job.joiners[0].rank != first


def test_a_fault_while_a_joiner_starts_comes_first() -> None:
    play = Play()
    play.heal(3)
    play.step(2)
    play.hold()
    name = play.job.joiners[0].rank
    play.exit(2)
    assert play.job.joiners == []
    assert play.sent(StopRanks)[-1].ranks == [name]
    for rank in (0, 1):
        play.left(rank)
    assert play.orders()[-1].ranks == {0: 0, 1: 1}


def test_a_joiner_that_has_met_its_agent_goes_on_starting_through_a_fault() -> None:
    play = Play()
    play.heal(3)
    play.step(2)
    play.hold()
    name = play.job.joiners[0].rank
    play.say(name, RankHello(token="t", job="j", incarnation=2, rank=name, pid=99, heals=True))
    play.exit(2)
    for rank in (0, 1):
        play.left(rank)
    assert play.orders()[-1].ranks == {0: 0, 1: 1, name: name}, "it goes on waiting under its name"
    play.say(name, RankPhase(phase="ready", step=0, time=play.now), incarnation=2)
    play.reformed()
    play.step(3)
    play.hold()
    second = next(rank.rank for rank in play.job.joiners if rank.rank != name)
    assert not play.orders()[-1].at_boundary, "the second one is awaited: both in one change"
    play.say(second, RankPhase(phase="ready", step=0, time=play.now))
    play.hold()
    assert play.orders()[-1].ranks == {0: 0, 1: 1, name: 2, second: 3}
    assert not any(name in (order.ranks or []) for order in play.sent(StopRanks))


def test_whoever_saves_gets_as_long_as_saves_take() -> None:
    play = Play()
    for rank in range(3):
        play.say(rank, RankPhase(phase="save", step=1, time=play.now))
    before = play.now
    play.exit(3)
    assert play.job.due == pytest.approx(before + 0.1 + 60.0), "nothing is known yet"
    again = Play()
    message = RankCheckpoint(what="published", step=1, path="/p", seconds=6.0, time=again.now)
    again.say(0, message)
    again.say(1, RankPhase(phase="save", step=1, time=again.now))
    before = again.now
    again.exit(3)
    assert again.job.due == pytest.approx(before + 0.1 + 18.0)


def told_to_leave(play: Play, *ranks: int) -> None:
    for rank in ranks:
        play.say(rank, RankLeaving(step=1, time=play.now))
    play.do(Tick(), later=0.5)


def test_a_rank_that_gets_sigterm_is_let_go_at_the_steps_end_and_the_job_goes_on() -> None:
    play = Play()
    told_to_leave(play, 1)
    order = play.orders()[-1]
    assert (order.at_boundary, order.ranks) == (True, {0: 0, 2: 1, 3: 2})
    play.reformed()
    play.do(Exited(1, 1, 4, None, False, ""))
    assert (play.job.state, play.job.stage, play.job.fault) == (JobState.RUNNING, "running", None)


def test_ranks_that_cannot_be_spared_publish_and_the_job_is_preempted() -> None:
    play = Play(least=4)
    told_to_leave(play, 1)
    (stop,) = {command.message.why for command in play.sent(TellRanks) if hasattr(command.message, "why")}
    assert stop == "preempted"
    for rank in range(4):
        play.say(rank, RankDone(step=2, why="preempted", time=play.now))
        play.do(Exited(1, rank, 4, None, False, ""))
    assert play.job.state == JobState.PREEMPTED


def test_ranks_of_a_node_that_goes_may_leave_before_anybody_answered_and_the_job_starts_again() -> None:
    play = Play()
    for rank in (2, 3):
        play.job.ranks[rank].node = "m"
    play.do(NodeLeaving("m"), later=0.0)
    for rank in range(4):  # the supervisor was too slow: all have published and left
        play.say(rank, RankDone(step=2, why="preempted", time=play.now))
        play.do(Exited(1, rank, 4, None, False, ""), later=0.0)
    assert play.job.state == JobState.WAITING


def test_a_node_that_leaves_shrinks_the_job_or_makes_it_wait_for_slots() -> None:
    for least, state in ((1, JobState.RUNNING), (4, JobState.WAITING)):
        play = Play(least=least)
        for rank in (2, 3):
            play.job.ranks[rank].node = "m"
        play.do(NodeLeaving("m"))
        play.do(Tick(), later=0.5)
        if least == 1:
            assert play.orders()[-1].ranks == {0: 0, 1: 1}
            play.reformed()
            play.step(2)
        else:
            for rank in range(4):
                play.say(rank, RankDone(step=2, why="paused", time=play.now))
                play.do(Exited(1, rank, 0, None, False, ""))
        assert play.job.state == state
        assert play.job.leaving_nodes == ["m"]
        play.do(NodeUp("m", frozenset()))
        assert play.job.leaving_nodes == []


def test_the_store_s_node_is_lost_and_another_is_named_before_the_survivors_re_form() -> None:
    play = Play()
    for rank in (2, 3):
        play.job.ranks[rank].node, play.job.ranks[rank].lease = "m", "b"
    for rank in (0, 1):
        play.job.ranks[rank].lease = "gone"
    play.leases = [play.make_lease("b", [2, 3])]
    play.hold()
    play.do(Tick())
    for rank in (2, 3):
        play.left(rank)
    assert play.job.stage == "leaving"
    assert not play.orders(), "the store went with its node"
    assert play.sent(StartStore)[-1].incarnation == play.job.incarnation
    play.do(StoreAt(1, "m", "127.0.0.9", 4100))
    play.do(Tick())
    assert (play.orders()[-1].ranks, play.orders()[-1].store_host) == ({2: 0, 3: 1}, "127.0.0.9")


def test_without_another_store_in_time_all_ranks_start_anew() -> None:
    play = Play()
    play.job.store_host = ""
    play.exit(3)
    for rank in (0, 1, 2):
        play.left(rank)
    play.do(Tick(), later=30.0)
    assert not play.orders()
    assert play.job.stage == "stopping"


def test_an_agent_that_comes_back_starts_its_store_again() -> None:
    play = Play()
    play.do(NodeUp("n", frozenset((1, rank) for rank in range(4))))
    assert play.job.store_host == ""
    assert len(play.sent(StartStore)) == 2
    play.do(StoreAt(1, "n", "127.0.0.1", 4001))
    assert (play.job.store_port, play.job.stage, play.job.fault) == (4001, "running", None)


def test_a_signal_that_comes_while_the_job_heals_waits_for_it() -> None:
    play = Play()
    play.exit(3)
    told_to_leave(play, 1)
    assert not play.orders()
    for rank in (0, 1, 2):
        play.left(rank)
    play.reformed()
    play.do(Tick(), later=0.5)
    assert len({order.incarnation for order in play.orders()}) == 1, "the first step comes first"
    play.step(2)
    play.do(Tick(), later=0.5)
    assert play.orders()[-1].ranks == {0: 0, 2: 1}


def test_a_fault_is_called_by_its_root_although_its_echo_on_another_node_was_heard_first() -> None:
    play = Play(faults=[{"at_step": 2, "rank": 2, "kind": "exit"}])
    play.left(0, own=True)
    assert play.job.fault is not None
    assert play.job.fault.kind == "exception"
    play.say(2, RankFault(index=0, step=2, phase="forward", time=play.now))
    assert (play.job.fault.kind, play.job.fault.rank, play.job.fault.injected) == ("exit", 2, 0)
    other = Play()
    other.left(0, own=True)
    other.exit(2)
    for rank in (1, 3):
        other.left(rank)
    assert other.job.fault is not None
    assert (other.job.fault.kind, other.job.fault.rank) == ("sigkill", 2)


def test_steps_that_are_said_again_are_written_once() -> None:
    play = Play()
    play.heal(3)
    play.step(1)
    play.step(2)
    lines = [action.line for action in play.actions if isinstance(action, Write) and action.file == "samples.jsonl"]
    assert lines == [{"step": 1, "ids": [7, 8]}, {"step": 2, "ids": [7, 8]}]


def test_ranks_that_finish_while_others_join_end_the_job() -> None:
    play = Play()
    play.heal(3)
    play.step(2)
    play.hold()
    joiner = play.job.joiners[0]
    play.say(joiner.rank, RankPhase(phase="ready", step=0, time=play.now))
    play.hold()
    for rank in range(3):
        play.say(rank, RankDone(step=50, why="completed", time=play.now))
        play.do(Exited(play.job.incarnation, rank, 0, None, False, ""))
    assert play.sent(StopRanks)[-1].ranks == [3], "who was on the way in is not needed any more"
    play.exit(3)
    assert play.job.state == JobState.DONE


@pytest.mark.parametrize("what", ["pause", "preempt"])
def test_a_wish_to_stop_waits_until_it_has_healed(what: str) -> None:
    from planner.job_events import Asked

    play = Play()
    play.exit(2)
    play.do(Asked(what))
    for rank in (0, 1, 3):
        play.left(rank)
    play.reformed()
    play.do(Tick())
    assert play.job.stage == "stopping"
    assert play.job.stop_why == what
