"""The life of a job under arbitrary sequences of what can happen: the rules that no sequence may break."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.events import TERMINAL, Action, JobState
from planner.job_events import (
    Asked,
    Exited,
    Holding,
    JobEvent,
    NodeUp,
    Said,
    Send,
    Started,
    StartSpecs,
    StoreAt,
    Tell,
    Tick,
)
from planner.job_machine import decide
from planner.job_record import JobRecord
from planner.leases import Lease
from planner.messages import RankDone, RankException, RankHello, RankPhase, RankStep
from planner.pretrain_config import PretrainConfig

CONFIG = PretrainConfig.model_validate(
    {
        "name": "p",
        "workers": {"min": 1, "max": 3},
        "model": {"layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "heads": 2, "seq_length": 32},
        "data": {"train": ["stdlib"]},
        "batch": {"global": 6, "micro": 2},
        "optimizer": {"lr": 1.0e-3},
        "steps": 5,
    }
)


def record() -> JobRecord:
    return JobRecord(id="j", name="p", folder="/nowhere", config=CONFIG.to_json(), submitted=0.0)


def lease(number: int, *, revoked: bool = False, node: str = "n1") -> Lease:
    return Lease(
        id=f"l{number}", token=number, holder="job:j", node=node, slots=(number,), granted=0.0, expires=10.0, ttl=10.0,
        revoked=5.0 if revoked else None,
    )  # fmt: skip


def step(number: int, rank: int, world: int, incarnation: int) -> RankStep:
    ids = [i for i in range(6) if i % world == rank]
    return RankStep(
        step=number, loss=1.0 / number, grad_norm=1.0, tokens=6, seconds=0.1, lr=0.1, workers=world, ids=ids,
        incarnation=incarnation, time=float(number),
    )  # fmt: skip


@st.composite
def events(draw: st.DrawFn) -> list[tuple[str, dict[str, Any]]]:
    """Sketches of events; incarnations and ranks are filled in from the record when they are applied."""
    kinds = [
        "hold",
        "hold",
        "store",
        "start",
        "hello",
        "step",
        "step",
        "exit",
        "exception",
        "done",
        "ask",
        "node",
        "tick",
    ]
    found = []
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=60)):
        found.append(
            (
                kind,
                {
                    "rank": draw(st.integers(0, 2)),
                    "old": draw(st.sampled_from([0, 0, 0, 0, 1])),
                    "count": draw(st.integers(0, 3)),
                    "revoked": draw(st.booleans()),
                    "code": draw(st.sampled_from([0, 1, 2, 4, -9, None])),
                    "what": draw(st.sampled_from(["pause", "resume", "cancel", "preempt", "again"])),
                    "step": draw(st.integers(1, 5)),
                    "wait": draw(st.sampled_from([0.1, 1.0, 700.0])),
                },
            )
        )
    return found


def concrete(job: JobRecord, kind: str, a: dict[str, Any]) -> list[JobEvent]:
    inc = job.incarnation - a["old"]
    rank = a["rank"]
    match kind:
        case "hold":
            return [Holding(tuple(lease(n, revoked=a["revoked"] and n == 0) for n in range(a["count"])))]
        case "store":
            return [StoreAt(inc, "n1", "127.0.0.1", 1)]
        case "start":
            return [Started(inc, n, 100 + n) for n in range(job.size)]
        case "hello":
            hello = [
                Said(inc, n, RankHello(token="t", job="j", incarnation=inc, rank=n, pid=n)) for n in range(job.size)
            ]
            return [*hello, *(Said(inc, n, RankPhase(phase="load", step=0, time=0.0)) for n in range(job.size))]
        case "step":
            number = min(job.step + 1, 5) if a["step"] > 1 else a["step"]
            return [Said(inc, n, step(number, n, max(job.size, 1), inc)) for n in range(job.size)]
        case "exit":
            code = a["code"]
            signal = 9 if code == -9 else None
            return [Exited(inc, rank, None if signal else code, signal, False, "last words")]
        case "exception":
            message = RankException(type="RuntimeError", message="no", traceback="", step=1, phase="step", time=0.0)
            return [Said(inc, rank, message)]
        case "done":
            why = "completed" if a["count"] else "preempted"
            return [Said(inc, rank, RankDone(step=5, why=why, time=0.0))]
        case "ask":
            return [Asked(a["what"])]
        case "node":
            alive = frozenset((job.incarnation, n) for n in range(a["count"]))
            return [NodeUp("n1", alive)]
        case _:
            return [Tick()]


@settings(max_examples=300)
@given(events())
def test_whatever_happens(sketches: list[tuple[str, dict[str, Any]]]) -> None:
    job, now = record(), 1.0
    started: list[int] = []
    for kind, arguments in sketches:
        now += arguments["wait"]
        for event in concrete(job, kind, arguments):
            before = job.model_dump_json()
            decision = decide(job, event, now)
            assert job.model_dump_json() == before, "decide does not touch its argument"
            old, job = job, decision.job
            assert job.incarnation >= old.incarnation
            for action in decision.actions:
                if isinstance(action, Send) and action.command.kind == "start_store":
                    started.append(action.command.incarnation)
                if isinstance(action, StartSpecs):
                    assert job.stage in ("starting", "stopping", "none")
            told = [a.event for a in decision.actions if isinstance(a, Tell) and a.event.action is Action.JOB_STATE]
            chain = [old.state, *[JobState(e.new) for e in told]]
            assert [e.old for e in told] == [str(s) for s in chain[:-1]], "each transition begins where the last ended"
            assert chain[-1] == job.state, "no state changes without its event"
            if old.state in TERMINAL and not (isinstance(event, Asked) and event.what == "again"):
                assert job.state == old.state, "a terminal state is not left"
            if job.state in TERMINAL:
                assert job.stage == "none"
                assert not job.alive()
            assert JobRecord.model_validate_json(job.model_dump_json()) == job, (
                "a new coordinator reads what was written"
            )
    fresh = [inc for n, inc in enumerate(started) if inc not in started[:n]]
    assert fresh == sorted(fresh), "incarnations only grow"
