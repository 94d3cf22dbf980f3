"""WAF and the objective, exactly as in DESIGN.md, each equation beside its code.

    objective = Σ over jobs, in the given order, of
        F(t, x')·D_running  −  [x' ≠ x or faulted]·F(t, x)·transition_seconds  −  x'·price·D_running/3600·flop_value

with ``F(t, x) = weight·throughput(x)`` where x is listed and reaches the minimum, else 0, and
``D_running = mtbf_gpu_hours·3600/gpus``. Everything is in FLOP; F is in FLOP/s. Products are taken from left to
right and the sum in the jobs' order, so that the result is reproducible to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, isfinite

import numpy as np

from planner.errors import BadInputError
from planner.program import Options
from planner.types import Cluster, Job, JobPrice

SPARE = "\x7fspare"
"""Name of the reserve in a program; no job can have it."""


def transition_cost(job: Job, count: int) -> float:
    """``[x' ≠ x or faulted]·F(t, x)·transition_seconds``: x is the count before the event."""
    if count != job.workers or job.faulted:
        return job.rate(job.workers) * job.transition_seconds
    return 0.0


def slot_cost(count: int, cluster: Cluster) -> float:
    """``x'·price·D_running/3600·flop_value``; 0 unless price and flop_value are both above 0."""
    if cluster.price_per_gpu_hour > 0 and cluster.flop_value > 0:
        return count * cluster.price_per_gpu_hour * cluster.running_seconds / 3600 * cluster.flop_value
    return 0.0


def price(job: Job, count: int, cluster: Cluster) -> JobPrice:
    """One job's term of the objective at ``count``, taken apart."""
    waf = job.rate(count)
    return JobPrice(
        name=job.name,
        old=job.workers,
        new=count,
        waf=waf,
        worth=waf * cluster.running_seconds,
        transition_cost=transition_cost(job, count),
        slot_cost=slot_cost(count, cluster),
        layout=job.profile.layout(count),
    )


def waf(jobs: Sequence[Job], assignments: Mapping[str, int]) -> float:
    """Weighted achieved aggregate FLOP/s: Σ F(t, x)."""
    total = 0.0
    for job in jobs:
        total += job.rate(assignments.get(job.name, 0))
    return total


def objective(cluster: Cluster, jobs: Sequence[Job], assignments: Mapping[str, int]) -> float:
    """The objective of a plan in FLOP, the worth of spares included where they are turned on."""
    total = 0.0
    used = 0
    for job in jobs:
        count = assignments[job.name]
        total += price(job, count, cluster).value
        used += count
    return total + spare_worth(cluster, cluster.gpus - used)


def spare_worth(cluster: Cluster, unassigned: int) -> float:
    """What the unassigned slots are worth as spares (FLOP); 0 where spares are off."""
    return sum(cluster.spare_values[: max(unassigned, 0)], 0.0)


def options(job: Job, cluster: Cluster) -> Options:
    """The job's choices on this cluster: 0 and every listed count that reaches its minimum and fits.

    Raises:
        BadInputError: a value is beyond what a float holds.
    """
    counts = (0, *job.feasible(cluster.gpus))
    seconds = cluster.running_seconds
    rates = np.array([0.0, *(job.weight * job.profile.flops[i] for i in _places(job, counts))])
    # The transition is what :func:`transition_cost` says: the same at every count except an unharmed present one.
    costs = np.full(len(counts), job.rate(job.workers) * job.transition_seconds)
    if not job.faulted:
        costs[np.array(counts) == job.workers] = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        values = rates * seconds - costs
        if cluster.price_per_gpu_hour > 0 and cluster.flop_value > 0:
            values = values - np.array(counts) * cluster.price_per_gpu_hour * seconds / 3600 * cluster.flop_value
    if not np.isfinite(values).all():
        raise BadInputError(
            f"job {job.name}: weight × throughput × seconds is beyond floating point; use smaller numbers"
        )
    return Options(job.name, np.array(counts, dtype=np.int64), values, job.workers, job.group)


def _places(job: Job, counts: Sequence[int]) -> range:
    """Where the feasible counts (all but the leading 0) stand in the profile: they are neighbours."""
    if len(counts) == 1:
        return range(0)
    start = job.profile.counts.index(counts[1])
    return range(start, start + len(counts) - 1)


def spare_options(cluster: Cluster) -> Options | None:
    """The reserve as one more entry of the program, or None where spares are off."""
    worth = [0.0]
    for value in cluster.spare_values[: cluster.gpus]:
        worth.append(worth[-1] + value)
    if worth[-1] == 0.0:
        return None
    return Options(SPARE, np.arange(len(worth), dtype=np.int64), np.array(worth), None)


def spare_values(
    cluster: Cluster, jobs: Sequence[Job], repair_seconds: float, most: int, lost: int = 1
) -> tuple[float, ...]:
    """Worth (FLOP) of the first, second, … spare slot over D_running, from the jobs' present counts.

    A failure strikes job t with probability x_t/Σx. Without a spare the job goes on with the best count that is
    left, x_t − ``lost`` at most, until the repair; with one it keeps F(t, x_t). So one failure that meets a spare
    saves ``v = Σ_t x_t/Σx · (F(t, x_t) − max_{y ≤ x_t − lost} F(t, y)) · repair_seconds``. Failures come as a
    Poisson stream of one per D_running; a spare is away for ``repair_seconds`` after each, so the k-th spare of
    ``lost`` slots is needed if k failures fall together: ``value_k = v · P(N ≥ k)``, N ~ Poisson(min(1,
    repair_seconds/D_running)). Slots within one spare of ``lost`` are worth nothing until it is complete.
    """
    used = sum(job.workers for job in jobs)
    if used <= 0 or repair_seconds <= 0 or most <= 0:
        return ()
    saved = 0.0
    for job in jobs:
        left = max((job.rate(count) for count in job.feasible(max(job.workers - lost, 0))), default=0.0)
        saved += job.workers / used * max(job.rate(job.workers) - left, 0.0) * repair_seconds
    mean = min(1.0, repair_seconds / cluster.running_seconds)
    values: list[float] = []
    term, tail = exp(-mean), 1.0
    for k in range(1, most // lost + 1):
        tail -= term
        term *= mean / k
        values += [0.0] * (lost - 1) + [saved * max(tail, 0.0)]
    return tuple(values) if all(isfinite(value) for value in values) else ()
