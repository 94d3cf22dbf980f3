"""From jobs and a cluster to a decision: the optimal plan, its price per job, its reason in words.

Pure: the same input gives the same plan, and a plan carried out and planned again stays as it is (no churn).
The optimisation itself is :mod:`planner.program`; the equations are in :mod:`planner.objective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.ceilings import Ceilings
from planner.objective import options, price, spare_options, spare_worth
from planner.program import Options, Program, Solution
from planner.types import Alternative, Cluster, Decision, Job, JobPrice, Plan, Trigger

MOST_WAITING = 20
"""Waiting jobs that a reason explains one by one."""


def program(cluster: Cluster, jobs: Sequence[Job], most: Ceilings = ()) -> Program:
    """The program of a cluster and its jobs; ``most`` as :func:`planner.ceilings.ceilings` gives it.

    Raises:
        ValueError: two jobs have one name.
    """
    return Program(entries(cluster, jobs), cluster.gpus, ceilings=dict(most) or None)


def entries(cluster: Cluster, jobs: Sequence[Job]) -> list[Options]:
    """What each job, and the reserve if there is one, can be given.

    Raises:
        ValueError: two jobs have one name.
    """
    if len({job.name for job in jobs}) != len(jobs):
        raise ValueError("two jobs have the same name")
    spare = spare_options(cluster)
    return [*(options(job, cluster) for job in jobs), *([spare] if spare is not None else [])]


def solve(cluster: Cluster, jobs: Sequence[Job], most: Ceilings = ()) -> Plan:
    """The plan that DESIGN.md puts first: highest objective, then the tie-breaking order."""
    return to_plan(cluster, jobs, program(cluster, jobs, most).solve())


def to_plan(cluster: Cluster, jobs: Sequence[Job], solution: Solution) -> Plan:
    """A program's solution as a plan, in the jobs' order; the objective is summed in that order."""
    return _priced(cluster, jobs, solution)[0]


def _priced(cluster: Cluster, jobs: Sequence[Job], solution: Solution) -> tuple[Plan, tuple[JobPrice, ...]]:
    assignments = {job.name: solution.counts[job.name] for job in jobs}
    prices = tuple(price(job, assignments[job.name], cluster) for job in jobs)
    total = 0.0
    for item in prices:
        total += item.value
    left = cluster.gpus - sum(assignments.values())
    return Plan(assignments, left, total + spare_worth(cluster, left) + 0.0), prices


def decide(
    cluster: Cluster,
    jobs: Sequence[Job],
    trigger: Trigger | None = None,
    explain: bool = False,
    most: Ceilings = (),
) -> Decision:
    """The decision for an event that has already been applied to ``cluster`` and ``jobs``.

    ``explain`` adds, for each job, the best plan in which it gets another count (the first of them is the
    second-best plan of all).
    """
    whole = program(cluster, jobs, most)
    decision = describe(cluster, jobs, whole.solve(), trigger)
    if not explain:
        return decision
    return replace(decision, alternatives=runner_ups(cluster, jobs, decision.plan, whole))


def describe(cluster: Cluster, jobs: Sequence[Job], solution: Solution, trigger: Trigger | None = None) -> Decision:
    """A solution as a plan with the price of each job and the reason in words."""
    plan, prices = _priced(cluster, jobs, solution)
    return Decision(plan=plan, reason=reason(cluster, jobs, plan, prices), prices=prices, trigger=trigger)


def runner_ups(
    cluster: Cluster, jobs: Sequence[Job], plan: Plan, whole: Program | None = None
) -> tuple[Alternative, ...]:
    """For each job the best plan in which it gets another count than ``plan`` gives; best first, each plan once."""
    from planner.splice import Spliced  # the tables are only needed here and for the next-event table

    tables = Spliced(whole or program(cluster, jobs))
    found: dict[tuple[int, ...], Alternative] = {}
    for job in jobs:
        solution = tables.without(job.name, plan.assignments[job.name])
        if solution is None:
            continue
        other = to_plan(cluster, jobs, solution)
        key = tuple(other.assignments.values())
        new = other.assignments[job.name]
        label = f"{job.name} with {new} instead of {plan.assignments[job.name]}"
        found.setdefault(key, Alternative(label, other, max(plan.objective - other.objective, 0.0)))
    return tuple(sorted(found.values(), key=lambda other: (other.cost, tuple(sorted(other.plan.assignments.items())))))


def reason(cluster: Cluster, jobs: Sequence[Job], plan: Plan, prices: Sequence[JobPrice]) -> str:
    """One line that says what changes, what stays and what each waiting job is missing."""
    parts: list[str] = []
    moved = [item for item in prices if item.old != item.new and item.new > 0]
    if moved:
        parts.append(", ".join(_moved(item) for item in moved))
    kept = [item for item in prices if item.old == item.new and item.new > 0]
    if kept:
        parts.append("unchanged: " + ", ".join(f"{item.name} at {item.new}" for item in kept))
    healing = [job.name for job in jobs if job.faulted and plan.assignments[job.name] > 0]
    if healing:
        parts.append("healing after a fault: " + ", ".join(healing))
    waiting = [job for job in jobs if plan.assignments[job.name] == 0]
    parts += [_waiting(job, cluster, plan) for job in waiting[:MOST_WAITING]]
    if len(waiting) > MOST_WAITING:
        parts.append(f"{len(waiting) - MOST_WAITING} more jobs wait")
    if plan.unassigned:
        parts.append(f"{plan.unassigned} of {cluster.gpus} slots unassigned: {_idle(cluster)}")
    return "; ".join(parts) or "no jobs"


def _moved(item: JobPrice) -> str:
    if item.old == 0:
        return f"{item.name} starts at {item.new}"
    costs = f"worth {item.worth:.3g}, transition costs {item.transition_cost:.3g} FLOP"
    return f"{item.name} {item.old} → {item.new} ({costs})"


def _idle(cluster: Cluster) -> str:
    why = "no listed count of any job would gain by them"
    if cluster.price_per_gpu_hour > 0 and cluster.flop_value > 0:
        why += " more than they cost"
    if cluster.spare_values:
        why += ", or they are worth more as spares at the next failure"
    return why


def _waiting(job: Job, cluster: Cluster, plan: Plan) -> str:
    """Why a job gets nothing, and what is missing."""
    feasible = job.feasible(cluster.gpus)
    least = min((count for count in job.profile.counts if count >= job.min_workers), default=None)
    if least is None:
        return f"{job.name} waits: none of its listed counts reaches its minimum of {job.min_workers}"
    if not feasible:
        missing = least - cluster.gpus
        return (
            f"{job.name} waits: it needs at least {least} slots and the cluster has {cluster.gpus}, {missing} too few"
        )
    if plan.unassigned >= least:
        return f"{job.name} waits: no count is worth more than leaving the slots free"
    return (
        f"{job.name} waits: it needs at least {least} slot{'s' * (least > 1)}, {plan.unassigned} unassigned, "
        f"{least - plan.unassigned} missing; what the other jobs do with them is worth more"
    )
