"""What a job asks the allocator for, from its record alone."""

from __future__ import annotations

from planner.demand import Demand
from planner.events import JobState
from planner.job_rates import feasible, rates
from planner.job_record import JobRecord

TRANSITION_SECONDS = 15.0
"""Seconds that a restart of all ranks stands still (a start of Python and of the model)."""


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
        transition_seconds=TRANSITION_SECONDS,
        since=job.submitted,
        faulted=job.fault is not None,
        details={"group": config.parallel.tensor},
    )
