"""Ranks that were told to leave from outside (SIGTERM) and nodes that go: who goes on, and who publishes first.

A job shrinks by the replicas that are told to leave, at the step's end, as long as what is left is a size it may have.
Otherwise it publishes at the step's end: it waits for slots when a node leaves it and other nodes of it stay, and it
ends as preempted (to be submitted again) when nothing of it stays or a person told its ranks to leave.
"""

from __future__ import annotations

from enum import StrEnum

from planner import job_healing
from planner.job_rates import feasible
from planner.job_record import JobRecord, RankRecord
from planner.job_turn import Turn
from planner.rank_map import without

GATHER_SECONDS = 0.3
"""A node's ranks are told to leave one after the other: this long after the first it is decided for all of them."""


class Answer(StrEnum):
    """What a job does about ranks that leave."""

    NOTHING = "nothing"  #: none leaves
    WAIT = "wait"  #: it is being decided, or the job heals first
    SHRINK = "shrink"  #: the others go on without them at the step's end
    MAKE_ROOM = "make_room"  #: publish at the step's end and wait for slots
    PREEMPT = "preempt"  #: publish at the step's end and end as preempted


def told(turn: Turn, rank: RankRecord) -> None:
    """A rank was told to leave by a signal."""
    rank.leaving = rank.leaving or "signal"
    turn.job.leaving_since = turn.job.leaving_since or turn.now


def node(turn: Turn, name: str) -> None:
    """A node ends all that runs on it: its ranks leave, and nothing is started there before it is back."""
    job = turn.job
    job.leaving_nodes = sorted({*job.leaving_nodes, name})
    job_healing.dismiss(turn, [rank for rank in job.joiners if rank.node == name])
    for rank in job.alive():
        if rank.node == name:
            rank.leaving = "node"
            job.leaving_since = job.leaving_since or turn.now


def answer(job: JobRecord, now: float) -> Answer:
    """What to do about the ranks that leave. Pure."""
    lost = leaving(job)
    if not lost or job.stage in ("none", "store", "stopping"):
        return Answer.NOTHING
    if job.stage in job_healing.STAGES or (job.leaving_since is not None and now - job.leaving_since < GATHER_SECONDS):
        return Answer.WAIT
    if job_healing.possible(job) and job.wanted == "run":
        survivors = without(job_healing.layout(job), lost)
        if survivors is not None and survivors[0].world in feasible(job):
            ready = job.progressed and job.fault is None and job.store_host
            return Answer.SHRINK if ready else Answer.WAIT
    staying = {rank.node for rank in job.alive()} - set(job.leaving_nodes)
    by_node = all(rank.leaving == "node" for rank in job.alive() if rank.leaving)
    return Answer.MAKE_ROOM if by_node and staying else Answer.PREEMPT


def other_nodes_stay(job: JobRecord) -> bool:
    """Whether the ranks that were told to leave were those of nodes that go, and the job has others."""
    told_by = {rank.leaving for rank in job.ranks if rank.leaving}
    return told_by == {"node"} and bool({rank.node for rank in job.ranks} - set(job.leaving_nodes))


def leaving(job: JobRecord) -> set[int]:
    """Ranks that were told to leave and are still there."""
    return {rank.rank for rank in job.alive() if rank.leaving}


def shrink(turn: Turn) -> None:
    """Order the others to go on without those that leave, at the step's end."""
    job = turn.job
    lost = leaving(job)
    survivors = without(job_healing.layout(job), lost)
    assert survivors is not None
    after, names = survivors
    reason = f"ranks {sorted(lost)} were told to leave"
    job_healing.order(turn, after, names, reason=reason, boundary=True)
    job.leaving_since = None
