"""The joint result: one shared allocator against fixed partitions, over cells and seeds that are fixed beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from planner.errors import BadInputError
from planner.loading import validate
from planner.simulation.cluster import Outcome, Simulation, World
from planner.simulation.means import CONFIDENCE, figures, interval, mean_outcome
from planner.simulation.memory import PlanMemory
from planner.simulation.parameters import Parameters
from planner.simulation.policies.planaria import Planaria
from planner.simulation.policies.unicron import Unicron
from planner.simulation.rules import fixed_loan, other_price
from planner.simulation.scenario import ClusterScenario, SweepScenario
from planner.simulation.worlds import build_world, run_policy

POLICIES = ("planaria", "fixed-partition", "one-job-per-dataset")
LOANS = (0, 1, 2, 4)
"""Nodes lent by the simpler rules while anything waits."""
AGEINGS = (1800.0, 3600.0, 28800.0)
"""Other values of the lending price's ageing (s) that are tried; the allocator's default is 7200."""
HORIZONS = (900.0, 3600.0, 28800.0)
"""Other bounds of the lending horizon (s) that are tried; the allocator's default is 14400."""
Cell = tuple[float, float, int]


def run_sweep(scenario: SweepScenario, parameters: Parameters, seed: int, where: str) -> dict[str, Any]:
    """All cells; the reference cell's mean figures stand under ``policies``."""
    cells: list[Cell] = list(product(scenario.axes.failure_rate, scenario.axes.evaluation_load, scenario.axes.nodes))
    reference = _reference(scenario, cells, where)
    scenarios = {cell: _of_cell(scenario, cell, where) for cell in cells}
    entries: list[dict[str, Any]] = []
    policies: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    memories: dict[tuple[float, int], PlanMemory] = {}
    for cell in cells:
        memory = memories.setdefault((cell[0], cell[2]), PlanMemory())
        worlds = [_world(scenarios[cell], parameters, seed + k, where, memory) for k in range(scenario.seeds)]
        runs = {name: _runs(worlds, name) for name in POLICIES}
        partitions = {
            count: _runs(worlds, "fixed-partition", count) for count in scenario.partitions if count < cell[2]
        }
        entries.append(_entry(cell, runs, partitions))
        if cell == reference:
            policies = {name: figures(mean_outcome(outcomes)) for name, outcomes in runs.items()}
            if scenario.lending_rules:
                rules = _lending_rules(worlds, runs["planaria"], partitions)
    return {
        "scenario": scenario.name, "seed": seed, "seeds": scenario.seeds, "confidence": CONFIDENCE,
        "reference_cell": dict(zip(("failure_rate", "evaluation_load", "nodes"), reference, strict=True)),
        "policies": policies, "cells": entries, "lending_rules": rules,
    }  # fmt: skip


def _lending_rules(
    worlds: Sequence[World], priced: Sequence[Outcome], partitions: Mapping[int, Sequence[Outcome]]
) -> dict[str, Any]:
    """The allocator's price, other settings of it, and fixed loans: each against the best partition as quick as it."""
    per_node = worlds[0].cluster.gpus_per_node
    rules = {f"price, ageing {ageing:.0f} s": other_price(ageing_seconds=ageing) for ageing in AGEINGS}
    rules |= {f"price, horizon {bound:.0f} s": other_price(horizon_bound=bound) for bound in HORIZONS}
    rules |= {f"{loan} nodes while anything waits": fixed_loan(loan * per_node) for loan in LOANS}
    runs = {"the allocator's price": priced} | {
        name: [Simulation(world, Planaria(world.parameters, rule)).run() for world in worlds]
        for name, rule in rules.items()
    }
    return {
        name: _summary(outcomes) | {"best_partition_as_quick": _as_quick(outcomes, partitions)}
        for name, outcomes in runs.items()
    }


def _reference(scenario: SweepScenario, cells: Sequence[Cell], where: str) -> Cell:
    given = scenario.reference_cell
    for cell in cells:
        if given == dict(zip(("failure_rate", "evaluation_load", "nodes"), cell, strict=True)):
            return cell
    raise BadInputError(f"{where}: reference_cell: {given} is no cell of the axes")


def _of_cell(scenario: SweepScenario, cell: Cell, where: str) -> ClusterScenario:
    rate, load, nodes = cell
    base = dict(scenario.base)
    unknown = {"name", "kind", "evaluation", "policies"} & set(base)
    if unknown:
        raise BadInputError(f"{where}: base.{sorted(unknown)[0]}: is set by the sweep; remove it")
    cluster, failures = dict(base.get("cluster") or {}), dict(base.get("failures") or {})
    every = base.pop("every_checkpoints", 1)
    size = cluster.get("nodes")
    if not isinstance(size, int) or size <= 0:
        raise BadInputError(f"{where}: base.cluster.nodes: a positive number of nodes is needed, not {size!r}")
    for kind in ("permanent", "transient", "switch", "stragglers", "preemptions"):
        if isinstance(failures.get(kind), (int, float)):
            failures[kind] = failures[kind] * rate * nodes / size
    cluster["nodes"] = nodes
    whole = base | {
        "name": scenario.name, "cluster": cluster, "failures": failures, "policies": list(POLICIES),
        "evaluation": {"load_share": load, "every_checkpoints": every},
    }  # fmt: skip
    return validate(ClusterScenario, whole, f"{where}: base")


def _world(scenario: ClusterScenario, parameters: Parameters, seed: int, where: str, memory: PlanMemory) -> World:
    return replace(build_world(scenario, parameters, seed, where), memory=memory)


def _runs(worlds: Sequence[World], name: str, nodes: int | None = None) -> list[Outcome]:
    """One run per seed; ``nodes`` is a partition's size instead of the sized one."""
    if nodes is None:
        return [run_policy(world, name) for world in worlds]
    found = []
    for world in worlds:
        assert world.demand is not None
        demand = replace(world.demand, spec=world.demand.spec.model_copy(update={"partition_nodes": nodes}))
        found.append(Simulation(replace(world, demand=demand), Unicron(world.parameters)).run())
    return found


def _efficiency(outcome: Outcome) -> float:
    return outcome.accumulated_waf / outcome.gpu_hours


def _p95(outcome: Outcome) -> float:
    return float(np.percentile(outcome.latencies, 95)) if outcome.latencies else 0.0


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "useful_flop_per_gpu_hour": interval([_efficiency(outcome) for outcome in outcomes]),
        "p95_latency_seconds": interval([_p95(outcome) for outcome in outcomes]),
        "ettr": interval([outcome.ettr for outcome in outcomes]),
    }


def _entry(
    cell: Cell, runs: Mapping[str, Sequence[Outcome]], partitions: Mapping[int, Sequence[Outcome]]
) -> dict[str, Any]:
    """A cell: each policy, every partition, and the gain of sharing, seed by seed, over each of them."""
    ours = runs["planaria"]
    entry: dict[str, Any] = {
        "failure_rate": cell[0], "evaluation_load": cell[1], "nodes": cell[2],
        "policies": {name: _summary(outcomes) for name, outcomes in runs.items()},
        "partitions": {
            str(count): _summary(outcomes) | {"gain": _gain(ours, outcomes)} for count, outcomes in partitions.items()
        },
        "gain_over_fixed_partition": _gain(ours, runs["fixed-partition"]),
    }  # fmt: skip
    entry["best_partition_as_quick"] = _as_quick(ours, partitions)
    return entry


def _as_quick(ours: Sequence[Outcome], partitions: Mapping[int, Sequence[Outcome]]) -> dict[str, Any] | None:
    """The most efficient partition whose mean p95 latency is at most ours, and our gain over it."""
    target = float(np.mean([_p95(outcome) for outcome in ours]))
    found = [
        (float(np.mean([_efficiency(outcome) for outcome in outcomes])), count)
        for count, outcomes in partitions.items()
        if float(np.mean([_p95(outcome) for outcome in outcomes])) <= target
    ]
    if not found:
        return None
    best = max(found)[1]
    return {"nodes": best, "gain": _gain(ours, partitions[best])}


def _gain(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, float]:
    """Ratio of useful FLOP per GPU-hour, seed by seed on the same trace."""
    return interval([_efficiency(a) / _efficiency(b) for a, b in zip(ours, theirs, strict=True)])
