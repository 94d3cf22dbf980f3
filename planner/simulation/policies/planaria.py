"""This project: the simulated events are answered by the very functions that production calls.

:func:`planner.allocation.allocate` with :class:`planner.cost_aware.CostAware` (the solver and the lending price) says
who gets which slots, :func:`planner.escalation.decide` and the severity table say what is done about a failure. What
is modelled here is only the doing: how long re-forming, starting, joining and releasing take (parameter file), and
that starting a newcomer overlaps with training.

Slots. With evaluation, or on few nodes, slots are GPUs on their nodes. A large cluster without evaluation is one pool
whose slots are whole nodes: the same functions, counted in nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from planner.allocation import EVALUATION_GRACE, Allocation, ClusterView, NodeView, allocate
from planner.cost_aware import EVALUATION, CostAware, CostSettings
from planner.demand import Demand
from planner.escalation import Cure, FaultSeen, RanksStarted, State, StepCompleted
from planner.escalation import decide as escalate
from planner.leases import DEFAULT_TTL, GrantRequest, Lease
from planner.severity import Severity
from planner.simulation.jobs import RUNNING, RunningJob
from planner.simulation.parameters import Parameters
from planner.simulation.policies.base import Policy, Strike
from planner.types import Decision, Trigger

POOL = "pool"
LARGE = 128
"""Nodes from which a cluster without evaluation is one pool."""
Planner = Callable[[ClusterView, int, float, Mapping[str, int]], Decision]


class Planaria(Policy):
    """``rule`` replaces the lending price by a simpler rule, for comparison (:mod:`planner.simulation.rules`)."""

    heeds_notice = True
    watches_stragglers = True
    shares = True

    def __init__(self, parameters: Parameters, rule: Callable[[CostAware], Planner] | None = None) -> None:
        super().__init__(parameters)
        self.given = parameters.planaria
        self.stall_share = self.given.stall_share
        self.leases: dict[str, Lease] = {}
        self.escalation: dict[str, State] = {}
        self.before: dict[str, int] = {}
        self.faulted: set[str] = set()
        self._tokens = 0
        self._rule = rule
        self._timer = False
        self._deciding = False
        self._again = False

    # ------------------------------------------------------------ the cluster as the allocator sees it

    def attach(self, sim: object) -> None:
        """Choose the slots and build what never changes."""
        super().attach(sim)  # type: ignore[arg-type]
        world = self.sim.world
        cluster = world.cluster
        self.pooled = not world.evaluates and cluster.nodes >= LARGE
        self.unit = 1 if self.pooled else cluster.gpus_per_node
        per_slot = cluster.gpus_per_node if self.pooled else 1
        settings = CostSettings(
            mtbf_gpu_hours=world.mtbf_gpu_hours / per_slot,
            gpus_per_node=1 if self.pooled else cluster.gpus_per_node,
            stop_probability=self.parameters.evaluation.stop_probability,
        )
        planner = CostAware(settings, world.memory)
        self._planner: Planner = self._rule(planner) if self._rule else planner
        self._demands = {job.name: self._demand(job) for job in self.sim.jobs}
        self._nodes = [NodeView(name=f"node-{node:04d}", slots=self.unit, usable=True) for node in range(cluster.nodes)]
        self._index = {view.name: node for node, view in enumerate(self._nodes)}

    def _demand(self, job: RunningJob) -> Demand:
        spec, unit = job.spec, self.unit
        counts = [count for count in spec.profile.counts if count >= spec.min_nodes]
        most = counts[-1] if counts else 0
        return Demand(
            holder=f"job:{job.name}", kind="pretrain", weight=spec.weight, min_slots=spec.min_nodes * unit,
            max_slots=most * unit, feasible=tuple(count * unit for count in counts),
            throughput={count * unit: spec.profile.rate(count) for count in counts},
            transition_seconds=self._reform(most) + self.given.join, details={"group": unit},
        )  # fmt: skip

    def _view(self, trigger: Trigger) -> ClusterView:
        up = self.sim.up
        demands = [
            replace(self._demands[job.name], faulted=True) if job.name in self.faulted else self._demands[job.name]
            for job in self.sim.jobs
            if job.live
        ]
        evaluation = self._evaluation_demand()
        if evaluation is not None:
            demands.append(evaluation)
        leases = tuple(self.leases.values())
        if self.pooled:
            down = frozenset(f"{POOL}/{node}" for node, is_up in enumerate(up) if not is_up)
            pool = NodeView(name=POOL, slots=len(up), usable=True)
            return ClusterView(nodes=(pool,), demands=tuple(demands), leases=leases, quarantine=down, stuck=down,
                               trigger=trigger)  # fmt: skip
        nodes = tuple(
            view if is_up else replace(view, usable=False, why="down")
            for view, is_up in zip(self._nodes, up, strict=True)
        )
        return ClusterView(nodes=nodes, demands=tuple(demands), leases=leases, trigger=trigger)

    def _evaluation_demand(self) -> Demand | None:
        if not self.sim.world.evaluates:
            return None
        service, now = self.sim.evaluation, self.sim.now
        reports = [
            {"name": f"{report.job}/{report.index}", "job": f"job:{report.job}", "slot_seconds": report.left,
             "tail_seconds": report.work.tail, "longest_seconds": report.work.longest,
             "waited_seconds": now - report.published}
            for report in service.queue
        ]  # fmt: skip
        return Demand(
            holder=EVALUATION, kind=EVALUATION, weight=1.0, min_slots=0,
            max_slots=self.sim.world.gpus, feasible=(), throughput={},
            transition_seconds=service.load_seconds, backlog_seconds=sum(report.left for report in service.queue),
            details={"reports": reports, "load_seconds": service.load_seconds, "resident": service.loaded},
        )  # fmt: skip

    def _nodes_of(self, lease: Lease) -> list[int]:
        return list(lease.slots) if lease.node == POOL else [self._index[lease.node]]

    # ------------------------------------------------------------ decide and carry out

    def decide(self, trigger: Trigger) -> None:
        """Ask the allocator and do what it says; what happens meanwhile is decided right after."""
        if self._deciding:
            self._again = True
            return
        self._deciding = True
        self.sim.evaluation.settle()
        view = self._view(trigger)
        now = self.sim.now
        allocation = allocate(view, now, lambda seen, slots: self._planner(seen, slots, now, self.before))
        self.faulted.clear()
        self._carry_out(allocation)
        self._deciding = False
        if self._again:
            self._again = False
            self.decide(Trigger.TIMER)
        self._keep_time()

    def _carry_out(self, allocation: Allocation) -> None:
        leaving: dict[str, list[str]] = {}
        for revocation in allocation.revocations:
            lease = self.leases[revocation.lease]
            self.leases[lease.id] = replace(lease, revoked=self.sim.now + EVALUATION_GRACE)
            leaving.setdefault(_holder(lease), []).append(lease.id)
        granted: dict[str, list[Lease]] = {}
        for request in allocation.grants:
            lease = self._grant(request)
            granted.setdefault(_holder(lease), []).append(lease)
        mine = leaving.pop(EVALUATION, [])
        if mine:
            self.sim.evaluation.change_slots(-len(mine))
            self.sim.engine.after(self.given.release_evaluation, lambda: self._release(mine))
        if EVALUATION in granted:
            self.sim.evaluation.change_slots(len(granted.pop(EVALUATION)))
        for job in self.sim.jobs:
            holder = f"job:{job.name}"
            if holder in leaving:
                self._shrink(job, leaving[holder])
            if holder in granted:
                self._grow(job)

    def _grant(self, request: GrantRequest) -> Lease:
        self._tokens += 1
        lease = Lease(
            id=f"lease-{self._tokens:08d}", token=self._tokens, holder=request.holder, node=request.node,
            slots=request.slots, granted=self.sim.now, expires=float("inf"), ttl=DEFAULT_TTL,
        )  # fmt: skip
        self.leases[lease.id] = lease
        return lease

    def _release(self, leases: Sequence[str]) -> None:
        gone = [self.leases.pop(lease) for lease in leases if lease in self.leases]
        if gone:
            self.decide(Trigger.BACKLOG_CHANGED)

    def _held(self, job: RunningJob) -> list[int]:
        """Nodes of the job's leases that are not being taken back."""
        holder = f"job:{job.name}"
        found = [lease for lease in self.leases.values() if lease.holder == holder and lease.revoked is None]
        return sorted(node for lease in found for node in self._nodes_of(lease))

    def _keep_time(self) -> None:
        """While reports wait, lending is priced anew now and then: their worth grows with their age."""
        if self.sim.world.evaluates and self.sim.evaluation.queue and not self._timer:
            self._timer = True
            self.sim.engine.after(self.given.replan, self._tick)

    def _tick(self) -> None:
        self._timer = False
        if self.sim.evaluation.queue:
            self.decide(Trigger.TIMER)

    # ------------------------------------------------------------ transitions

    def _reform(self, nodes: int) -> float:
        return self.parameters.communicators.seconds(nodes * self.sim.world.cluster.gpus_per_node)

    def _shrink(self, job: RunningJob, leases: list[str]) -> None:
        """At the step's end the job re-forms without the slots that are taken back, then they are free."""
        going = {node for lease in leases for node in self._nodes_of(self.leases[lease])}
        left = [node for node in job.active if node not in going]

        def free() -> None:
            self.sim.assign(job, self._held(job))
            self._release(leases)

        if job.stage == RUNNING:
            self.sim.follow(job, [("reallocate", self._reform(len(left)))], lambda: self._train(job, left))
        else:
            job.active = left
        self.sim.engine.after(self._reform(len(left)), free)

    def _grow(self, job: RunningJob) -> None:
        """Newcomers start while the others train, then join; a job that has nothing starts."""
        self.sim.assign(job, {*self._held(job), *(node for node in job.active if self.sim.owner[node] is job)})
        if job.stage == RUNNING:
            self._await_newcomers(job)
        elif job.stage == "waiting":
            self._start(job)

    def _start(self, job: RunningJob) -> None:
        state = self.escalation.get(job.name, State())
        self.escalation[job.name] = escalate(state, RanksStarted()).state
        held = self._held(job)
        stages = [("start", self.given.process_start), ("load", self.given.load_peer)]
        self.sim.follow(job, stages, lambda: self._train(job, held))

    def _train(self, job: RunningJob, active: Sequence[int]) -> None:
        """Go on with ``active``; if the job holds more, those are starting and will join."""
        held = set(self._held(job))
        active = [node for node in active if self.sim.up[node] and node in held]
        self.sim.go(job, active, self._rate(job, len(active)))
        if len(held) > len(active):
            self._await_newcomers(job)
        elif job.stage == "waiting":
            self.decide(Trigger.TIMER)

    def _rate(self, job: RunningJob, count: int) -> float:
        """At a count without a layout of its own the survivors go on with the largest layout within it, or with one
        replica less than they had."""
        spec = job.spec
        exact = spec.rate(count)
        if exact > 0:
            return exact
        listed = [spec.rate(other) for other in spec.profile.counts if other <= count]
        above = [other for other in spec.profile.counts if other > count and other >= spec.min_nodes]
        healed = 0.0
        if above and spec.replicas(above[0]) > 1:
            per_replica = above[0] / spec.replicas(above[0])
            if above[0] - count <= per_replica:
                healed = spec.one_replica_less(above[0])
        return max([healed, *listed])

    def _await_newcomers(self, job: RunningJob) -> None:
        joined = self._held(job)
        seconds = self.given.newcomer_start
        if job.stage != RUNNING:
            stages = [("start", seconds), ("load", self.given.load_peer)]
            self.sim.follow(job, stages, lambda: self._train(job, joined))
            return
        stall = [("reallocate", self._reform(len(joined)) + self.given.join)]
        self.sim.at_version(job, seconds, lambda: self.sim.follow(job, stall, lambda: self._train(job, joined)))

    # ------------------------------------------------------------ what happens

    def arrived(self) -> None:
        """A new demand."""
        self.decide(Trigger.JOB_SUBMITTED)

    def ended(self, job: RunningJob) -> None:
        """Its leases are released."""
        self._release_job(job)
        self.decide(Trigger.JOB_ENDED)

    def _release_job(self, job: RunningJob) -> None:
        holder = f"job:{job.name}"
        for lease in [lease for lease in self.leases.values() if lease.holder == holder]:
            del self.leases[lease.id]

    def repaired(self, nodes: list[int]) -> None:
        """More slots."""
        self.decide(Trigger.NODE_JOINED)

    def lost_idle(self, nodes: list[int]) -> None:
        """Fewer slots; evaluation may have held some of them."""
        self._drop(nodes)
        self.decide(Trigger.NODE_LOST)

    def published(self) -> None:
        """A growing backlog."""
        self.decide(Trigger.CHECKPOINT_PUBLISHED)

    def evaluation_changed(self) -> None:
        """A shrinking backlog."""
        self.decide(Trigger.BACKLOG_CHANGED)

    def _drop(self, nodes: Sequence[int]) -> None:
        """Leases on dead nodes end."""
        dead = set(nodes)
        lost = 0
        for lease in [lease for lease in self.leases.values() if dead & set(self._nodes_of(lease))]:
            del self.leases[lease.id]
            if _holder(lease) == EVALUATION and lease.revoked is None:
                lost += 1
        for job in {id(owner): owner for node in nodes if (owner := self.sim.owner[node])}.values():
            self.sim.assign(job, [node for node in job.nodes if node not in dead])
        if lost:
            self.sim.evaluation.change_slots(-lost)

    def struck(self, strike: Strike) -> None:
        """The severity table and the escalation decide on the cure."""
        job, cure = strike.job, self._cure(strike)
        strike_nodes = set(strike.nodes)
        survivors = [node for node in job.active if node not in strike_nodes and self.sim.up[node]]
        replicas = job.spec.replicas(len(job.active))
        stages = [("decide", self.given.decide)]
        if cure is Cure.RETRY:
            stages.append(("reallocate", self._reform(len(job.active))))
            if strike.failure.luck < self.parameters.failures.retry_success:
                active = list(job.active)
                self.sim.follow(job, stages, lambda: self._train(job, active))
                return
            stages.append(("detect", self.parameters.detection.exception_propagation))
        if strike.failure.permanent:
            # What the lease covered besides the dead node stays with the job only if it is granted again.
            self.before[f"job:{job.name}"] = len(job.nodes) * self.unit
            self.faulted.add(f"{job.name}")
            self._drop(strike.nodes)
        if cure in (Cure.RESTART_ALL, Cure.GIVE_UP) or not survivors or len(strike.nodes) >= replicas:
            self.sim.roll_back(job, self.given.snapshot_interval)
            if cure is Cure.GIVE_UP:
                stages += [("other", self.parameters.manual_restart.resubmit + self.parameters.manual_restart.setup)]
                self.escalation[job.name] = State()
            self.sim.stop(job, "decide")
            job.active = []
            if strike.failure.permanent:
                self.decide(Trigger.NODE_LOST)
            self._restart_all(job, stages)
            return
        self.sim.settle(job)
        job.share_micro_batches(replicas)
        job.active = survivors
        stages.append(("reallocate", self._reform(len(survivors))))
        self.sim.follow(job, stages, lambda: self._train(job, job.active))
        if strike.failure.permanent:
            self.decide(Trigger.NODE_LOST)

    def _restart_all(self, job: RunningJob, stages: list[tuple[str, float]]) -> None:
        held = self._held(job)
        self.sim.assign(job, held)
        if not held:
            self.sim.go(job, [], 0.0)
            return
        again = [*stages, ("start", self.given.process_start), ("load", self.given.load_peer)]
        self.sim.follow(job, again, lambda: self._train(job, self._held(job)))

    def _cure(self, strike: Strike) -> Cure:
        job, failure = strike.job, strike.failure
        step = int(job.run_clock / job.spec.seconds_of_step(max(1, len(job.active))))
        state = escalate(self.escalation.get(job.name, State()), StepCompleted(step)).state
        seen = FaultSeen(
            severity=failure.severity, cause=failure.cause, node=f"node-{strike.nodes[0]:04d}",
            process_alive=failure.severity == Severity.SEV3,
            can_heal=len(strike.nodes) < job.spec.replicas(len(job.active)),
        )  # fmt: skip
        decision = escalate(state, seen)
        self.escalation[job.name] = decision.state
        return decision.cure or Cure.RETRY


def _holder(lease: Lease) -> str:
    return EVALUATION if lease.holder.startswith(f"{EVALUATION}:") else lease.holder
