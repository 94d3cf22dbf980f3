"""A scenario's world, and one policy's run in it."""

from __future__ import annotations

from pathlib import Path

from planner.simulation.cluster import Outcome, Simulation, World
from planner.simulation.failures import draw
from planner.simulation.parameters import Parameters
from planner.simulation.policies import policy
from planner.simulation.scenario import ClusterScenario
from planner.simulation.traces import Trace, read_trace
from planner.simulation.workload import Demand, build, whole_job


def build_world(scenario: ClusterScenario, parameters: Parameters, seed: int, where: str) -> World:
    """What all policies share: jobs with their rates, the failures, the evaluation demand.

    Raises:
        BadInputError: a job has no feasible layout, or the trace is wrong.
    """
    cluster = scenario.cluster
    jobs = tuple(build(spec, cluster, parameters, f"{where}: job {spec.name}") for spec in scenario.jobs)
    trace = Trace()
    if scenario.trace is not None:
        trace = read_trace(scenario.trace, Path(where).parent, cluster, parameters)
        jobs += trace.jobs
        parameters = trace.parameters or parameters
    failures = trace.failures
    if failures is None:
        failures = draw(scenario.failures, cluster, scenario.horizon_seconds, parameters, seed)
    spec = scenario.failures
    expected = spec.permanent + spec.transient + spec.preemptions + spec.switch
    gpus = cluster.nodes * cluster.gpus_per_node
    asked = scenario.evaluation
    demand = Demand(asked, gpus, len(jobs), parameters, seed) if asked else None
    return World(
        cluster=cluster, jobs=jobs, failures=failures, horizon=scenario.horizon_seconds, parameters=parameters,
        demand=demand, reports=trace.reports,
        mtbf_gpu_hours=gpus * scenario.horizon_seconds / 3600 / max(expected, 1.0),
    )  # fmt: skip


def run_policy(world: World, name: str, samples: int = 0) -> Outcome:
    """One run."""
    whole = (lambda work: whole_job(work, world.parameters)) if name == "one-job-per-dataset" else None
    return Simulation(world, policy(name, world.parameters), samples, whole).run()
