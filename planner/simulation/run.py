"""From a scenario to the document of ``planaria simulate --json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from planner.ettr import LOSSES
from planner.simulation.cluster import Outcome, Simulation, World
from planner.simulation.failures import draw
from planner.simulation.parameters import Parameters, read_parameters
from planner.simulation.policies import policy
from planner.simulation.policies.unicron import Unicron
from planner.simulation.scenario import ClusterScenario, SweepScenario, TrialScenario, read_scenario
from planner.simulation.sweep import run_sweep
from planner.simulation.traces import Trace, read_trace
from planner.simulation.trials import run_trials
from planner.simulation.workload import Demand, build, whole_job

SAMPLES = 200
"""Points of the curves over time."""
PERCENTILES = (50, 95, 99)


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


def run_cluster(scenario: ClusterScenario, parameters: Parameters, seed: int, where: str) -> dict[str, Any]:
    """All policies of a scenario on one trace."""
    world = build_world(scenario, parameters, seed, where)
    document: dict[str, Any] = {
        "scenario": scenario.name,
        "seed": seed,
        "horizon_seconds": scenario.horizon_seconds,
        "failures": len(world.failures),
        "policies": {name: figures(run_policy(world, name, SAMPLES)) for name in scenario.policies},
    }
    if "unicron" in scenario.policies:
        one = Simulation(world, Unicron(parameters, one_at_a_time=True), SAMPLES).run()
        document["variants"] = {"unicron-one-job-at-a-time": figures(one)}
    return document


def figures(outcome: Outcome) -> dict[str, Any]:
    """One policy's entry of the document; seconds and FLOP."""
    latencies = np.array(outcome.latencies)
    return {
        "accumulated_waf": outcome.accumulated_waf,
        "useful_flop": outcome.useful_flop,
        "ettr": outcome.ettr,
        "gpu_hours": outcome.gpu_hours,
        "cost": outcome.cost,
        "makespan_seconds": outcome.makespan,
        "evaluation_latency": {
            f"p{percent}": float(np.percentile(latencies, percent)) if latencies.size else None
            for percent in PERCENTILES
        },
        "losses": {name: outcome.losses[name] for name in LOSSES},
        "utilisation": outcome.busy_gpu_hours / outcome.gpu_hours if outcome.gpu_hours else 0.0,
        "price_per_useful_flop": outcome.cost / outcome.useful_flop if outcome.useful_flop else None,
        "useful_flop_per_gpu_hour": outcome.useful_flop / outcome.gpu_hours if outcome.gpu_hours else 0.0,
        "reports": len(outcome.latencies) - outcome.pending,
        "reports_pending": outcome.pending,
        "events": outcome.events,
        "series": [[time, value] for time, value in outcome.series],
    }


def simulate(path: Path, seed: int | None = None) -> dict[str, Any]:
    """The document of a scenario file.

    Raises:
        BadInputError: it cannot run; one line with file, field and value.
    """
    scenario, parameters = read_scenario(path), read_parameters()
    used = scenario.seed if seed is None else seed
    if isinstance(scenario, TrialScenario):
        return run_trials(scenario, parameters, used)
    if isinstance(scenario, SweepScenario):
        return run_sweep(scenario, parameters, used, str(path))
    return run_cluster(scenario, parameters, used, str(path))
