"""A job's faults: seen, judged, cured, recovered from.

``fault.detected`` at the first sight. Where the ranks can, they heal in place (:mod:`planner.job_healing`): judged
when everybody is out of the collective, and the survivors go on. Else the ranks are ended; when the last one is gone
the root is chosen among all that was seen, ``severity.decided`` and ``decision.made`` follow, and the next
incarnation starts from the newest state. ``fault.recovered`` comes with the first completed step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from planner import escalation, job_healing, job_rollback, severity
from planner.detection import Finding, Kind
from planner.errors import ExitCode, one_line
from planner.events import Action, JobState
from planner.job_events import Cordon, Exited, Send
from planner.job_record import FaultRecord, RankRecord, Seen
from planner.job_turn import Turn
from planner.messages import StopAtBoundary, StopRanks, TellRanks
from planner.pretrain_config import FaultKind
from planner.severity import Method, Severity

SETTLE_SECONDS = 0.5
"""How long the echo of a fault (a peer's broken collective) waits for the fault itself."""
_SIGNALS = {9: "sigkill", 15: "sigterm", 11: "sigsegv", 6: "sigabrt", 19: "sigstop", 7: "sigbus", 2: "sigint"}
_OWN_CODES = (ExitCode.BAD_INPUT, ExitCode.MISSING_SERVICE, ExitCode.GIVEN_UP)
"""Exit codes before which a rank prints its reason as its last line."""

_TAKING = frozenset(
    {
        FaultKind.SIGKILL, FaultKind.SIGSTOP, FaultKind.EXCEPTION, FaultKind.EXIT, FaultKind.NCCL_ERROR, FaultKind.HANG,
    }
)  # fmt: skip
"""Injected faults that end or stop the rank."""

_GONE = frozenset({"lost_connection", "node_failure", "preempted"})
"""Failures that are over when the node's agent is back: until then nothing is granted there anyway, and whoever comes
back is welcome without a person's word."""

Ending = Callable[[Turn, JobState, str], None]


# ---------------------------------------------------------------- seen


def exited(turn: Turn, rank: RankRecord, event: Exited) -> None:
    """A rank is gone and had not said that it was done."""
    kind = _SIGNALS.get(event.signal or 0, f"signal {event.signal}") if event.signal else "exit"
    message = exit_reason(event)
    seen = _seen(turn, rank, Method.PROCESS_SUPERVISION, exit_code=event.code, message=message, verdict=event.verdict)
    _note(turn, kind, seen)


def exit_reason(event: Exited) -> str:
    """How a rank ended, in words; empty for a quiet end. The log's last line says why only where an exception ended
    it: after a signal, or an exit from somewhere inside a library, it is whatever was printed last."""
    if event.signal is not None:
        return f"ended by {_SIGNALS.get(event.signal, f'signal {event.signal}').upper()}"
    if event.exit_code is None:
        return "its end was seen, its exit code not (its agent was not its parent)"
    if event.exit_code == 0:
        return ""
    tail = event.tail.strip().splitlines()
    raised = event.exit_code in _OWN_CODES or any(line.startswith("Traceback (most recent call last)") for line in tail)
    last = f": {tail[-1][:300]}" if tail and raised else ""
    return f"exited with code {event.exit_code}{last}"


def exception(turn: Turn, rank: RankRecord, message: Any) -> None:
    """A rank is about to leave because of an exception."""
    rank.doomed = True
    seen = _seen(
        turn, rank, Method.EXCEPTION_PROPAGATION, exception_type=message.type, message=message.message[:1000],
        collective=message.collective, step=message.step, verdict=message.verdict,
    )  # fmt: skip
    _note(turn, "exception", seen)


def node_lost(turn: Turn, rank: RankRecord, reason: str) -> None:
    """A rank's node is gone: its lease ended or its agent came back without it."""
    rank.gone = True
    _note(turn, "node_lost", _seen(turn, rank, Method.NODE_HEALTH, message=f"lost connection: {reason}"))


def node_broken(turn: Turn, node: str, reason: str) -> None:
    """The node's own checks found it broken while its ranks still run: the job goes on without them."""
    hit = [rank for rank in turn.job.alive() if rank.node == node]
    if hit and turn.job.stage not in ("none", "stopping"):
        _note(turn, "node_broken", _seen(turn, hit[0], Method.NODE_HEALTH, message=reason))


def refused(turn: Turn, rank: RankRecord, reason: str) -> None:
    """An agent could not start what the incarnation needs."""
    _note(turn, "start_failed", _seen(turn, rank, Method.PROCESS_SUPERVISION, message=reason))


def slow_start(turn: Turn, seconds: float) -> None:
    """The incarnation did not come up within its limit."""
    late = next((rank for rank in turn.job.ranks if not rank.hello), turn.job.ranks[0])
    _note(turn, "hang", _seen(turn, late, Method.ONLINE_STATISTICS, message=f"no start within {seconds:.0f} s"))


def stuck(turn: Turn, finding: Finding) -> None:
    """Online statistics: a warning names the straggler, a hang is a fault."""
    job = turn.job
    rank = job.rank(finding.rank)
    if rank is None or job.stage != "running":
        return
    details: dict[str, Any] = {"rank": rank.rank, "node": rank.node, "step": finding.step, "phase": finding.phase}
    details |= {"seconds": finding.seconds, "limit": finding.limit}
    if finding.kind is Kind.STRAGGLER:
        turn.tell(Action.RANK_STRAGGLER, reason=finding.reason, **details)
        return
    turn.tell(Action.RANK_HUNG, reason=finding.reason, **details)
    # A rank that is found late may be a victim that waits for the one at fault. So nobody is ended for it: all are
    # told to leave the collective, and the one at fault is the one that does not. If all do, it was a false alarm or
    # a broken link, and they go on in place.
    place = "unknown" if job_healing.possible(job) else finding.collective
    _note(turn, "hang", _seen(turn, rank, Method.ONLINE_STATISTICS, message=finding.reason, collective=place))


def rank_left(turn: Turn, rank: RankRecord, message: Any) -> None:
    """A rank is out of its collective and waits: because of itself, or because of a peer."""
    if message.own:
        turn.tell(
            Action.RANK_EXCEPTION, reason=f"{message.type}: {message.message}"[:500], time=message.time,
            rank=rank.rank, node=rank.node, step=message.step + 1, phase=message.phase, collective=message.collective,
            traceback=message.traceback,
        )  # fmt: skip
    # Who was made to leave says nothing of itself: that is the echo of a broken connection.
    kind, place = (message.type, message.collective) if message.own else ("ConnectionError", "unknown")
    seen = _seen(
        turn, rank, Method.EXCEPTION_PROPAGATION, exception_type=kind, message=message.message[:1000],
        collective=place, step=message.step + 1, verdict=message.verdict if message.own else None,
    )  # fmt: skip
    if message.own or turn.job.stage != "leaving":
        _note(turn, "exception", seen)


def note_silent(turn: Turn, ranks: Sequence[RankRecord]) -> None:
    """Ranks that did not leave the collective when they were told to: they hang."""
    for rank in ranks:
        seen = _seen(turn, rank, Method.ONLINE_STATISTICS, message="it does not leave the collective")
        if turn.job.fault is not None:
            turn.job.fault.seen.append(seen)


def heal_failed(turn: Turn, reason: str) -> None:
    """Healing in place came to no end: fall back to starting all ranks."""
    job = turn.job
    if job.fault is None:
        _open(turn, "reform_failed", _seen(turn, job.ranks[0], Method.ONLINE_STATISTICS, message=reason))
    assert job.fault is not None
    job.fault.seen.append(_seen(turn, job.ranks[0], Method.ONLINE_STATISTICS, message=reason))
    act(turn)


def leave_slots(turn: Turn, reason: str) -> None:
    """The job cannot go on with what the allocator leaves it: publish at the step's end and make room."""
    job = turn.job
    turn.stage("stopping")
    job.stop_why = "resize"
    turn.tell(Action.INCARNATION_STOPPING, reason=reason, why="resize")
    for node in job.nodes():
        message = StopAtBoundary(why="paused")
        turn.do(Send(node, TellRanks(job=job.id, incarnation=job.incarnation, message=message)))


def injected(turn: Turn, index: int, time: float, step: int) -> None:
    """An injected fault fires: if it is one that takes the rank, what is detected next is it and occurred then."""
    job = turn.job
    asked = job.settings.faults[index]
    if asked.kind not in _TAKING:
        return
    fault = job.fault
    if fault is None or fault.injected is not None or time > fault.detected + SETTLE_SECONDS:
        job.firing = (index, time, step)
        return
    # Its echo on another node was heard first.
    fault.injected, fault.kind, fault.rank = index, asked.kind.value, asked.rank
    fault.occurred, fault.step = time, step


def _seen(turn: Turn, rank: RankRecord, method: Method, **more: Any) -> Seen:
    step = more.pop("step", None) or max(rank.step, turn.job.step + 1)
    return Seen(
        method=method, rank=rank.rank, origin=rank.origin, node=rank.node, time=turn.now, step=int(step), **more
    )


def _note(turn: Turn, kind: str, seen: Seen) -> None:
    """Add to the fault at hand, or open one: then the ranks heal in place, or those that are left are ended."""
    job = turn.job
    seen.kind = kind
    healing = job.stage == "stopping" and job.stop_why == "heal"
    if job.stage == "stopping" and job.stop_why == "cancel":
        return
    at_hand = healing or job.stage == "leaving" or job.settle_until is not None
    if job.fault is not None and not at_hand:
        _supersede(turn)
    if job.fault is None:
        _open(turn, kind, seen)
    assert job.fault is not None
    job.fault.seen.append(seen)
    if healing:
        return
    if job_healing.possible(job):
        if not (job.boundary and _is_echo(seen)):
            job_healing.begin(turn, [] if _is_echo(seen) else [seen.rank], overdue=kind == "hang")
        else:
            # A peer that turned to the next incarnation first looks like a broken one for a moment.
            job.settle_until = job.settle_until or turn.now + SETTLE_SECONDS
    elif _is_echo(seen):
        job.settle_until = job.settle_until or turn.now + SETTLE_SECONDS
    else:
        act(turn)


def _is_echo(seen: Seen) -> bool:
    """Whether this may be only what a peer notices of another rank's end: a broken connection or a time-out."""
    found = _classified(seen)
    broken = ("connection_error", "network_error", "nccl_timeout", "nccl_remote_error")
    return found.cascade or (seen.method == Method.EXCEPTION_PROPAGATION and found.name in broken)


def _supersede(turn: Turn) -> None:
    """A new fault before the first step after the last one: the last one was never recovered from."""
    job = turn.job
    assert job.fault is not None
    job.history.append(job.fault)
    job.fault = None


def _open(turn: Turn, kind: str, seen: Seen) -> None:
    job = turn.job
    index, occurred, step = job.firing or (None, None, seen.step)
    job.firing = None
    origin = seen.origin
    if index is not None:
        kind, origin = job.settings.faults[index].kind.value, job.settings.faults[index].rank
    job.fault = FaultRecord(detected=turn.now, occurred=occurred, step=step, rank=origin, kind=kind, injected=index)
    known: dict[str, Any] = {"occurred": occurred} if occurred is not None else {}
    turn.move(JobState.HEALING, one_line(f"{kind} of rank {origin} at step {step}"))
    turn.tell(
        Action.FAULT_DETECTED,
        reason=one_line(seen.message)[:500],
        rank=origin,
        seen_by=seen.origin,
        node=seen.node,
        step=step,
        kind=kind,
        method=seen.method,
        exit_code=seen.exit_code,
        **known,
    )


def act(turn: Turn) -> None:
    """End the ranks that are left; the cure is chosen when the last is gone."""
    turn.job.settle_until = None
    job_healing.dismiss_joiners(turn)
    stop_ranks(turn, "heal", 0.0)


def stop_ranks(turn: Turn, why: str, grace_seconds: float) -> None:
    """End all ranks of the incarnation: SIGTERM, SIGKILL after the grace."""
    job = turn.job
    if job.stage == "store":  # none has been started
        for rank in job.ranks:
            rank.gone = True
    if job.stage != "stopping" or job.stop_why != why:
        turn.stage("stopping")
        job.stop_why = why
    for node in sorted({rank.node for rank in job.alive()}):
        turn.do(Send(node, StopRanks(job=job.id, incarnation=job.incarnation, grace_seconds=grace_seconds)))


# ---------------------------------------------------------------- judged


def _detection(seen: Seen) -> severity.Detection:
    return severity.Detection(
        method=Method(seen.method),
        rank=seen.rank,
        node=seen.node,
        time=seen.time,
        exit_code=seen.exit_code,
        exception_type=seen.exception_type,
        message=seen.message,
        collective=seen.collective,
    )


def _classified(seen: Seen) -> severity.Classification:
    """The row of what was seen; a verdict on its log decides where it is trusted and names more than an echo."""
    told = seen.verdict
    trusted = told is not None and told.confidence >= severity.TRUSTED and told.root not in severity.ECHOES
    found = severity.classify(_detection(seen), told.root if told is not None and trusted else None)
    if not trusted or told is None or found.name != told.root:
        return found
    return replace(found, reason=f"{told.root}: {told.evidence or seen.message}"[:300])


def _told_verdict(seen: Seen) -> dict[str, Any]:
    """What the log says, for the event: below the trusted confidence it only informs."""
    if seen.verdict is None:
        return {}
    return {"diagnosis": seen.verdict.root, "confidence": round(seen.verdict.confidence, 3),
            "evidence": seen.verdict.evidence[:300]}  # fmt: skip


def root_seen(turn: Turn) -> Seen | None:
    """What was seen of the root of the fault at hand."""
    fault = turn.job.fault
    return _root(fault)[2] if fault is not None and fault.seen else None


def judge(turn: Turn, *, process_alive: bool, can_heal: bool) -> escalation.Cure:
    """Choose the root and the cure of the fault at hand, and say both."""
    job = turn.job
    fault = job.fault
    assert fault is not None
    if job_rollback.plan_if_not_finite(turn):
        return escalation.Cure.GIVE_UP if job.given_up else escalation.Cure.RESTART_ALL
    root, verdict, seen = _root(fault)
    if fault.injected is None:
        fault.rank, fault.step, fault.kind = seen.origin, seen.step, seen.kind or fault.kind
    final = _hopeless(fault)
    judged = Severity.STOP if final else verdict.severity
    fault.severity, fault.cause = judged.value, verdict.name
    fault.reason = one_line(verdict.reason)
    turn.tell(
        Action.SEVERITY_DECIDED, reason=fault.reason, severity=judged.value, cause=verdict.name,
        rank=seen.origin, node=root.node, step=seen.step, **_told_verdict(seen),
    )  # fmt: skip
    state = escalation.State.from_json(job.escalation)
    event = escalation.FaultSeen(
        severity=judged,
        root=verdict.name,
        final=final,
        cause=f"{verdict.name} ({fault.reason})",
        node=seen.node,
        process_alive=process_alive,
        can_heal=can_heal,
        other_nodes=len(job.nodes()) > 1,
    )
    limits = escalation.Limits(incarnations=job.settings.health.incarnations_without_progress)
    decision = escalation.decide(state, event, limits)
    job.escalation = decision.state.to_json()
    chosen = decision.cure or escalation.Cure.RESTART_ALL
    fault.cure = chosen.value
    turn.tell(Action.DECISION, reason=decision.reason, cure=chosen.value, rank=seen.origin, node=seen.node)
    if chosen is escalation.Cure.ISOLATE and verdict.name not in _GONE:
        turn.do(Cordon(seen.node, decision.reason))
    elif chosen is escalation.Cure.GIVE_UP:
        job.given_up = _bad_input(fault) if _is_bad_input(fault) else decision.reason
    return chosen


def cure(turn: Turn, end: Ending) -> None:
    """All ranks are gone: choose what follows; the next incarnation itself starts when slots are there."""
    job = turn.job
    fault = job.fault
    assert fault is not None
    settled = (
        job_rollback.CURE,
        escalation.Cure.ISOLATE.value,
        escalation.Cure.RESTART_ALL.value,
        escalation.Cure.GIVE_UP.value,
    )
    if fault.cure not in settled:
        judge(turn, process_alive=False, can_heal=False)
    if job.given_up:
        end(turn, JobState.FAILED, job.given_up)
        return
    job.stop_why = ""


def _is_bad_input(fault: FaultRecord) -> bool:
    return any(item.exit_code == ExitCode.BAD_INPUT or item.exception_type == "BadInputError" for item in fault.seen)


def _hopeless(fault: FaultRecord) -> bool:
    return _is_bad_input(fault) or any(item.exception_type == "GivenUpError" for item in fault.seen)


def _root(fault: FaultRecord) -> tuple[severity.Detection, severity.Classification, Seen]:
    pairs = [(_detection(seen), seen) for seen in fault.seen]
    detection, verdict = severity.root_cause([(detection, _classified(seen)) for detection, seen in pairs])
    seen = next(seen for candidate, seen in pairs if candidate == detection)
    return detection, verdict, seen


def _bad_input(fault: FaultRecord) -> str:
    told = sorted(fault.seen, key=lambda seen: seen.exception_type != "BadInputError")  # rather than that it exited
    said = [seen.message for seen in told if seen.message]
    return f"bad input: {said[0] if said else 'a rank refused its input'}"


# ---------------------------------------------------------------- recovered


def recovered(turn: Turn, step: int, time: float) -> None:
    """The first step after a fault is complete: the fault is over."""
    job = turn.job
    fault = job.fault
    if fault is None:
        return
    fault.recovered = time
    seconds = fault.summary()["recovered_seconds"]
    if job.former:  # the survivors went on in their processes
        job.heal_seconds = max(seconds, 0.5 * (job.heal_seconds or 0.0))
    turn.tell(
        Action.FAULT_RECOVERED, time=time, seconds=seconds, step=step, rank=fault.rank, kind=fault.kind,
        cure=fault.cure, fault_step=fault.step,
    )  # fmt: skip
    job.history.append(fault)
    job.fault = None


def close_as_done(turn: Turn) -> None:
    """The job finished although a fault was open (it hit a rank that had done its work)."""
    job = turn.job
    if job.fault is not None:
        job.history.append(job.fault)
        job.fault = None
