"""What ranks say becomes lines, events and the job's progress."""

from __future__ import annotations

from typing import Any

from planner import escalation, job_faults, job_healing, job_leaving, job_rates
from planner.events import Action, JobState
from planner.job_events import Said
from planner.job_record import ExportRecord, RankRecord, StepRecord
from planner.job_turn import Turn

_CHECKPOINTS = {
    "snapshot": Action.SNAPSHOT_TAKEN,
    "saved": Action.CHECKPOINT_SAVED,
    "published": Action.CHECKPOINT_PUBLISHED,
    "failed": Action.CHECKPOINT_FAILED,
    "refused": Action.CHECKPOINT_REFUSED,
    "loaded": Action.CHECKPOINT_LOADED,
    "deleted": Action.CHECKPOINT_DELETED,
}


def said(turn: Turn, event: Said) -> None:
    """Take a message of a rank of the present incarnation."""
    rank = turn.job.rank(event.rank)
    assert rank is not None
    message = event.message
    match message.kind:
        case "hello":
            rank.heals = message.heals
            _hello(turn, rank, int(message.pid))
        case "left":
            job_healing.left(turn, rank, message)
        case "leaving":
            job_leaving.told(turn, rank)
        case "reformed":
            job_healing.reformed(turn, rank, message)
        case "phase":
            rank.phase, rank.step = message.phase, message.step
            _started(turn)
        case "step":
            _step(turn, rank, message)
        case "exception":
            _exception(turn, rank, message)
        case "fault":
            _fault(turn, rank, message)
        case "checkpoint":
            checkpoint(turn, message, rank=rank.rank)
        case "done":
            rank.done = message.why
            job_healing.finished(turn)
        case "note":
            _note(turn, rank, message)


def _hello(turn: Turn, rank: RankRecord, pid: int) -> None:
    rank.hello, rank.pid = True, pid
    _started(turn)


def _started(turn: Turn) -> None:
    """The incarnation stands when every rank said hello, has met the others and goes on to load or train."""
    job = turn.job
    if job.stage == "starting" and all(rank.hello and rank.phase not in ("", "start") for rank in job.ranks):
        turn.stage("running")
        turn.tell(Action.INCARNATION_STARTED, workers=job.size, nodes=job.nodes())


def _step(turn: Turn, rank: RankRecord, message: Any) -> None:
    """A step is complete when rank 0 said so for all, or every rank of the incarnation for itself."""
    job = turn.job
    if message.late:
        _late(turn, message)
        return
    if message.step <= job.told_step:
        return  # said again after a re-form
    part = job.partial.setdefault(message.step, StepRecord())
    if rank.rank in part.ranks:
        return
    part.ranks.append(rank.rank)
    part.ids.extend(message.ids)
    for name in ("loss", "grad_norm", "valid_loss"):
        if (value := getattr(message, name)) is not None:
            setattr(part, name, value)
    part.tokens, part.workers = message.tokens, message.workers
    part.seconds, part.time = max(part.seconds, message.seconds), max(part.time, message.time)
    part.redo_seconds = max(part.redo_seconds, message.phases.get("redo", 0.0))
    if message.batch:
        # Rank 0 speaks for all: the step's agreement has counted each micro-batch of the global batch once.
        part.ids = list(message.batch)
    if message.batch or len(part.ranks) == job.size:
        job.partial = {step: other for step, other in job.partial.items() if step > message.step}
        job.told_step = message.step
        _complete(turn, message.step, part)


def _late(turn: Turn, message: Any) -> None:
    """A step of an earlier incarnation whose rank ended unheard: its lines, and no progress of this incarnation."""
    job = turn.job
    if message.step > job.step and message.incarnation < job.incarnation:
        part = StepRecord(
            ids=list(message.batch), loss=message.loss, grad_norm=message.grad_norm, valid_loss=message.valid_loss,
            tokens=message.tokens, workers=message.workers, seconds=message.seconds, time=message.time,
        )  # fmt: skip
        _write(turn, message.step, part, message.incarnation)
        job.step = message.step


def _write(turn: Turn, step: int, part: StepRecord, incarnation: int) -> None:
    measured = {} if part.valid_loss is None else {"valid_loss": part.valid_loss}
    measured |= {"redo_seconds": part.redo_seconds} if part.redo_seconds else {}
    turn.write("samples.jsonl", step=step, ids=sorted(part.ids))
    turn.write(
        "metrics.jsonl",
        step=step,
        loss=part.loss,
        grad_norm=part.grad_norm,
        tokens=part.tokens,
        seconds=part.seconds,
        workers=part.workers,
        incarnation=incarnation,
        **measured,
    )


def _complete(turn: Turn, step: int, part: StepRecord) -> None:
    job = turn.job
    _write(turn, step, part, job.incarnation)
    job.step, job.loss, job.step_seconds = step, part.loss, part.seconds
    job.valid_loss = part.valid_loss if part.valid_loss is not None else job.valid_loss
    state = escalation.State.from_json(job.escalation)
    job.escalation = escalation.decide(state, escalation.StepCompleted(step)).state.to_json()
    if job.progressed:
        job_rates.measure(job, part.workers, part.seconds)
    else:
        job.progressed = True
        if job.began:  # all ranks were started, not re-formed in place
            job.start_seconds, job.began = turn.now - job.began, 0.0
        turn.tell(Action.STEP_COMPLETED, time=part.time, step=step, seconds=part.seconds, workers=part.workers)
        # Ranks that end or leave because of a fault may still say that the step before it is complete: that is no
        # recovery, and must not close the fault that is just being dealt with.
        if job.stage in ("running", "reforming") and job.settle_until is None:
            job_faults.recovered(turn, step, part.time)
            turn.move(JobState.RUNNING, "")


def _exception(turn: Turn, rank: RankRecord, message: Any) -> None:
    turn.tell(
        Action.RANK_EXCEPTION,
        reason=f"{message.type}: {message.message}"[:500],
        time=message.time,
        rank=rank.rank,
        node=rank.node,
        step=message.step,
        phase=message.phase,
        collective=message.collective,
        traceback=message.traceback[-4000:],
    )
    job_faults.exception(turn, rank, message)


def _fault(turn: Turn, rank: RankRecord, message: Any) -> None:
    job = turn.job
    if message.index not in job.fired:
        job.fired.append(message.index)
    faults = job.settings.faults
    kind = faults[message.index].kind.value if message.index < len(faults) else "unknown"
    turn.tell(
        Action.FAULT_INJECTED,
        time=message.time,
        index=message.index,
        kind=kind,
        rank=rank.origin,
        step=message.step,
        phase=message.phase,
        micro_batch=message.micro_batch,
    )
    if message.index < len(faults):
        job_faults.injected(turn, message.index, message.time, message.step)


def checkpoint(turn: Turn, message: Any, *, rank: int | None = None) -> None:
    """What became of a checkpoint, told by a rank or (without ``rank``) by a persister, which may repeat itself."""
    job = turn.job
    action = _CHECKPOINTS.get(message.what)
    if action is None or (rank is None and message.what == "published" and message.step in job.published):
        return
    details = {"rank": rank, "seconds": message.seconds, "stall_seconds": message.stall_seconds, "path": message.path}
    known = {name: value for name, value in details.items() if value is not None}
    turn.tell(action, reason=message.reason, time=message.time, step=message.step, **known)
    if message.what in ("saved", "published") and message.seconds is not None:
        job.save_seconds = max(message.seconds, 0.5 * (job.save_seconds or 0.0))
    if message.what == "snapshot":
        job.snapshot_step = message.step
    if message.what == "deleted" and message.step in job.published:
        job.published.remove(message.step)
    if message.what == "published" and message.path:
        _published(turn, message.step, message.path)


def _published(turn: Turn, step: int, path: str) -> None:
    job = turn.job
    again = step in job.published
    job.published = sorted({*job.published, step})
    if again or not job.settings.checkpoint.export:
        return
    job.counted += 1
    evaluate = job.settings.evaluate
    due = bool(evaluate.tasks) and (job.counted % evaluate.every_checkpoints == 0 or step == job.settings.steps)
    job.exports.append(ExportRecord(step=step, path=path, evaluate=due))


def _note(turn: Turn, rank: RankRecord, message: Any) -> None:
    try:
        action = Action(message.action)
    except ValueError:
        action = Action.MESSAGE_REFUSED
    reserved = {"time", "action", "job", "incarnation", "old", "new", "reason", "rank"}
    details = {key: value for key, value in message.details.items() if key not in reserved}
    turn.tell(action, reason=message.reason, time=message.time, rank=rank.rank, **details)
