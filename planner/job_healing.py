"""Healing in place: survivors leave the collective, re-form without the broken ranks, and grow back at a step's end.

Two stages of an incarnation belong to it. *leaving*: everybody is told to get out of the collective; it ends when
each rank has said ``left`` or is gone (who does neither in time is hung, and ended). Then the root is judged and the
cure chosen. *reforming*: the survivors were ordered into the next incarnation; it ends when each of them has said
``reformed``. A new fault in it begins again at leaving. Whatever does not come to its end in time falls back to
starting all ranks from the newest state (:func:`planner.job_faults.act`); nothing here can wait for ever.

Growing back and giving slots away are the same order, to take effect at a step's end: training goes on until then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from planner import escalation, job_faults
from planner.events import Action
from planner.job_events import Release, Said, Send, StartJoiners
from planner.job_rates import feasible
from planner.job_record import JobRecord, Parting, RankRecord
from planner.job_turn import Turn
from planner.leases import Lease
from planner.messages import LeaveCollective, Reform, StartStore, StopRanks, StopStore, TellRanks
from planner.rank_map import Grid, enlarged, grid, without
from planner.types import Node, Slot

LEAVE_SECONDS = 5.0
"""A rank that is still in the collective this long after it was told to leave is hung; ranks that may first finish
the micro-batches in hand get three steps' time."""
SILENT_SECONDS = 1.5
"""The same where ranks are past the limit of a step already: whoever is sound waits in a collective, and is out at
once."""
REFORM_SECONDS = 60.0
"""Longest re-forming, from the order to the last rank's word."""
SAVE_SECONDS = 60.0
"""The same while a checkpoint is written, before it is known how long that takes: a rank that writes a file notices
nothing before it is done."""
SAVE_FLOOR_SECONDS = 15.0
"""The least while a checkpoint is written: the first save of a process takes many times as long as the next ones."""
STORE_SECONDS = 15.0
"""Longest wait of ranks that are out of their collective for another rendezvous store, where theirs went with its
node."""
JOINER_SECONDS = 180.0
"""Longest start of a rank that is to join."""
JOIN_PAUSE = 5.0
"""Seconds before another start of a rank that is to join, when one ended before it did."""
PARTING_SECONDS = 60.0
"""Longest wait for the word that a rank which is not needed any more is gone."""
FIRST_NAME = 100_000
"""Joiners are named from here on, beyond every rank."""

STAGES = ("leaving", "reforming")


def layout(job: JobRecord) -> Grid:
    """The layout of the present incarnation."""
    return grid(job.size, job.settings.parallel.tensor, job.settings.parallel.pipeline)


def possible(job: JobRecord) -> bool:
    """Whether the ranks of the present incarnation can heal in place: all say so, hold the state and are past
    loading."""
    if job.stage in STAGES:
        return True
    at_work = ("first_step", "step", "validate", "save", "reform")
    return job.stage == "running" and all(rank.heals and rank.phase in at_work for rank in job.ranks)


# ---------------------------------------------------------------- leaving


def begin(turn: Turn, broken: Iterable[int] = (), *, overdue: bool = False) -> None:
    """Get everybody out of the collective; ``broken`` are the ranks at fault, where they are known.

    ``overdue`` says that the step is past its limit, so that whoever is sound is out at once.
    """
    job = turn.job
    job.settle_until = None
    # Whoever waits to join goes on starting; only who has not reached its agent yet could not be told of its new name.
    dismiss(turn, [rank for rank in job.joiners if not rank.hello])
    ranks = sorted(set(broken))
    if job.stage != "leaving":
        turn.stage("leaving")
        job.due = turn.now + _patience(job, overdue)
        for rank in job.ranks:
            rank.reformed = True
    order = LeaveCollective(incarnation=job.incarnation, reason=job.reason or "a rank is broken", ranks=ranks)
    for node in _nodes(job.alive()):
        turn.do(Send(node, TellRanks(job=job.id, incarnation=job.incarnation, message=order)))


def _patience(job: JobRecord, overdue: bool) -> float:
    """Seconds that ranks get to be out of the collective."""
    if any(rank.phase == "save" for rank in job.alive()):
        if job.save_seconds is None:
            return SAVE_SECONDS
        return min(SAVE_SECONDS, max(SAVE_FLOOR_SECONDS, 3.0 * job.save_seconds))
    return SILENT_SECONDS if overdue else max(LEAVE_SECONDS, 3.0 * (job.step_seconds or 0.0))


def left(turn: Turn, rank: RankRecord, message: object) -> None:
    """A rank is out of its collective: of the present incarnation, or of the former before it turned."""
    job = turn.job
    incarnation = getattr(message, "incarnation", 0)
    if incarnation == job.incarnation:
        rank.left = True
    elif not (job.boundary and incarnation == job.former):
        return
    job_faults.rank_left(turn, rank, message)


def settle(turn: Turn) -> None:
    """Go on from leaving as soon as everybody is accounted for."""
    job = turn.job
    if job.stage != "leaving":
        return
    alive = job.alive()
    ended = {rank.done for rank in job.ranks if rank.done}
    if ended:
        # Its end was agreed and the last save is published: who could not say so any more is not needed.
        for rank in job.ranks:
            rank.done = rank.done or min(ended)
        job_faults.act(turn)
    elif not alive:
        job_faults.act(turn)
    elif all(rank.left or rank.doomed for rank in alive):
        # A store that is about to be there is worth waiting for: without it all ranks would have to start anew.
        if job.store_host or (job.due is not None and turn.now > job.due + STORE_SECONDS):
            _decide(turn)
    elif job.due is not None and turn.now > job.due:
        hung = [rank for rank in alive if not (rank.left or rank.doomed)]
        for rank in hung:
            turn.tell(Action.RANK_HUNG, reason="it did not leave the collective", rank=rank.rank, node=rank.node)
            rank.doomed = rank.hung = True
        job_faults.note_silent(turn, hung)
        # Its peers have shut their connections to it, so nobody need wait until it is gone.
        _end(turn, hung, capture_stack=True)
        settle(turn)


def _end(turn: Turn, ranks: Sequence[RankRecord], *, capture_stack: bool = False) -> None:
    """SIGKILL these ranks; their exits are reported as ever."""
    job = turn.job
    for node in _nodes(ranks):
        numbers = [rank.rank for rank in ranks if rank.node == node]
        order = StopRanks(
            job=job.id, incarnation=job.incarnation, grace_seconds=0.0, ranks=numbers, capture_stack=capture_stack
        )
        turn.do(Send(node, order))


def _decide(turn: Turn) -> None:
    """Everybody is out: judge, and order the survivors into the next incarnation or fall back."""
    job = turn.job
    gone = {rank.rank for rank in job.ranks if rank.gone or rank.doomed}
    seen = job_faults.root_seen(turn)
    faulty = job.rank(seen.rank) if seen is not None else None
    lost = gone | ({faulty.rank} if faulty is not None else set())
    chosen = job_faults.judge(
        turn,
        process_alive=not gone and faulty is not None,
        can_heal=bool(job.store_host) and without(layout(job), gone or lost) is not None,
    )
    if chosen is escalation.Cure.RETRY:
        lost = gone
    elif chosen is escalation.Cure.ISOLATE and faulty is not None:
        lost |= {rank.rank for rank in job.ranks if rank.node == faulty.node}
        dismiss(turn, [rank for rank in job.joiners if rank.node == faulty.node])
    survivors = without(layout(job), lost)
    if chosen in (escalation.Cure.GIVE_UP, escalation.Cure.RESTART_ALL) or survivors is None:
        job_faults.act(turn)
        return
    after, names = survivors
    _end(turn, [rank for rank in job.alive() if rank.rank not in names and not rank.hung])
    order(turn, after, names, reason=f"heals without ranks {sorted(lost)}" if lost else "retries in place")


# ---------------------------------------------------------------- the rendezvous store


def keep_store(turn: Turn) -> None:
    """Have the rendezvous store on a node where ranks of the job stay: it is gone with its node."""
    job = turn.job
    here = [rank.node for rank in job.alive() if rank.node not in job.leaving_nodes]
    if job.stage in ("running", "leaving") and here and job.store_node not in here:
        if job.store_node is not None:
            turn.do(Send(job.store_node, StopStore(job=job.id)))
        start_store(turn, here[0])


def start_store(turn: Turn, node: str) -> None:
    """Start the store (anew) beside the running ranks; until it answers nobody can re-form."""
    job = turn.job
    job.store_node, job.store_host = node, ""
    turn.do(Send(node, StartStore(job=job.id, incarnation=job.incarnation)))


# ---------------------------------------------------------------- the order


def order(
    turn: Turn,
    after: Grid,
    names: Mapping[int, int],
    *,
    reason: str,
    joining: Mapping[int, int] | None = None,
    boundary: bool = False,
) -> None:
    """Order the ranks of ``names`` (old → new) and ``joining`` (name → new) into the next incarnation.

    Those that wait to join and are not taken in yet go on waiting, known under the new incarnation.
    """
    job = turn.job
    joining = dict(joining or {})
    waiting = {rank.rank: rank.rank for rank in job.joiners if rank.rank not in joining}
    was, job.former = job.incarnation, job.incarnation
    job.incarnation += 1
    reform = Reform(
        incarnation=job.incarnation,
        ranks={**names, **joining, **waiting},
        world_size=after.world,
        joining=sorted(joining.values()),
        sources=_sources(job, after, names, joining),
        store_host=job.store_host,
        store_port=job.store_port,
        reason=reason,
        at_boundary=boundary,
        fired_faults=job.fired,
        told_step=job.told_step,
    )
    nodes = _nodes([*job.alive(), *job.joiners])
    _rename(job, names, joining, turn.now)
    job.renamed |= waiting
    job.size, job.partial, job.progressed, job.boundary = after.world, {}, False, boundary
    turn.stage("reforming")
    job.due = turn.now + REFORM_SECONDS + (10.0 * (job.step_seconds or 0.0) if boundary else 0.0)
    if not boundary:
        turn.tell(Action.REFORM_STARTED, reason=reason, workers=after.world, former=was)
    for node in nodes:
        turn.do(Send(node, TellRanks(job=job.id, incarnation=was, message=reform)))


def _sources(job: JobRecord, after: Grid, names: Mapping[int, int], joining: Mapping[int, int]) -> dict[int, int]:
    """Who hands its state to each new rank: the nearest data-parallel peer (:mod:`planner.transfer`)."""
    if not joining:
        return {}
    from planner.topology import Topology
    from planner.transfer import plan_transfers

    where = {names[rank.rank]: Slot(rank.node, rank.slot) for rank in job.ranks if rank.rank in names}
    where |= {joining[rank.rank]: Slot(rank.node, rank.slot) for rank in job.joiners if rank.rank in joining}
    sizes: dict[str, int] = {}
    for slot in where.values():
        sizes[slot.node] = max(sizes.get(slot.node, 0), slot.index + 1)
    topology = Topology(tuple(Node(name=name, slots=size) for name, size in sorted(sizes.items())))
    fill = set(joining.values())
    numbers = {slot: rank for rank, slot in where.items()}
    transfers = plan_transfers(
        topology,
        {slot: after.coordinate(rank) for rank, slot in where.items() if rank in fill},
        {slot: after.coordinate(rank) for rank, slot in where.items() if rank not in fill},
        live_step=job.step,
    )
    return {numbers[one.target]: numbers[one.source] for one in transfers if isinstance(one.source, Slot)}


def _rename(job: JobRecord, names: Mapping[int, int], joining: Mapping[int, int], now: float) -> None:
    """Ranks go on under new numbers; whoever is not named is parting until its process is gone."""
    kept: list[RankRecord] = []
    for rank in [*job.ranks, *job.joiners]:
        new = names.get(rank.rank, joining.get(rank.rank))
        if new is not None and not rank.gone:
            rank.joined = rank.rank in joining
            rank.rank, rank.left, rank.reformed = new, False, False
            kept.append(rank)
        elif rank in job.ranks and not rank.gone:
            job.parting.append(_parting(job.former, rank, now))
    job.joiners = [rank for rank in job.joiners if rank not in kept]
    job.ranks = sorted(kept, key=lambda rank: rank.rank)
    job.renamed = {**names, **joining}


def _parting(incarnation: int, rank: RankRecord, now: float) -> Parting:
    return Parting(incarnation=incarnation, rank=rank.rank, node=rank.node, slot=rank.slot, lease=rank.lease, since=now)


def reformed(turn: Turn, rank: RankRecord, message: object) -> None:
    """A rank is part of the new incarnation; when all are, it stands."""
    job = turn.job
    if getattr(message, "incarnation", 0) != job.incarnation or job.stage != "reforming":
        return
    rank.reformed = True
    if rank.joined:
        turn.tell(
            Action.RANK_JOINED, rank=rank.rank, node=rank.node, slot=rank.slot, step=getattr(message, "step", 0),
            bytes=getattr(message, "state_bytes", 0), seconds=getattr(message, "seconds", 0.0),
        )  # fmt: skip
        rank.joined = False
    job.redone += len(getattr(message, "redone", []))
    if all(other.reformed for other in job.ranks):
        seconds = getattr(message, "seconds", 0.0)
        turn.tell(Action.REFORM_COMPLETED, workers=job.size, seconds=seconds, redone=job.redone, boundary=job.boundary)
        job.redone, job.due, job.boundary = 0, None, False
        turn.stage("running")


def allow_time(job: JobRecord, now: float) -> None:
    """Whoever listens was away: what the ranks said meanwhile is still to be read before anything is overdue."""
    if job.due is not None:
        job.due = max(job.due, now + LEAVE_SECONDS)


def overdue(turn: Turn) -> None:
    """Re-forming took too long: all ranks are started anew."""
    job = turn.job
    if job.stage != "reforming" or job.due is None or turn.now <= job.due:
        return
    silent = [rank.rank for rank in job.alive() if not rank.reformed]
    job_faults.heal_failed(turn, f"ranks {silent} did not re-form within {REFORM_SECONDS:.0f} s")


def translate(job: JobRecord, incarnation: int, rank: int) -> RankRecord | None:
    """The rank that an agent's report means: agents learn of a re-form a little later than this record."""
    if incarnation == job.incarnation:
        return job.rank(rank) or job.joiner(rank)
    if incarnation == job.former and rank in job.renamed:
        return job.rank(job.renamed[rank]) or job.joiner(job.renamed[rank])
    return None


def parted(turn: Turn, incarnation: int, rank: int) -> bool:
    """Note that a parting rank's process is gone; whether it was one."""
    job = turn.job
    found = [one for one in job.parting if (one.incarnation, one.rank) == (incarnation, rank)]
    job.parting = [one for one in job.parting if one not in found]
    return bool(found)


# ---------------------------------------------------------------- growing and shrinking


def follow(turn: Turn, leases: Sequence[Lease]) -> None:
    """Bring the running incarnation to the slots that the allocator grants, at a step's end."""
    job = turn.job
    quiet = job.stage == "running" and job.progressed and job.fault is None and job.wanted == "run"
    if not quiet or not job.store_host:
        return
    leaving = {lease.id for lease in leases if lease.revoked is not None}
    if leaving & {rank.lease for rank in job.ranks}:
        _shrink(turn, leaving)
        return
    _drop_late_joiners(turn, leaving)
    free = [
        (lease, slot)
        for lease in sorted(leases, key=lambda lease: (lease.node, lease.token))
        if lease.revoked is None and lease.node not in job.leaving_nodes
        for slot in lease.slots
        if (lease.id, slot) not in job.taken()
    ]
    group = layout(job).group
    coming = len(job.joiners)
    best = max((count for count in feasible(job) if count <= job.size + coming + len(free)), default=0)
    wanted = (best - job.size - coming) // group * group
    if wanted > 0 and turn.now >= job.join_after:
        _start_joiners(turn, free[:wanted])
    _take_in(turn)


def _shrink(turn: Turn, leaving: Collection[str]) -> None:
    job = turn.job
    lost = {rank.rank for rank in job.ranks if rank.lease in leaving}
    survivors = without(layout(job), lost)
    if survivors is None or survivors[0].world not in feasible(job):
        job_faults.leave_slots(turn, "its slots are taken back")
        return
    dismiss_joiners(turn)
    after, names = survivors
    order(turn, after, names, reason=f"gives the slots of ranks {sorted(lost)} back", boundary=True)


def _start_joiners(turn: Turn, slots: Sequence[tuple[Lease, int]]) -> None:
    job = turn.job
    origins = _free_origins(job, len(slots))
    names = []
    for (lease, slot), origin in zip(slots, origins, strict=True):
        name = FIRST_NAME + job.names
        job.names += 1
        names.append(name)
        job.joiners.append(
            RankRecord(
                rank=name,
                origin=origin,
                node=lease.node,
                slot=slot,
                lease=lease.id,
                lease_token=lease.token,
                since=turn.now,
            )
        )
    turn.do(StartJoiners(tuple(names)))


def _free_origins(job: JobRecord, count: int) -> list[int]:
    """Origin ranks that nobody has: those of lost ranks first, so that fault coordinates go on meaning a place."""
    held = {rank.origin for rank in [*job.ranks, *job.joiners]}
    free = [origin for origin in range(len(held) + count) if origin not in held]
    return free[:count]


def _take_in(turn: Turn) -> None:
    """When whole replicas are ready, order everybody to re-form with them at the step's end."""
    job = turn.job
    ready = [rank for rank in job.joiners if rank.phase == "ready"]
    now = layout(job)
    replicas = min(len(ready) // now.group, (max(feasible(job), default=job.size) - job.size) // now.group)
    if replicas < 1 or len(ready) < len(job.joiners):
        return
    after, names, new = enlarged(now, replicas)
    joining = {rank.rank: number for rank, number in zip(ready, new, strict=False)}
    order(turn, after, names, joining=joining, boundary=True, reason=f"grows from {now.world} to {after.world} ranks")


def _drop_late_joiners(turn: Turn, leaving: Collection[str]) -> None:
    """Joiners whose lease is taken back, or that do not get ready."""
    late = [rank for rank in turn.job.joiners if rank.lease in leaving or turn.now - rank.since > JOINER_SECONDS]
    dismiss(turn, late)


def dismiss_joiners(turn: Turn) -> None:
    """End the ranks that were to join: the slots are wanted, or all ranks are to be started anew."""
    dismiss(turn, list(turn.job.joiners))


def forget(job: JobRecord, node: str) -> None:
    """An agent could not start ranks, or came back: what was to join from there, or leave there, is no more."""
    job.joiners = [rank for rank in job.joiners if rank.node != node or rank.hello]
    job.parting = [one for one in job.parting if one.node != node or one.rank < FIRST_NAME]


def expire(turn: Turn) -> None:
    """Parting ranks whose end nobody reported do not hold the job up for ever; leases guard their slots."""
    turn.job.parting = [one for one in turn.job.parting if turn.now - one.since < PARTING_SECONDS]


def dismiss(turn: Turn, joiners: Sequence[RankRecord]) -> None:
    """End these ranks that were to join."""
    job = turn.job
    _end(turn, joiners)
    for rank in joiners:
        job.joiners.remove(rank)
        job.parting.append(_parting(job.incarnation, rank, turn.now))


def joiner_gone(turn: Turn, rank: RankRecord) -> None:
    """A rank that was to join ended before it did; another is started after a pause."""
    job = turn.job
    job.joiners.remove(rank)
    job.join_after = turn.now + JOIN_PAUSE


def finished(turn: Turn) -> None:
    """Ranks say that all is done while others were on their way in: those are not needed any more."""
    job = turn.job
    if job.stage != "reforming" or not any(rank.done for rank in job.ranks):
        return
    needless = [rank for rank in job.ranks if rank.joined and not rank.reformed]
    _end(turn, needless)
    for rank in needless:
        job.ranks.remove(rank)
        job.parting.append(_parting(job.incarnation, rank, turn.now))


def said(turn: Turn, rank: RankRecord, event: Said) -> None:
    """Take a message of a rank that is to join."""
    message = event.message
    if message.kind == "hello":
        rank.hello, rank.heals, rank.pid = True, message.heals, int(message.pid)
    elif message.kind == "phase":
        rank.phase = message.phase


def release_parted(turn: Turn, leases: Sequence[Lease]) -> None:
    """Give back revoked leases on which nothing runs any more."""
    job = turn.job
    used = {lease for lease, _ in job.taken()}
    idle = frozenset(lease.id for lease in leases if lease.revoked is not None and lease.id not in used)
    if idle:
        turn.do(Release(idle))


def _nodes(ranks: Iterable[RankRecord]) -> list[str]:
    return sorted({rank.node for rank in ranks})
