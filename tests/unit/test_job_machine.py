"""The life of a job, step by step."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from planner.events import Action, JobState
from planner.job_demand import IN_PLACE_SECONDS, demand
from planner.job_events import (
    Asked,
    CommandRefused,
    Exited,
    ExportEnded,
    Holding,
    JobAction,
    JobEvent,
    NodeUp,
    Release,
    Said,
    Send,
    StartSpecs,
    StoreAt,
    Tell,
    Tick,
    Write,
)
from planner.job_faults import exit_reason
from planner.job_machine import decide
from planner.job_rates import feasible, parameters
from planner.job_record import JobRecord
from planner.leases import Lease
from planner.messages import RankCheckpoint, RankDone, RankException, RankFault, RankHello, RankPhase, RankStep
from planner.pretrain_config import PretrainConfig

RAW = {
    "name": "u",
    "workers": {"min": 1, "max": 2},
    "model": {"layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "heads": 2, "seq_length": 32},
    "data": {"train": ["stdlib"]},
    "batch": {"global": 4, "micro": 2},
    "optimizer": {"lr": 1.0e-3},
    "steps": 10,
    "evaluate": {"tasks": ["stdlib_bits_per_byte"], "limit": 7, "every_checkpoints": 2},
    "faults": [{"at_step": 3, "rank": 1, "kind": "sigkill"}],
}
LEASES = tuple(
    Lease(id=f"l{n}", token=n + 1, holder="job:j", node="n1", slots=(n,), granted=0.0, expires=9.0, ttl=10.0)
    for n in range(2)
)


class Life:
    """A job and everything that was done about it."""

    def __init__(self, **changes: object) -> None:
        config = PretrainConfig.model_validate({**RAW, **changes})
        self.job = JobRecord(id="j", name="u", folder="/nowhere", config=config.to_json(), submitted=0.0)
        self.now = 0.0
        self.done: list[JobAction] = []

    def happen(self, *events: JobEvent, after: float = 1.0) -> list[JobAction]:
        self.now += after
        new: list[JobAction] = []
        for event in events:
            decision = decide(self.job, event, self.now)
            self.job = decision.job
            new += decision.actions
        self.done += new
        return new

    def said(self, rank: int, *messages: object) -> list[JobAction]:
        return self.happen(*(Said(self.job.incarnation, rank, message) for message in messages))

    def come_up(self, leases: Iterable[Lease] = LEASES) -> None:
        self.happen(Holding(tuple(leases)))
        self.happen(StoreAt(self.job.incarnation, "n1", "127.0.0.1", 5))
        for rank in range(self.job.size):
            hello = RankHello(token="t", job="j", incarnation=self.job.incarnation, rank=rank, pid=rank + 50)
            self.said(rank, hello, RankPhase(phase="load", step=0, time=self.now))

    def complete(self, *steps: int) -> None:
        for step in steps:
            for rank in range(self.job.size):
                self.said(rank, self.step(step, rank))

    def step(self, step: int, rank: int, **changes: object) -> RankStep:
        half = list(range(4))[rank :: self.job.size]
        base = RankStep(
            step=step, loss=2.0 if rank == 0 else None, grad_norm=1.0, tokens=128, seconds=0.1 * (rank + 1), lr=0.1,
            workers=self.job.size, ids=half, incarnation=self.job.incarnation, time=self.now,
        )  # fmt: skip
        return base.model_copy(update=changes)

    def exit(self, rank: int, code: int | None = None, signal: int | None = None) -> list[JobAction]:
        return self.happen(Exited(self.job.incarnation, rank, code, signal, False, "the end"))

    def told(self, action: Action) -> list[dict[str, object]]:
        return [a.event.to_json() for a in self.done if isinstance(a, Tell) and a.event.action is action]

    def commands(self, kind: str) -> list[object]:
        return [a.command for a in self.done if isinstance(a, Send) and a.command.kind == kind]


def test_it_starts_when_its_slots_are_there_and_runs_with_the_first_step() -> None:
    life = Life()
    life.happen(Holding((), "training uses all slots"))
    assert (life.job.state, life.job.reason) == (JobState.WAITING, "training uses all slots")
    life.come_up()
    assert life.job.stage == "running"
    assert life.job.state == JobState.STARTING
    life.complete(1)
    assert life.job.state == JobState.RUNNING
    assert [e["step"] for e in life.told(Action.STEP_COMPLETED)] == [1]
    life.complete(2)
    assert len(life.told(Action.STEP_COMPLETED)) == 1, "only the first step after a start is an event"


def test_a_step_is_written_once_when_all_ranks_have_said_so() -> None:
    life = Life()
    life.come_up()
    life.said(1, life.step(1, 1))
    assert not [a for a in life.done if isinstance(a, Write)]
    life.said(1, life.step(1, 1))
    new = life.said(0, life.step(1, 0, valid_loss=3.0), life.step(1, 0))
    lines = {a.file: a.line for a in new if isinstance(a, Write)}
    assert lines["samples.jsonl"] == {"step": 1, "ids": [0, 1, 2, 3]}
    assert lines["metrics.jsonl"] == {
        "step": 1, "loss": 2.0, "grad_norm": 1.0, "tokens": 128, "seconds": 0.2, "workers": 2, "incarnation": 1,
        "valid_loss": 3.0,
    }  # fmt: skip
    assert len([a for a in life.done if isinstance(a, Write)]) == 2


def test_steps_that_ended_unheard_are_written_late_and_are_no_progress() -> None:
    life = Life()
    life.come_up()
    life.complete(1, 2)
    life.exit(1, signal=9)
    life.exit(0, signal=9)
    life.come_up()
    late = [life.step(n, 0, incarnation=1, late=True, batch=[3, 2, 1, 0]) for n in (2, 3, 4)]
    own = life.step(5, 0, incarnation=2, late=True, batch=[3, 2, 1, 0])
    new = life.said(0, *late, own)
    lines = [(a.file, a.line["step"], a.line.get("incarnation")) for a in new if isinstance(a, Write)]
    assert lines == [("samples.jsonl", 3, None), ("metrics.jsonl", 3, 1), ("samples.jsonl", 4, None),
                     ("metrics.jsonl", 4, 1)]  # fmt: skip
    assert not life.job.progressed
    assert life.job.step == 4
    life.complete(5)
    assert life.job.state == JobState.RUNNING


def test_a_lost_rank_ends_the_others_and_the_next_incarnation_recovers() -> None:
    life = Life()
    life.come_up()
    life.complete(1, 2)
    life.said(1, RankFault(index=0, step=3, phase="forward", time=life.now))
    new = life.exit(1, signal=9)
    assert life.job.state == JobState.HEALING
    (stop,) = [a.command for a in new if isinstance(a, Send)]
    assert (stop.kind, stop.incarnation, stop.grace_seconds) == ("stop_ranks", 1, 0.0)
    life.exit(0, signal=9)
    assert life.job.stage == "none"
    life.come_up()
    assert life.job.incarnation == 2
    assert life.job.fired == [0]
    life.complete(1)
    (fault,) = life.job.history
    assert (fault.kind, fault.rank, fault.step, fault.cure) == ("sigkill", 1, 3, "restart_all")
    assert fault.summary()["recovered_seconds"] > 0
    assert life.job.fault is None
    assert [e["severity"] for e in life.told(Action.SEVERITY_DECIDED)] == ["SEV2"]


def test_what_an_earlier_incarnation_says_is_ignored() -> None:
    life = Life()
    life.come_up()
    life.exit(0, code=1)
    life.exit(1, signal=9)
    life.come_up()
    before = life.job.model_dump()
    life.happen(Said(1, 0, life.step(1, 0)), Exited(1, 0, 1, None, False, ""))
    assert life.job.model_dump() == before


def test_the_echo_of_a_fault_waits_for_its_root() -> None:
    life = Life()
    life.come_up()
    echo = RankException(
        type="RuntimeError", message="gloo pair.cc Read error: Connection reset by peer", traceback="", step=1,
        phase="step", collective="reduce", time=0.0,
    )  # fmt: skip
    life.said(0, echo)
    assert life.job.stage == "running", "nobody is ended yet"
    life.exit(1, code=13)
    assert life.job.stage == "stopping"
    life.exit(0, signal=9)
    assert life.told(Action.SEVERITY_DECIDED)[0]["rank"] == 1
    life.come_up()
    life.said(0, echo)
    life.happen(Tick(), after=2.0)
    assert life.job.stage == "stopping", "without a root the echo is acted upon"


def test_three_starts_without_progress_give_up_with_the_root_cause() -> None:
    life = Life()
    for _ in range(3):
        life.come_up()
        life.exit(1, code=13)
        life.exit(0, signal=9)
    assert life.job.state == JobState.FAILED
    assert life.job.incarnation == 3
    assert "exited with code 13" in life.job.reason
    assert any(isinstance(a, Release) for a in life.done)


def test_steps_done_again_give_no_budget_back_but_new_ones_do() -> None:
    life = Life()
    life.come_up()
    life.complete(1, 2, 3)
    for expected in (1, 2):
        life.exit(1, code=13)
        life.exit(0, signal=9)
        life.come_up()
        life.complete(3)
        assert life.job.escalation["starts"] == expected
    life.complete(4)
    assert life.job.escalation["starts"] == 0


def test_bad_input_of_a_rank_is_final() -> None:
    life = Life()
    life.come_up()
    life.said(
        0,
        RankException(type="BadInputError", message="data.train: empty", traceback="", step=0, phase="start", time=0.0),
    )
    life.exit(0, code=2)
    life.exit(1, signal=9)
    assert life.job.state == JobState.FAILED
    assert life.job.reason == "bad input: data.train: empty"


def test_pause_publishes_first_and_resume_starts_again() -> None:
    life = Life()
    life.come_up()
    life.complete(1)
    new = life.happen(Asked("pause"))
    (tell,) = [a.command for a in new if isinstance(a, Send)]
    assert (tell.kind, tell.message.kind, tell.message.why) == ("tell_ranks", "stop", "paused")
    for rank in (0, 1):
        life.said(rank, RankDone(step=1, why="paused", time=0.0))
        life.exit(rank, code=0)
    assert life.job.state == JobState.PAUSED
    assert demand(life.job) is None
    life.happen(Holding(LEASES))
    assert life.job.stage == "none"
    life.happen(Asked("resume"))
    assert demand(life.job) is not None
    life.come_up()
    assert life.job.incarnation == 2


def test_a_revoked_lease_is_left_at_the_next_boundary_and_given_back() -> None:
    life = Life()
    life.come_up()
    life.complete(1)
    taken = Lease(**{**LEASES[1].__dict__, "revoked": 30.0, "reason": "evaluation needs it"})
    new = life.happen(Holding((LEASES[0], taken)))
    assert [a.command.kind for a in new if isinstance(a, Send)] == ["tell_ranks"]
    for rank in (0, 1):
        life.said(rank, RankDone(step=1, why="paused", time=0.0))
        life.exit(rank, code=0)
    new = life.happen(Holding((LEASES[0], taken)))
    assert [a.leases for a in new if isinstance(a, Release)] == [frozenset({"l1"})]
    assert (life.job.incarnation, life.job.size) == (2, 1)
    assert not life.job.faults()


def test_more_slots_are_taken_at_a_boundary_too() -> None:
    life = Life()
    life.come_up(LEASES[:1])
    life.happen(Holding(LEASES))
    assert life.job.stage == "running", "not before a step of progress"
    life.complete(1)
    life.happen(Holding(LEASES))
    assert (life.job.stage, life.job.stop_why) == ("stopping", "resize")


def test_an_agent_that_comes_back_without_a_rank_lost_it() -> None:
    life = Life()
    life.come_up()
    life.happen(NodeUp("n1", frozenset({(1, 0), (1, 1)})))
    assert life.job.stage == "running"
    life.happen(NodeUp("n1", frozenset({(1, 0)})))
    assert life.job.stage == "stopping"
    assert life.told(Action.FAULT_DETECTED)[0]["kind"] == "node_lost"


def test_a_start_that_cannot_be_carried_out_is_a_fault() -> None:
    life = Life()
    life.happen(Holding(LEASES))
    life.happen(CommandRefused("n1", "start_store", 1, "no port"))
    assert life.job.stage == "none"
    assert life.job.state == JobState.HEALING
    life.happen(Holding(LEASES))
    assert life.job.incarnation == 2
    life.happen(StoreAt(2, "n1", "127.0.0.1", 5))
    life.happen(CommandRefused("n1", "start_ranks", 2, "slot 1 is held"))
    assert life.job.stage == "none"


def test_a_start_that_takes_too_long_is_a_fault() -> None:
    life = Life()
    life.happen(Holding(LEASES))
    life.happen(StoreAt(1, "n1", "127.0.0.1", 5))
    life.happen(Tick(), after=301.0)
    assert life.job.stage == "stopping"
    assert "no start within" in str(life.told(Action.FAULT_DETECTED)[0]["reason"])


def test_the_newest_checkpoint_and_what_fired_go_into_the_next_start() -> None:
    life = Life()
    life.happen(Holding(LEASES))
    new = life.happen(StoreAt(1, "n1", "h", 7, "/ck/step-00000004"))
    assert [a for a in new if isinstance(a, StartSpecs)] == [StartSpecs("h", 7, "/ck/step-00000004")]
    assert not [a for a in life.happen(StoreAt(1, "n1", "h", 7)) if isinstance(a, StartSpecs)], "only once"


def test_exports_follow_publications_and_are_tried_again() -> None:
    life = Life()
    life.come_up()
    life.complete(1)
    for step in (4, 8, 8):
        life.said(0, RankCheckpoint(what="published", step=step, path=f"/ck/{step}", time=0.0))
    assert [(e.step, e.evaluate) for e in life.job.exports] == [(4, False), (8, True)]
    life.happen(ExportEnded(8, None, "disk"))
    assert life.job.exports[1].tries == 1
    assert life.job.exports[1].not_before > life.now
    life.happen(ExportEnded(8, "/ck/8.hf", seconds=1.0), ExportEnded(4, "/ck/4.hf"))
    assert life.job.exports == []
    with_tasks, without = life.told(Action.EXPORT_PUBLISHED)
    assert with_tasks["evaluate"] == {"tasks": ["stdlib_bits_per_byte"], "limit": 7, "num_fewshot": None}
    assert without["evaluate"] is None


def test_done_needs_every_rank() -> None:
    life = Life()
    life.come_up()
    life.complete(*range(1, 11))
    life.said(0, RankDone(step=10, why="completed", time=0.0))
    life.exit(0, code=0)
    assert life.job.state == JobState.RUNNING
    life.said(1, RankDone(step=10, why="completed", time=0.0))
    life.exit(1, code=0)
    assert life.job.state == JobState.DONE
    assert life.commands("stop_store")


def test_counts_with_a_layout() -> None:
    wide = {"workers": {"min": 2, "max": 9}, "parallel": {"tensor": 2}, "batch": {"global": 6, "micro": 2}}
    assert feasible(Life(**wide).job) == (2, 4, 6), "three micro-batches feed three replicas of two ranks"
    assert feasible(Life().job) == (1, 2)


def test_weights_are_counted() -> None:
    model = PretrainConfig.model_validate(RAW).model
    layer = 64 * (2 * 64 + 2 * 64) + 3 * 64 * 96 + 2 * 64
    assert parameters(model, 100) == 2 * layer + 2 * 100 * 64 + 64


def test_a_rank_that_a_signal_ended_is_said_to_have_been_ended_by_it() -> None:
    life = Life()
    life.come_up()
    life.happen(Exited(1, 1, None, 9, False, "/x.py:3: UserWarning: odd\n  warnings.warn("))
    (gone,) = life.told(Action.RANK_EXITED)
    assert gone["reason"] == "ended by SIGKILL"
    assert life.told(Action.FAULT_DETECTED)[0]["reason"] == "ended by SIGKILL"


@pytest.mark.parametrize(
    ("code", "tail", "reason"),
    [
        (13, "a line\n  warnings.warn(", "exited with code 13"),
        (1, "Traceback (most recent call last):\n  File\nValueError: bad", "exited with code 1: ValueError: bad"),
        (2, "data.train: nothing there", "exited with code 2: data.train: nothing there"),
        (0, "bye", ""),
    ],
)
def test_only_an_exception_is_quoted_from_the_log(code: int, tail: str, reason: str) -> None:
    assert exit_reason(Exited(1, 0, code, None, False, tail)) == reason


def test_a_change_costs_little_where_state_has_replicas_and_a_start_with_redo_where_it_has_none() -> None:
    life = Life(faults=[])
    life.come_up()
    assert demand(life.job).transition_seconds == 15.0, "nothing is known of a start yet"
    life.complete(1, 2, 3, 4, 5)
    start = life.job.start_seconds
    assert start is not None
    assert demand(life.job).transition_seconds == start
    life.said(0, RankCheckpoint(what="snapshot", step=3, time=life.now))
    life.exit(1, signal=9)
    assert demand(life.job).faulted
    redone = 2 * life.job.step_seconds
    assert demand(life.job).transition_seconds == pytest.approx(start + redone), "steps 4 and 5 come after the snapshot"
    for rank in life.job.ranks:
        rank.gone, rank.heals = False, True
    life.job.stage = "running"
    assert demand(life.job).transition_seconds == IN_PLACE_SECONDS
