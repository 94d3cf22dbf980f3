"""What a job asks the allocator for, from its record alone."""

from __future__ import annotations

from planner.demand import Demand
from planner.events import JobState
from planner.job_rates import feasible, rates
from planner.job_record import JobRecord

START_SECONDS = 15.0
"""Seconds from the order to start all ranks to their first step, before it was measured."""
IN_PLACE_SECONDS = 3.0
"""Least interruption of a job whose ranks re-form in place, as a plan prices it."""


def demand(job: JobRecord) -> Demand | None:
    """What it wants now; None when it wants nothing (it is over, or a person paused it)."""
    if job.over or (job.wanted != "run" and job.stage == "none") or job.state == JobState.PAUSED:
        return None
    config = job.settings
    counts = feasible(job)
    return Demand(
        holder=job.holder,
        kind="pretrain",
        weight=config.weight,
        min_slots=config.workers.min,
        max_slots=config.workers.max,
        feasible=counts,
        throughput=rates(job),
        transition_seconds=transition_seconds(job),
        since=job.submitted,
        faulted=job.fault is not None,
        details={"group": config.parallel.tensor},
    )


def transition_seconds(job: JobRecord) -> float:
    """Seconds that the job loses when its ranks change now.

    Where each piece of state has a live replica the ranks re-form in place: no start, no step is done again, and
    joiners start while the others train. Where a rank's shard is its own (distributed optimizer) all ranks start anew;
    after a fault they go back to the nearest snapshot, and what came after it is done again.
    """
    if in_place(job):
        return max(IN_PLACE_SECONDS, job.heal_seconds or 0.0)
    start = job.start_seconds if job.start_seconds is not None else START_SECONDS
    return start + (redo_seconds(job) if job.fault is not None else 0.0)


def in_place(job: JobRecord) -> bool:
    """Whether the ranks that are left hold all state among them and can re-form without leaving their processes."""
    if job.stage in ("leaving", "reforming"):
        return True
    return job.stage == "running" and bool(job.ranks) and all(rank.heals for rank in job.ranks)


def redo_seconds(job: JobRecord) -> float:
    """Seconds of the steps since the newest state that outlives the ranks: a snapshot in host memory, a checkpoint."""
    kept = [step for step in (0, job.snapshot_step, *job.published) if step <= job.step]
    return (job.step - max(kept)) * (job.step_seconds or 0.0)
