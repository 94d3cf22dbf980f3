"""From a scenario to the document of ``planaria simulate --json``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from planner.simulation.cluster import Outcome, Simulation
from planner.simulation.means import figures, interval, mean_outcome
from planner.simulation.memory import PlanMemory
from planner.simulation.parameters import Parameters, read_parameters
from planner.simulation.policies.unicron import Unicron
from planner.simulation.scenario import ClusterScenario, SweepScenario, TrialScenario, read_scenario
from planner.simulation.sweep import run_sweep
from planner.simulation.trials import run_trials
from planner.simulation.worlds import build_world, run_policy

SAMPLES = 200
"""Points of the curves over time."""


def run_cluster(scenario: ClusterScenario, parameters: Parameters, seed: int, where: str) -> dict[str, Any]:
    """All policies of a scenario on the same traces, one per seed."""
    memory = PlanMemory()
    worlds = [replace(build_world(scenario, parameters, seed + k, where), memory=memory) for k in range(scenario.seeds)]
    runs: dict[str, list[Outcome]] = {
        name: [run_policy(world, name, SAMPLES) for world in worlds] for name in scenario.policies
    }
    document: dict[str, Any] = {
        "scenario": scenario.name,
        "seed": seed,
        "seeds": scenario.seeds,
        "horizon_seconds": scenario.horizon_seconds,
        "failures": sum(len(world.failures) for world in worlds) / scenario.seeds,
        "policies": {name: figures(mean_outcome(outcomes)) for name, outcomes in runs.items()},
    }
    if "planaria" in runs:
        document["gains"] = _gains(runs, lambda outcome: outcome.accumulated_waf)
        if scenario.evaluation is not None:
            document["gains_with_evaluation"] = _gains(runs, lambda outcome: outcome.certain_waf)
    if "unicron" in scenario.policies:
        alone = [Simulation(world, Unicron(parameters, one_at_a_time=True), SAMPLES).run() for world in worlds]
        document["variants"] = {"unicron-one-job-at-a-time": figures(mean_outcome(alone))}
    return document


def _gains(runs: Mapping[str, Sequence[Outcome]], of: Callable[[Outcome], float]) -> dict[str, Any]:
    """The ratio of ``planaria`` to each other policy, trace by trace."""
    ours = [of(outcome) for outcome in runs["planaria"]]
    return {
        name: interval([mine / of(outcome) for mine, outcome in zip(ours, outcomes, strict=True)])
        for name, outcomes in runs.items()
        if name != "planaria" and all(of(outcome) > 0 for outcome in outcomes)
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
