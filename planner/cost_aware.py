"""The cost-aware planner of the allocator loop: from demands to counts per holder.

Two exact programs, one after the other, made anew at every event: the plan of the training jobs over D_running
(:mod:`planner.solver`), then what they lend to evaluation over the lending horizon (:mod:`planner.lending`).
Pure, apart from an optional table of foreseen events that only saves time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite, log
from typing import TYPE_CHECKING, Any

from planner.ceilings import Ceilings, ceilings
from planner.event_table import EventTable
from planner.lending import Backlog, LendingPlan, LendingPolicy, PendingReport, lend
from planner.objective import spare_values, waf
from planner.solver import decide
from planner.topology import Topology
from planner.types import Alternative, Cluster, Decision, Job, JobKind, Node, Plan, Slot, ThroughputProfile

if TYPE_CHECKING:
    from planner.allocation import ClusterView
    from planner.demand import Demand

EVALUATION = "evaluation"
ALTERNATIVES = 5
"""Runner-up plans that a decision tells."""
UNMEASURED_EXPONENT = 0.9
"""How a rate is carried over to a count that nobody measured or modelled: ``rate·(x/known)^0.9`` (unverified)."""


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """What the costs depend on besides the demands. The defaults turn prices and spares off."""

    mtbf_gpu_hours: float = 12000.0
    """Mean slot-hours between failures."""
    gpus_per_node: int = 8
    price_per_gpu_hour: float = 0.0
    flop_value: float = 0.0
    repair_seconds: float = 0.0
    """Seconds until a lost slot is back; above 0 (with ``spares``) slots are kept in reserve when that pays."""
    spares: int = 0
    """Most slots that are kept in reserve."""
    stop_probability: float = 0.05
    """p: how likely a report stops or rolls back the run that it judges (unverified; the gate's history refines it)."""
    lending: LendingPolicy = field(default_factory=LendingPolicy)


def cluster_of(slots: int, jobs: Sequence[Job], settings: CostSettings) -> Cluster:
    """The cluster with what a spare is worth at the jobs' present counts."""
    cluster = Cluster(
        gpus=slots,
        gpus_per_node=settings.gpus_per_node,
        mtbf_gpu_hours=settings.mtbf_gpu_hours,
        price_per_gpu_hour=settings.price_per_gpu_hour,
        flop_value=settings.flop_value,
    )
    if settings.spares <= 0 or settings.repair_seconds <= 0:
        return cluster
    return replace(cluster, spare_values=spare_values(cluster, jobs, settings.repair_seconds, settings.spares))


def job_of(demand: Demand, held: int, typical: float = 1.0) -> Job:
    """A training demand as a job with its present count; ``typical`` is a slot's rate where nothing is known.

    A feasible count whose rate is unknown gets that of the nearest known count, carried over: a plan must be able to
    try a count before anybody can have measured it. Rates are taken to three digits, so that a measurement that
    trembles from step to step is not another state, for which everything would be planned anew.
    """
    known = {
        count: float(f"{rate:.3g}")
        for count, rate in demand.throughput.items()
        if count > 0 and isfinite(rate) and rate > 0
    }
    counts = [count for count in demand.feasible if 0 < count <= demand.max_slots]
    return Job(
        name=demand.holder,
        kind=JobKind.PRETRAIN,
        weight=demand.weight,
        min_workers=demand.min_slots,
        profile=ThroughputProfile.of({count: _rate(count, known, typical) for count in counts}),
        workers=held,
        faulted=demand.faulted,
        transition_seconds=demand.transition_seconds,
        group=max(1, int(demand.details.get("group", 1))),
    )


def _rate(count: int, known: Mapping[int, float], typical: float) -> float:
    if count in known:
        return known[count]
    if not known:
        return typical * float(count**UNMEASURED_EXPONENT)
    nearest = min(known, key=lambda other: (abs(log(other / count)), other))
    return known[nearest] * float((count / nearest) ** UNMEASURED_EXPONENT)


def typical_rate(demands: Sequence[Demand]) -> float:
    """The best known rate per slot of any demand, so that a job nobody has measured is given a fair trial."""
    rates = [rate / count for demand in demands for count, rate in demand.throughput.items() if count > 0]
    return max((rate for rate in rates if isfinite(rate) and rate > 0), default=1.0)


def backlog_of(
    demand: Demand, jobs: Sequence[Job], counts: Mapping[str, int], held: int, waited: float, p: float
) -> Backlog:
    """Evaluation's demand as pending reports; ``held`` slots are evaluation's now, the demand has ``waited`` seconds.

    ``demand.details`` may hold ``reports`` (each ``slot_seconds`` and, where known, ``name``, ``job``,
    ``probability``, ``tail_seconds``, ``longest_seconds``, ``waited_seconds``), ``load_seconds`` (the demand's
    transition when left out) and ``resident`` (slots with a loaded engine; all that it holds, when left out).
    Without ``reports`` the backlog is one report. A report that names no running job judges them all on average.
    """
    total = waf(jobs, counts)
    by_name = {job.name: job.rate(counts[job.name]) for job in jobs}
    average = total / max(1, sum(1 for rate in by_name.values() if rate > 0))
    given: Sequence[Mapping[str, Any]] = demand.details.get("reports") or (
        [{"slot_seconds": demand.backlog_seconds, "waited_seconds": waited}] if demand.backlog_seconds > 0 else []
    )
    reports = tuple(
        PendingReport(
            name=str(report.get("name", f"report {number + 1}")),
            slot_seconds=float(report["slot_seconds"]),
            rate=by_name.get(str(report.get("job")), average),
            probability=float(report.get("probability", p)),
            tail_seconds=float(report.get("tail_seconds", 0.0)),
            longest_seconds=float(report.get("longest_seconds", 0.0)),
            waited_seconds=float(report.get("waited_seconds", waited)),
        )
        for number, report in enumerate(given)
    )
    return Backlog(
        reports=reports,
        load_seconds=float(demand.details.get("load_seconds", demand.transition_seconds)),
        resident=int(demand.details.get("resident", held)),
        most_slots=demand.max_slots,
    )


def training_jobs(view: ClusterView, held: Mapping[str, int], before: Mapping[str, int]) -> tuple[Job, ...]:
    """The training demands as jobs; a faulted one counts from what it held before the fault (DESIGN.md)."""
    typical = typical_rate(view.demands)
    found: list[Job] = []
    for demand in view.demands:
        if demand.kind != EVALUATION:
            count = held.get(demand.holder, 0)
            if demand.faulted:
                count = max(count, before.get(demand.holder, 0))
            found.append(job_of(demand, count, typical))
    return tuple(found)


@lru_cache(maxsize=16)
def _decided(cluster: Cluster, jobs: tuple[Job, ...], most: Ceilings) -> Decision:
    """The loop asks several times a second, mostly about the same state; the runners-up are not worth that."""
    decision = decide(cluster, jobs, explain=True, most=most)
    return replace(decision, alternatives=decision.alternatives[:ALTERNATIVES])


def node_capacities(view: ClusterView) -> tuple[int, ...]:
    """Usable slots of each node that the allocator may give, largest first."""
    nodes = tuple(Node(name=n.name, slots=n.slots) for n in view.nodes if (n.usable or n.kept) and n.own is None)
    usable = Topology(nodes, frozenset(Slot.parse(name) for name in view.stuck)).capacities
    return tuple(sorted(usable.values(), reverse=True))


@dataclass(frozen=True)
class CostAware:
    """``planner(view, slots) -> Decision`` for :func:`planner.allocation.allocate`."""

    settings: CostSettings = field(default_factory=CostSettings)
    table: EventTable | None = None
    """Foreseen plans; asked first where the state is one of its states."""

    def __call__(
        self, view: ClusterView, slots: int, now: float = 0.0, before: Mapping[str, int] | None = None
    ) -> Decision:
        """Counts per holder for ``slots`` usable slots.

        ``now`` (s) is what ``Demand.since`` is counted to; ``before`` holds the counts before the present faults.
        """
        held = held_slots(view)
        jobs = training_jobs(view, held, before or {})
        evaluation = [demand for demand in view.demands if demand.kind == EVALUATION]
        if slots <= 0:
            counts = dict.fromkeys((demand.holder for demand in view.demands), 0)
            return Decision(plan=Plan(counts, 0, 0.0), reason="no slot is usable", trigger=view.trigger)
        cluster = cluster_of(slots, jobs, self.settings)
        most = ceilings(node_capacities(view), (job.group for job in jobs))  # what they can use can be placed
        found = self.table.answer_for_state(cluster, jobs, most) if self.table else None
        training = replace(found or _decided(cluster, jobs, most), trigger=view.trigger)
        if not evaluation:
            return training
        return self._with_evaluation(cluster, jobs, training, evaluation[0], held, now)

    def _with_evaluation(
        self,
        cluster: Cluster,
        jobs: Sequence[Job],
        training: Decision,
        demand: Demand,
        held: Mapping[str, int],
        now: float,
    ) -> Decision:
        counts = training.plan.assignments
        waited = max(0.0, now - demand.since) if demand.since and now else 0.0
        mine = held.get(demand.holder, 0)
        backlog = backlog_of(demand, jobs, counts, mine, waited, self.settings.stop_probability)
        if not backlog.reports:
            return _keeping(training, demand.holder, mine)
        policy = self.settings.lending
        if cluster.price_per_gpu_hour > 0 and cluster.flop_value > 0:
            policy = replace(policy, slot_second_cost=cluster.price_per_gpu_hour / 3600 * cluster.flop_value)
        loan = lend(jobs, counts, backlog, cluster.gpus, mine, cluster.running_seconds, policy)
        assignments = {**loan.assignments, demand.holder: loan.evaluation}
        plan = Plan(assignments, cluster.gpus - sum(assignments.values()), training.plan.objective)
        return replace(
            training,
            plan=plan,
            reason=f"{training.reason}; {loan.reason}" if jobs else loan.reason,
            alternatives=training.alternatives + _loan_alternatives(loan, demand.holder),
            details={"lending": _loan_details(loan, backlog)},
        )


def _keeping(training: Decision, holder: str, held: int) -> Decision:
    """With nothing queued evaluation keeps what nobody else wants: a loaded engine is dear to load again."""
    kept = min(held, training.plan.unassigned)
    plan = Plan({**training.plan.assignments, holder: kept}, training.plan.unassigned - kept, training.plan.objective)
    said = f"; {kept} stay with evaluation, whose engines are loaded" if kept else ""
    return replace(training, plan=plan, reason=training.reason + said)


def held_slots(view: ClusterView) -> dict[str, int]:
    """Slots that each demand's holder has now, on the allocator's own nodes; those being taken back do not count."""
    own = {node.name for node in view.nodes if node.own is not None}
    held: dict[str, int] = {}
    for lease in view.leases:
        if lease.revoked is None and lease.node not in own:
            holder = EVALUATION if lease.holder.startswith(f"{EVALUATION}:") else lease.holder
            held[holder] = held.get(holder, 0) + len(lease.slots)
    return held


def _loan_alternatives(loan: LendingPlan, holder: str) -> tuple[Alternative, ...]:
    return tuple(
        replace(
            other,
            plan=replace(
                other.plan,
                assignments={
                    (holder if name == EVALUATION else name): count for name, count in other.plan.assignments.items()
                },
            ),
        )
        for other in loan.alternatives
    )


def _loan_details(loan: LendingPlan, backlog: Backlog) -> dict[str, float]:
    return {
        "horizon_seconds": loan.horizon,
        "lasts_seconds": loan.lasts,
        "worth": loan.worth,
        "cost": loan.cost,
        "backlog_slot_seconds": backlog.slot_seconds,
        "reports": len(backlog.reports),
    }
