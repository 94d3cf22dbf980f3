"""The life of a pretraining job as a pure function: ``decide(job, event, now) -> Decision(job, actions)``.

The shell (``pretrain/supervisor.py``) turns what agents, ranks and people say into events, writes the lines and the
new record, and only then sends the commands; so a coordinator that dies anywhere repeats at most what is harmless.
Incarnations only grow. Whatever a rank of an earlier incarnation says is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from planner import escalation, job_faults, job_healing, job_leaving, job_progress, job_rollback
from planner.events import Action, JobState
from planner.job_events import (
    Asked,
    CommandRefused,
    Exited,
    ExportEnded,
    Holding,
    JobAction,
    JobEvent,
    NodeBroken,
    NodeLeaving,
    NodeUp,
    Persisted,
    Release,
    Said,
    Send,
    Spiked,
    Started,
    StartSpecs,
    StoreAt,
    Stuck,
    Tick,
)
from planner.job_rates import feasible
from planner.job_record import JobRecord, RankRecord
from planner.job_turn import Turn
from planner.leases import Lease
from planner.messages import StartStore, StopAtBoundary, StopRanks, StopStore, TellRanks

RESEND_SECONDS = 5.0
"""Seconds after which an order to stop is given again (it may have been lost with an agent)."""
EXPORT_TRIES = 3
EXPORT_PAUSE = 5.0
"""Seconds before the second try of a failed export; doubled for each further one."""


@dataclass(frozen=True)
class Decision:
    """The job as it is afterwards, and what must be done, in order."""

    job: JobRecord
    actions: tuple[JobAction, ...]


def decide(job: JobRecord, event: JobEvent, now: float) -> Decision:
    """What an event changes. Pure: ``job`` is not touched, ``now`` is in seconds since the epoch."""
    return decide_all(job, [event], now)


def decide_all(job: JobRecord, events: Iterable[JobEvent], now: float) -> Decision:
    """The same for several events at the same time, in order."""
    turn = Turn(job.model_copy(deep=True), now)
    for event in events:
        again = isinstance(event, Asked) and event.what == "again"
        if not turn.job.over or again or isinstance(event, (ExportEnded, Holding, Exited, Persisted)):
            _take(turn, event)
    return Decision(turn.job, tuple(turn.actions))


def _take(turn: Turn, event: JobEvent) -> None:
    job = turn.job
    match event:
        case Holding():
            _on_holding(turn, event)
        case StoreAt():
            if event.incarnation == job.incarnation and job.stage == "store":
                turn.stage("starting")
                job.store_host, job.store_port = event.host, event.port
                job_rollback.resumed(turn, event.resume_step, event.skip_to)
                turn.do(StartSpecs(event.host, event.port, event.resume))
            elif event.node == job.store_node:
                job.store_host, job.store_port = event.host, event.port
        case Started():
            _on_started(turn, event)
        case Said():
            _on_said(turn, event)
        case Persisted():
            job_progress.checkpoint(turn, event.message)
        case Exited():
            _on_exited(turn, event)
        case CommandRefused():
            _on_refused(turn, event)
        case NodeUp():
            _on_node_up(turn, event)
        case NodeLeaving():
            job_leaving.node(turn, event.node)
        case NodeBroken():
            job_faults.node_broken(turn, event.node, event.reason)
        case Asked():
            _on_asked(turn, event)
        case Stuck():
            job_faults.stuck(turn, event.finding)
        case Spiked():
            job_rollback.spiked(turn, event.spike)
        case ExportEnded():
            _on_export(turn, event)
        case Tick():
            _on_tick(turn)
    _settle(turn)


def _on_said(turn: Turn, event: Said) -> None:
    """What a rank says counts if it is one of the present incarnation, under its number now or before the re-form."""
    job = turn.job
    if event.seq:
        if event.seq <= job.heard.get(str(event.pid), 0):
            return
        job.heard[str(event.pid)] = event.seq
    rank = job_healing.translate(job, event.incarnation, event.rank)
    if rank is None or rank.gone:
        return
    if rank in job.joiners:
        job_healing.said(turn, rank, event)
    else:
        job_progress.said(turn, replace(event, incarnation=job.incarnation, rank=rank.rank))


# ---------------------------------------------------------------- slots


def _on_holding(turn: Turn, event: Holding) -> None:
    job = turn.job
    if job.over:
        if event.leases and not job.alive():
            turn.do(Release())
        return
    held = {lease.id for lease in event.leases}
    if job.stage == "none":
        _release_idle(turn, event.leases)
        _try_to_start(turn, event)
        return
    for rank in job.alive():
        if rank.lease not in held:
            job_faults.node_lost(turn, rank, "its lease ended")
    for joiner in [one for one in job.joiners if one.lease not in held]:
        job_healing.joiner_gone(turn, joiner)
    job.parting = [one for one in job.parting if one.lease in held]
    if all(rank.heals for rank in job.ranks) and job.stage in ("running", *job_healing.STAGES):
        if job_healing.possible(job):
            job_healing.follow(turn, event.leases)
        job_healing.release_parted(turn, event.leases)
    elif job.stage in ("starting", "running", "store"):
        _follow_allocator(turn, event.leases)


def _release_idle(turn: Turn, leases: Sequence[Lease]) -> None:
    """Nothing runs: what is being taken back goes at once, and all of it when a person paused the job."""
    paused = turn.job.wanted != "run"
    back = frozenset(lease.id for lease in leases if paused or lease.revoked is not None)
    if back:
        turn.do(Release(back))


def _try_to_start(turn: Turn, event: Holding) -> None:
    job = turn.job
    if job.wanted != "run":
        return
    slots = [(lease, slot) for lease, slot in _slots(event.leases) if lease.node not in job.leaving_nodes]
    fitting = [count for count in feasible(job) if count <= len(slots)]
    if fitting:
        _start(turn, slots[: fitting[-1]])
        return
    missing = f"it needs {min(feasible(job), default=job.settings.workers.min)} slots and has {len(slots)}"
    turn.move(JobState.WAITING, event.reason or missing)


def _slots(leases: Sequence[Lease]) -> list[tuple[Lease, int]]:
    """Usable slots, those of a lease together, nodes together: neighbours in rank share a node where they can."""
    usable = [lease for lease in leases if lease.revoked is None]
    return [(lease, slot) for lease in sorted(usable, key=lambda x: (x.node, x.token)) for slot in lease.slots]


def _start(turn: Turn, slots: Sequence[tuple[Lease, int]]) -> None:
    """Begin a new incarnation on these slots."""
    job = turn.job
    job.incarnation += 1
    job.ranks = [
        RankRecord(rank=n, origin=n, node=lease.node, slot=slot, lease=lease.id, lease_token=lease.token)
        for n, (lease, slot) in enumerate(slots)
    ]
    job.size, job.partial, job.progressed, job.stop_why = len(slots), {}, False, ""
    job.heard = {}
    job.began = turn.now
    job.told_step, job.former, job.renamed, job.boundary, job.due = 0, 0, {}, False, None
    state = escalation.State.from_json(job.escalation)
    job.escalation = escalation.decide(state, escalation.RanksStarted()).state.to_json()
    if job.started is None:
        job.started = turn.now
    old, job.store_node = job.store_node, job.ranks[0].node
    if old is not None and old != job.store_node:
        turn.do(Send(old, StopStore(job=job.id)))
    turn.stage("store")
    where = ", ".join(f"{rank.node}/{rank.slot}" for rank in job.ranks)
    turn.move(JobState.STARTING, f"incarnation {job.incarnation} on {where}")
    turn.do(Send(job.store_node, StartStore(job=job.id, incarnation=job.incarnation)))


def _follow_allocator(turn: Turn, leases: Sequence[Lease]) -> None:
    """Shrink when a lease is being taken back, grow when there are enough new slots: at the next step's end."""
    job = turn.job
    mine = {rank.lease for rank in job.ranks}
    leaving = [lease for lease in leases if lease.revoked is not None and lease.id in mine]
    if leaving:
        _stop_at_boundary(turn, "resize", f"{leaving[0].node} takes slots back: {leaving[0].reason}")
        return
    best = max((count for count in feasible(job) if count <= len(_slots(leases))), default=0)
    if best > job.size and job.stage == "running" and job.progressed:
        _stop_at_boundary(turn, "resize", f"grows from {job.size} to {best} ranks")
    unused = frozenset(lease.id for lease in leases if lease.revoked is not None and lease.id not in mine)
    if unused:
        turn.do(Release(unused))


# ---------------------------------------------------------------- ranks come and go


def _on_started(turn: Turn, event: Started) -> None:
    rank = job_healing.translate(turn.job, event.incarnation, event.rank)
    if rank is not None:
        rank.pid = event.pid
        turn.tell(Action.RANK_STARTED, rank=rank.rank, node=rank.node, slot=rank.slot, pid=event.pid)


def _on_exited(turn: Turn, event: Exited) -> None:
    job = turn.job
    if job_healing.parted(turn, event.incarnation, event.rank):
        return
    rank = job_healing.translate(job, event.incarnation, event.rank)
    if rank is None or rank.gone:
        return
    if rank in job.joiners:
        job_healing.joiner_gone(turn, rank)
        return
    rank.gone = True
    turn.tell(
        Action.RANK_EXITED,
        reason=job_faults.exit_reason(event),
        rank=rank.rank,
        node=rank.node,
        exit_code=event.exit_code,
        signal=event.signal,
        asked=event.asked,
    )
    if not (rank.done and event.code in (0, 4, None)):
        job_faults.exited(turn, rank, event)


def _on_refused(turn: Turn, event: CommandRefused) -> None:
    job = turn.job
    if event.command == "start_ranks":
        job_healing.forget(job, event.node)
        job.join_after = turn.now + job_healing.JOIN_PAUSE
    elif event.command == "start_store" and job.store_node == event.node and job.stage not in ("none", "store"):
        job_healing.start_store(turn, event.node)
    due = {"start_store": "store", "start_ranks": "starting"}.get(event.command)
    if due == job.stage and event.incarnation in (None, job.incarnation):
        rank = next((rank for rank in job.ranks if rank.node == event.node), job.ranks[0])
        if event.command == "start_ranks":
            for other in job.ranks:
                # It never came to be; its exit will not be reported.
                other.gone = other.gone or (other.node == event.node and not other.pid)
        job_faults.refused(turn, rank, f"{event.command} on {event.node}: {event.reason}")


def _on_node_up(turn: Turn, event: NodeUp) -> None:
    """An agent is back: whatever it does not run any more is gone, and what it was told meanwhile is lost."""
    job = turn.job
    if event.ready:
        job.leaving_nodes = [node for node in job.leaving_nodes if node != event.node]
    if job.stage == "store":
        if job.store_node == event.node:
            turn.do(Send(event.node, StartStore(job=job.id, incarnation=job.incarnation)))
        return
    if event.ready and job.store_node == event.node and job.stage in ("running", *job_healing.STAGES):
        job_healing.start_store(turn, event.node)  # the former one ended with the agent that had started it
    for rank in job.alive():
        if rank.node == event.node and (job.incarnation, rank.rank) not in event.ranks:
            rank.gone = True
            if not rank.done:
                job_faults.node_lost(turn, rank, "its agent came back without it")
    for incarnation in {incarnation for incarnation, _ in event.ranks}:
        if incarnation != job.incarnation or job.stage == "stopping":
            turn.do(Send(event.node, StopRanks(job=job.id, incarnation=incarnation, grace_seconds=0.0)))


# ---------------------------------------------------------------- people


def _on_asked(turn: Turn, event: Asked) -> None:
    job = turn.job
    if event.what == "again":
        _go_on(turn)
        return
    action = {
        "cancel": Action.JOB_CANCEL_REQUESTED,
        "pause": Action.JOB_PAUSE_REQUESTED,
        "resume": Action.JOB_RESUME_REQUESTED,
        "preempt": Action.JOB_PREEMPT_REQUESTED,
    }[event.what]
    turn.tell(action, reason="a person asked for it")
    if job.wanted == "cancel":
        return
    job.wanted = {"resume": "run"}.get(event.what, event.what)
    if event.what == "resume":
        if job.state == JobState.PAUSED:
            turn.move(JobState.QUEUED, "resumed")
        return
    if job.stage == "none":
        _come_to_rest(turn)
    elif event.what == "cancel":
        stop_now(turn, "cancel", job.settings.health.grace_seconds)
    else:
        _stop_at_boundary(turn, event.what, f"a person asked for it ({event.what})")


def _go_on(turn: Turn) -> None:
    """A preempted job was submitted again: it goes on where it was."""
    job = turn.job
    if job.state == JobState.PREEMPTED:
        job.wanted, job.ended, job.accounted = "run", None, False
        turn.tell(Action.JOB_RESUME_REQUESTED, reason="submitted again")
        turn.move(JobState.QUEUED, "submitted again after a preemption")


# ---------------------------------------------------------------- stopping


def stop_now(turn: Turn, why: str, grace_seconds: float) -> None:
    """End all ranks of the incarnation: SIGTERM, SIGKILL after the grace."""
    job_faults.stop_ranks(turn, why, grace_seconds)


def _stop_at_boundary(turn: Turn, why: str, reason: str) -> None:
    """Let the ranks finish their step, publish and leave; before the first step there is nothing to publish."""
    job = turn.job
    if job.stage == "stopping" or job.stage in job_healing.STAGES:
        return  # what heals in place stops when it has healed
    job_healing.dismiss_joiners(turn)
    if job.stage != "running":
        stop_now(turn, why, 0.0)
        return
    turn.stage("stopping")
    job.stop_why = why
    turn.tell(Action.INCARNATION_STOPPING, reason=reason, why=why)
    word = "preempted" if why == "preempt" else "paused"
    message = StopAtBoundary(why=word)
    for node in job.nodes():
        turn.do(Send(node, TellRanks(job=job.id, incarnation=job.incarnation, message=message)))


def _settle(turn: Turn) -> None:
    """When the last rank is gone, the incarnation is over; what follows depends on why."""
    job = turn.job
    job_healing.settle(turn)
    if job.stage not in ("none", "store") and not job.alive() and job.joiners:
        job_healing.dismiss_joiners(turn)
    if job.stage in ("none", "store") or job.alive() or job.parting:
        return
    was_stopping = job.stage == "stopping"
    reasons = {rank.done for rank in job.ranks if rank.done}
    turn.tell(Action.INCARNATION_ENDED, reason=job.stop_why or ", ".join(sorted(reasons)), step=job.step)
    turn.stage("none")
    job.partial = {}
    if reasons == {"completed"} and all(rank.done for rank in job.ranks):
        job_faults.close_as_done(turn)
        end(turn, JobState.DONE, f"all {job.settings.steps} steps are complete")
    elif job.fault is not None and (job.stop_why == "heal" or not was_stopping):
        job_faults.cure(turn, end)
        if not job.over and job.wanted != "run":
            _come_to_rest(turn)
    elif was_stopping:
        _come_to_rest(turn)
    elif "preempted" in reasons and not job_leaving.other_nodes_stay(job):
        end(turn, JobState.PREEMPTED, "its ranks were told to leave (SIGTERM) and have published their state")
    else:
        turn.move(JobState.WAITING, "its ranks left")


def _come_to_rest(turn: Turn) -> None:
    """Nothing runs any more and that was the wish."""
    job = turn.job
    if job.wanted == "cancel":
        end(turn, JobState.CANCELLED, "a person ended it")
    elif job.wanted == "preempt":
        end(turn, JobState.PREEMPTED, "it was told to leave; its state is published")
    elif job.wanted == "pause":
        turn.move(JobState.PAUSED, f"paused at step {job.step}")
        turn.do(Release())
    else:
        turn.move(JobState.WAITING, "it takes its new slots")


def end(turn: Turn, state: JobState, reason: str) -> None:
    """The job is over: everything it holds goes back."""
    job = turn.job
    if job.fault is not None:
        job.history.append(job.fault)
        job.fault = None
    job.ended = turn.now
    job.ranks = [] if not job.alive() else job.ranks
    turn.move(state, reason)
    if job.store_node is not None:
        turn.do(Send(job.store_node, StopStore(job=job.id)))
        job.store_node = None
    turn.do(Release())


# ---------------------------------------------------------------- time and exports


def _on_tick(turn: Turn) -> None:
    job = turn.job
    late = turn.now - job.since
    if not job_leaving.leaving(job):  # until they are gone the store of their node serves
        job_healing.keep_store(turn)
    job_healing.overdue(turn)
    job_healing.expire(turn)
    _part_from_leaving(turn)
    if job.stage == "running" and job.wanted in ("pause", "preempt"):
        _stop_at_boundary(turn, job.wanted, f"a person asked for it ({job.wanted})")
    if job.settle_until is not None and turn.now >= job.settle_until:
        if job_healing.possible(job):
            job_healing.begin(turn)
        else:
            job_faults.act(turn)
    elif job.stage == "stopping" and late > RESEND_SECONDS and job.alive():
        _stop_again(turn, late)
    elif job.stage in ("store", "starting") and late > job.settings.health.start_seconds:
        job_faults.slow_start(turn, late)


def _part_from_leaving(turn: Turn) -> None:
    """Act on ranks that were told to leave from outside."""
    job = turn.job
    match job_leaving.answer(job, turn.now):
        case job_leaving.Answer.NOTHING:
            job.leaving_since = None
        case job_leaving.Answer.SHRINK:
            job_leaving.shrink(turn)
        case job_leaving.Answer.MAKE_ROOM:
            _stop_at_boundary(turn, "resize", f"{', '.join(job.leaving_nodes)} leaves")
        case job_leaving.Answer.PREEMPT:
            job.wanted = "preempt"
            _stop_at_boundary(turn, "preempt", "its ranks were told to leave (SIGTERM)")


def _stop_again(turn: Turn, late: float) -> None:
    """The ranks should be gone: say it again, in case an agent did not hear it; a boundary that never comes ends."""
    job = turn.job
    limit = job.settings.health.grace_seconds
    if job.stop_why == "heal":
        stop_now(turn, "heal", 0.0)
    elif job.stop_why == "cancel":
        stop_now(turn, "cancel", limit)
    elif late > limit + job.settings.health.hang_floor_seconds:
        stop_now(turn, job.stop_why, limit)
    else:
        return
    job.since = turn.now


def _on_export(turn: Turn, event: ExportEnded) -> None:
    job = turn.job
    entry = next((entry for entry in job.exports if entry.step == event.step), None)
    if entry is None:
        return
    if event.path is not None:
        job.exports.remove(entry)
        job.exported[event.step] = entry.evaluate
        evaluate = job.settings.evaluate
        wanted = evaluate.model_dump(mode="json", include={"tasks", "limit", "num_fewshot"})
        turn.tell(
            Action.EXPORT_PUBLISHED,
            step=event.step,
            path=event.path,
            seconds=event.seconds,
            evaluate=wanted if entry.evaluate else None,
        )
        return
    entry.tries += 1
    entry.not_before = turn.now + EXPORT_PAUSE * 2.0 ** (entry.tries - 1)
    turn.tell(Action.EXPORT_FAILED, reason=event.reason, step=event.step, tries=entry.tries)
    if entry.tries >= EXPORT_TRIES:
        job.exports.remove(entry)
