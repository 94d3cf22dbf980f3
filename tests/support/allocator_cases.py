"""Random allocation problems with many ties, and the oracles that solve them by other means."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np

from planner.objective import objective
from planner.types import Cluster, Job, ThroughputProfile

NEAR = (0.0, 0.103, 0.3171, 0.5177, 0.907, 1.31, 2.13, -0.211, -0.977, -1.71)
"""Distances in units of the tie tolerance; sums of a few of them never come near to 1."""


def random_rates(rng: random.Random, counts: Sequence[int]) -> dict[int, float]:
    """Throughputs of one of five kinds: linear (everything ties), generic, few values, and two of near ties."""
    kind = rng.randrange(5)
    if kind == 0:
        return {count: 1e15 * count for count in counts}
    if kind == 1:
        return {count: rng.uniform(0, 1e15) * count for count in counts}
    if kind == 2:
        return {count: float(rng.randint(0, 3)) for count in counts}
    if kind == 3:
        return {count: 1e15 * count * (1 + rng.choice(NEAR) * 1e-12) for count in counts}
    return {count: 1e15 * (1 + rng.choice(NEAR) * 1e-12) for count in counts}


def random_case(rng: random.Random, most_jobs: int = 4) -> tuple[Cluster, tuple[Job, ...]]:
    """A small cluster with jobs in no particular order of names."""
    gpus = rng.choice([4, 8, 12, 16, 31, 32])
    jobs = []
    for index in range(rng.randint(1, most_jobs)):
        counts = sorted(rng.sample(range(1, gpus + 1), min(gpus, rng.randint(1, 5))))
        jobs.append(
            Job(
                name=rng.choice("abcdefgh") + str(index),
                profile=ThroughputProfile.of(random_rates(rng, counts)),
                weight=rng.choice([1.0, 1.0, 2.0, 0.5, 0.0]),
                min_workers=rng.choice([1, 1, 1, counts[0], 2]),
                workers=rng.choice([0, 0, *counts, 3]),
                faulted=rng.random() < 0.2,
                transition_seconds=rng.choice([0.0, 0.0, 120.0, 1e-3]),
            )
        )
    cluster = Cluster(
        gpus=gpus,
        gpus_per_node=rng.choice([1, 2, 8]),
        mtbf_gpu_hours=rng.choice([12000.0, 100.0, 1.0]),
        price_per_gpu_hour=rng.choice([0.0, 0.0, 2.0]),
        flop_value=rng.choice([0.0, 1e15, 1e18]),
        spare_values=rng.choice([(), (), (), (1e18, 1e17), (1e20,)]),
    )
    return cluster, tuple(jobs)


def all_plans(cluster: Cluster, jobs: Sequence[Job]) -> list[tuple[float, dict[str, int]]]:
    """Every plan with its objective."""
    choices = [(0, *job.feasible(cluster.gpus)) for job in jobs]
    found = []
    for counts in itertools.product(*choices):
        if sum(counts) <= cluster.gpus:
            plan = {job.name: count for job, count in zip(jobs, counts, strict=True)}
            found.append((objective(cluster, jobs, plan), plan))
    return found


def brute_force(cluster: Cluster, jobs: Sequence[Job]) -> tuple[float, dict[str, int]]:
    """The best objective and the plan that DESIGN.md's order of ties puts first, by trying every plan.

    With spares on, slots held in reserve count as taken, as in the program.
    """
    plans = all_plans(cluster, jobs)
    best = max(value for value, _ in plans)

    def rank(plan: dict[str, int]) -> tuple[int, int, list[tuple[str, int]]]:
        used = sum(plan.values())
        worth = [0.0, *itertools.accumulate(cluster.spare_values[: cluster.gpus])]
        reserve = worth.index(max(worth[: cluster.gpus - used + 1])) if worth[-1] else 0
        changed = sum(plan[job.name] != job.workers for job in jobs)
        return changed, used + reserve, sorted(plan.items())

    tied = [plan for value, plan in plans if value >= best - 1e-12 * abs(best)]
    return best, min(tied, key=rank)


def milp_best(cluster: Cluster, jobs: Sequence[Job]) -> float:
    """The best objective by scipy's mixed-integer solver: one 0/1 variable for each job and count."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    values, slots, owner = [], [], []
    for index, job in enumerate(jobs):
        for count in (0, *job.feasible(cluster.gpus)):
            value = objective(cluster.resized(cluster.gpus), [job], {job.name: count})
            values.append(value)
            slots.append(count)
            owner.append(index)
    # The solver stops within 1e-6 of the optimum, absolute: blown up, that is 1e-12 of the largest value.
    scale = max(abs(value) for value in [1.0, *values]) / 1e6
    choose = np.array([[float(own == index) for own in owner] for index in range(len(jobs))])
    found = milp(
        -np.array(values) / scale,
        integrality=np.ones(len(values)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(choose, 1, 1), LinearConstraint(np.array([slots]), 0, cluster.gpus)],
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    picked = np.flatnonzero(found.x > 0.5)
    return float(sum(values[index] for index in picked))


def large_case(
    jobs: int, gpus: int, feasible: int, unit: int, seed: int, linear: bool = False
) -> tuple[Cluster, tuple[Job, ...]]:
    """A cluster at scale: each job has ``feasible`` counts, multiples of ``unit`` slots, with diminishing returns."""
    rng = random.Random(seed)
    made = []
    for index in range(jobs):
        counts = [unit * count for count in sorted(rng.sample(range(1, gpus // unit // 4 + 1), feasible))]
        exponent = 1.0 if linear else rng.uniform(0.6, 0.95)
        made.append(
            Job(
                name=f"job{index:04d}",
                profile=ThroughputProfile.of({count: 3e14 * count**exponent for count in counts}),
                weight=1.0 if linear else rng.uniform(0.5, 2.0),
                min_workers=counts[0],
                workers=0 if linear else rng.choice([0, *counts[:6]]),
                transition_seconds=rng.uniform(30, 300),
            )
        )
    return Cluster(gpus=gpus), tuple(made)


def damaged_case(rng: random.Random) -> tuple[Cluster, tuple[Job, ...], tuple[int, ...]]:
    """A small cluster of damaged nodes, jobs whose groups must lie on one node each, and the nodes' usable slots."""
    capacities = tuple(rng.choice([3, 5, 7, 8]) for _ in range(rng.randint(1, 3)))
    jobs = []
    for index in range(rng.randint(1, 3)):
        group = rng.choice([1, 2, 3, 4])
        counts = sorted({group * rng.randint(1, 4) for _ in range(3)})
        profile = ThroughputProfile.of({count: rng.choice([1.0, 2.0, 3.0]) * count for count in counts})
        jobs.append(Job(name=f"j{index}", profile=profile, group=group, workers=rng.choice([0, counts[0]])))
    return Cluster(gpus=sum(capacities)), tuple(jobs), capacities
