"""How many slots training lends to evaluation, and what each loan is worth (derivation: docs/allocator.md).

A checkpoint shows with probability p that its run must be stopped or rolled back; until its report is there, every
second of that run is then wasted. So over a lending horizon H, k slots for evaluation are worth

    V(k) = Σ over pending reports i of p_i·F_i·(H − min(H, T_i(k)))                                    (FLOP)

with T_i(k) the time at which report i is ready with k slots, loads included, and F_i the rate of the run that it
judges, frozen at the present plan so that the sum separates. Ageing raises p_i by ``waited/ageing_seconds``, without
bound, so that no report starves. A loan of k slots lasts for D(k), until the last response is there, at most H. A
training job to which the training plan gives x, and which lends down to x', pays the loss of rate for that long and
two transitions, into the loan from the count c that it has now and back at the end, less the transition that it
would have made without the loan:

    (F(x) − F(x'))·D(k) + [x' ≠ c]·F(c)·transition + [x' ≠ x]·F(x')·transition − [x ≠ c]·F(c)·transition

So a loan that goes on (x' = c) pays for no new transition. Idle slots cost nothing. V is not concave in k in
general, and costs depend on k through D(k): each k is an exact program of its own, all of them solved at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.objective import transition_cost
from planner.program import TIE, Options, Program, unit_of
from planner.types import Alternative, Job, Plan

_CELLS = 1 << 17
"""Cells of the lending programs that are solved at once, each in each of a job's counts."""
_FEWEST = 8
EVALUATION = "evaluation"
"""Name of evaluation's entry in a lending plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingReport:
    """A report that waits: what is left to run, what it is about, how long it has waited."""

    name: str
    slot_seconds: float
    """Work left on inference slots."""
    rate: float
    """F_i: weighted FLOP/s of the run that the report judges, at the present plan."""
    probability: float
    """p_i: how likely the report stops the run or rolls it back."""
    tail_seconds: float = 0.0
    """What follows the last response: scoring, on CPU."""
    longest_seconds: float = 0.0
    """Its longest piece that cannot be cut: no number of slots is faster than this."""
    waited_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Backlog:
    """All pending reports, in the order in which they are worked on, and the fleet's state."""

    reports: tuple[PendingReport, ...] = ()
    load_seconds: float = 0.0
    """Until a slot that holds no engine yet answers its first request."""
    resident: int = 0
    """Slots that hold a loaded engine now."""
    most_slots: int = 1_000_000
    """More slots than this cannot be used."""

    @property
    def slot_seconds(self) -> float:
        """Work left in all."""
        return sum(report.slot_seconds for report in self.reports)


@dataclass(frozen=True, kw_only=True, slots=True)
class LendingPolicy:
    """The settings of lending."""

    horizon_bound: float = 14400.0
    """Longest lending horizon (s)."""
    ageing_seconds: float = 7200.0
    """A report's p grows by 1 for each time that it has waited this long (docs/reproduction.md, "The joint result")."""
    slot_second_cost: float = 0.0
    """FLOP that a slot-second costs where slots are rented (price/3600·flop_value); 0: idle slots are free."""


@dataclass(frozen=True, slots=True)
class LendingPlan:
    """Who lends what: the new count of each lender, evaluation's slots, and the prices behind it (FLOP over H)."""

    assignments: dict[str, int]
    evaluation: int
    horizon: float
    lasts: float
    """D of the chosen count (s)."""
    worth: float
    cost: float
    reason: str
    alternatives: tuple[Alternative, ...] = field(default=())

    @property
    def lent(self) -> bool:
        """Whether any training job gives slots."""
        return self.cost > 0


def ready_times(backlog: Backlog, slots: int) -> list[float]:
    """T_i(k) in seconds from now, ``inf`` with no slot.

    The reports are worked on in order by all k slots. r = min(k, resident) of them start at once, the others after
    the load: by time t they have done ``r·t + (k − r)·max(0, t − load)`` slot-seconds, so the first W slot-seconds
    are done at ``W/r`` if that is before the load ends, else at ``(W + (k − r)·load)/k``. No report is ready before
    its longest piece has run, on a loaded slot, and its tail comes on top.
    """
    slots = min(slots, backlog.most_slots)
    if slots <= 0:
        return [float("inf")] * len(backlog.reports)
    resident = min(slots, backlog.resident)
    times: list[float] = []
    done = 0.0
    for report in backlog.reports:
        done += report.slot_seconds
        if resident and done <= resident * backlog.load_seconds:
            end = done / resident
        else:
            end = (done + (slots - resident) * backlog.load_seconds) / slots
        start = 0.0 if resident else backlog.load_seconds
        times.append(max(end, start + report.longest_seconds) + report.tail_seconds)
    return times


def horizon(backlog: Backlog, idle: int, next_event_seconds: float, policy: LendingPolicy) -> float:
    """H: until the backlog would end without a loan, the next foreseen event, or the bound; whichever is first.

    Without a loan evaluation has the ``idle`` slots (none that would have to be rented). Counted from there,
    ``V(k) − V(idle)`` is exactly what a loan saves.
    """
    times = ready_times(backlog, idle)
    return max(0.0, min(max(times), next_event_seconds, policy.horizon_bound)) if times else 0.0


def evaluation_values(
    backlog: Backlog, most: int, seconds: float, policy: LendingPolicy
) -> tuple[np.ndarray, np.ndarray]:
    """V(k) and D(k) for k = 0 … ``most``, vectorised over k: the worth of k slots, and how long they are needed.

    V(0) = 0; no slot is needed for longer than H.
    """
    k = np.arange(most + 1, dtype=np.float64)
    usable = np.minimum(k, backlog.most_slots)
    resident = np.minimum(usable, backlog.resident)
    values = np.zeros(most + 1)
    needed = np.zeros(most + 1)
    done = 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        for report in backlog.reports:
            done += report.slot_seconds
            early = (resident > 0) & (done <= resident * backlog.load_seconds)
            end = np.where(early, done / resident, (done + (usable - resident) * backlog.load_seconds) / usable)
            start = np.where(resident > 0, 0.0, backlog.load_seconds)
            answered = np.where(usable > 0, np.maximum(end, start + report.longest_seconds), np.inf)
            needed = np.maximum(needed, answered)
            ready = answered + report.tail_seconds
            chance = report.probability + report.waited_seconds / policy.ageing_seconds
            values += chance * report.rate * (seconds - np.minimum(seconds, ready))
    values[0] = 0.0
    return values, np.minimum(needed, seconds)


def loan_cost(job: Job, planned: int, count: int, seconds: float) -> float:
    """What a job pays (FLOP) for having ``count`` slots for ``seconds`` instead of the ``planned`` ones.

    ``job.workers`` is what it has now. See the equation above; it is 0 where nothing is lent.
    """
    if count == planned:
        return 0.0
    lost = (job.rate(planned) - job.rate(count)) * seconds
    back = job.rate(count) * job.transition_seconds
    return lost + transition_cost(job, count) + back - transition_cost(job, planned)


def lend(
    jobs: Sequence[Job],
    planned: Mapping[str, int],
    backlog: Backlog,
    slots: int,
    current: int,
    next_event_seconds: float = float("inf"),
    policy: LendingPolicy = LendingPolicy(),
) -> LendingPlan:
    """The lending plan on top of a training plan, which gives each job its ``planned`` count.

    ``job.workers`` is what a job has now, ``slots`` the cluster's number of slots, ``current`` what evaluation holds
    now. Training never gets more here than its plan gives it. Solved exactly, with the tie-breaking of every plan;
    then, unless slots cost money, what nobody holds goes to evaluation as well, since it is free and the backlog goes
    on after H.
    """
    most = max(0, min(slots, backlog.most_slots)) if backlog.reports else 0
    free = slots - sum(planned[job.name] for job in jobs) if policy.slot_second_cost == 0 else 0
    idle = min(most, max(0, free))
    seconds = horizon(backlog, idle, next_event_seconds, policy)
    values, needed = evaluation_values(backlog, most, seconds, policy)
    values -= np.arange(most + 1) * policy.slot_second_cost * needed
    unit = unit_of([_lender(job, planned[job.name], 0.0) for job in jobs])
    counts = _counts(most, unit, (min(current, most), 0, idle))
    count = _best_count(jobs, planned, values, needed, slots, counts)
    given = _lenders(jobs, planned, float(needed[count]), slots - count)
    if policy.slot_second_cost == 0:
        count = min(most, slots - sum(given.values()))
    lasts, cost = float(needed[count]), 0.0
    for job in jobs:
        cost += loan_cost(job, planned[job.name], given[job.name], lasts)
    worth = float(values[count])
    return LendingPlan(
        assignments=given,
        evaluation=count,
        horizon=seconds,
        lasts=lasts,
        worth=worth,
        cost=cost,
        reason=_reason(planned, backlog, given, count, seconds, lasts, worth, cost),
        alternatives=_alternatives(planned, values, slots, given, count, worth - cost, seconds),
    )


def _lenders(jobs: Sequence[Job], planned: Mapping[str, int], seconds: float, slots: int) -> dict[str, int]:
    """The counts that training keeps of ``slots`` at the least cost of a loan of ``seconds``."""
    if not jobs:
        return {}
    solution = Program([_lender(job, planned[job.name], seconds) for job in jobs], slots).solve()
    return {job.name: solution.counts[job.name] for job in jobs}


def _best_count(
    jobs: Sequence[Job],
    planned: Mapping[str, int],
    values: np.ndarray,
    needed: np.ndarray,
    slots: int,
    counts: Sequence[int],
) -> int:
    """The k among ``counts`` with the largest V(k) less what its loan costs; the first of equals.

    One exact program per k, all at once: ``least[i, u]`` is the least that the jobs so far charge for lending u units
    of slots for D(k_i); in its last column, for that many or more.
    """
    chosen = np.array(counts)
    seconds = needed[chosen]
    lenders = [_lender(job, planned[job.name], 0.0) for job in jobs]
    unit = unit_of(lenders)
    wanted = -(-np.maximum(0, chosen - (slots - sum(planned[job.name] for job in jobs))) // unit)
    most = int(wanted.max())
    least = np.full((len(counts), most + 1), np.inf)
    least[:, 0] = 0.0
    for job, lender in zip(jobs, lenders, strict=True):
        full = planned[job.name]
        before, least = least, np.full_like(least, np.inf)
        for count, value in zip(lender.counts.tolist(), lender.values.tolist(), strict=True):
            units = min(most, (full - count) // unit)
            charged = ((job.rate(full) - job.rate(count)) * seconds - value)[:, None]
            np.minimum(least[:, units:], before[:, : most + 1 - units] + charged, out=least[:, units:])
            over = before[:, most + 1 - units :].min(axis=1, initial=np.inf) + charged[:, 0]
            np.minimum(least[:, most], over, out=least[:, most])
    at_least = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]
    totals = values[chosen] - at_least[np.arange(len(counts)), wanted]
    best = totals.max()
    return counts[int(np.argmax(totals >= best - abs(best) * TIE))]


def _counts(most: int, unit: int, first: Sequence[int]) -> list[int]:
    """Counts of slots that are weighed against each other: ``first``, then every one, or where that are too many
    (:data:`_CELLS` program cells) some, farther and farther apart."""
    steps = most // unit
    tried = max(_FEWEST, min(steps, _CELLS // max(1, steps)))
    every = (
        np.unique(np.geomspace(1, max(1, steps), tried).round().astype(int)) if steps > tried else range(1, steps + 1)
    )
    found = [*first, *(int(step) * unit for step in every), most]
    return [count for count in dict.fromkeys(found) if 0 <= count <= most]


def _lender(job: Job, planned: int, seconds: float) -> Options:
    """A training job's choices in the lending program: what its plan gives it, or fewer, at the price of the loan."""
    counts = [0, *(count for count in job.profile.counts if job.min_workers <= count < planned)]
    if planned:
        counts.append(planned)
    costs = [-loan_cost(job, planned, count, seconds) for count in counts]
    return Options(job.name, np.array(counts, dtype=np.int64), np.array(costs), job.workers, job.group)


def _reason(
    planned: Mapping[str, int],
    backlog: Backlog,
    given: dict[str, int],
    count: int,
    seconds: float,
    lasts: float,
    worth: float,
    cost: float,
) -> str:
    """In words, with both sides as rates over the horizon."""
    if not backlog.reports:
        return "evaluation has no backlog"
    waits = f"a backlog of {backlog.slot_seconds:.0f} slot-seconds in {_counted(len(backlog.reports), 'report')}"
    if count == 0:
        return f"gave nothing to evaluation: {waits} is worth less than what training would lose"
    if seconds <= 0:
        return f"gave {_counted(count, 'idle slot')} to evaluation, which has {waits}"
    gain, loss = worth / seconds, cost / seconds
    lenders = [f"{name} {count} → {given[name]}" for name, count in planned.items() if given[name] != count]
    from_whom = f", lent by {', '.join(lenders)}" if lenders else ", all idle"
    return (
        f"gave {_counted(count, 'slot')} to evaluation{from_whom}: {waits} is worth {gain:.3g} FLOP/s over the next "
        f"{seconds:.0f} s, training loses {loss:.3g} FLOP/s of that while the loan lasts, {lasts:.0f} s"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _alternatives(
    planned: Mapping[str, int],
    values: np.ndarray,
    slots: int,
    given: dict[str, int],
    count: int,
    net: float,
    seconds: float,
) -> tuple[Alternative, ...]:
    """What no loan would have cost, and what lending nothing beyond the idle slots would."""
    kept = {name: planned[name] for name in given}
    idle = min(len(values) - 1, max(0, slots - sum(kept.values())))
    best_idle = int(values[: idle + 1].argmax())
    found: list[Alternative] = []
    for label, evaluation in (("no slot to evaluation", 0), ("only idle slots to evaluation", best_idle)):
        if (kept, evaluation) == (given, count) or sum(kept.values()) + evaluation > slots:
            continue
        value = float(values[evaluation])
        plan = Plan(kept | {EVALUATION: evaluation}, slots - sum(kept.values()) - evaluation, value)
        if all(dict(other.plan.assignments) != plan.assignments for other in found):
            found.append(Alternative(f"{label} (over {seconds:.0f} s)", plan, max(net - value, 0.0)))
    return tuple(found)
