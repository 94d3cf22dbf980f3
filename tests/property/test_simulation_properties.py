"""Whatever fails whenever: accounts add up, nothing is negative, no node is shared, a seed gives one run."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.ettr import LOSSES
from planner.simulation.cluster import Outcome, Simulation
from planner.simulation.parameters import read_parameters
from planner.simulation.policies import policy
from planner.simulation.scenario import POLICIES, ClusterScenario
from planner.simulation.worlds import build_world, run_policy

PARAMETERS = read_parameters()
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TRAINING_ONLY = [name for name in POLICIES if name not in ("fixed-partition", "one-job-per-dataset")]


@st.composite
def scenarios(draw: st.DrawFn) -> ClusterScenario:
    nodes = draw(st.integers(2, 6))
    evaluates = draw(st.booleans())
    jobs: list[dict[str, Any]] = []
    for index in range(draw(st.integers(1, 3))):
        counts = draw(st.lists(st.integers(1, nodes), min_size=1, max_size=4, unique=True))
        job: dict[str, Any] = {
            "name": f"j{index}", "weight": draw(st.sampled_from([0.5, 1.0, 2.0])),
            "throughput": {8 * count: 1e15 * count**0.9 for count in counts},
            "checkpoint_interval_seconds": draw(st.sampled_from([600.0, 1800.0])),
            "submit_seconds": draw(st.sampled_from([0.0, 0.0, 5000.0])),
        }  # fmt: skip
        if draw(st.booleans()):
            job["flop"] = draw(st.sampled_from([1e18, 1e19]))
        jobs.append(job)
    amount = st.sampled_from([0, 1, 4, 12])
    failures = {kind: draw(amount) for kind in ("permanent", "transient", "switch", "stragglers", "preemptions")}
    return ClusterScenario.model_validate(
        {
            "name": "random", "horizon_seconds": 40_000, "jobs": jobs,
            "cluster": {"nodes": nodes, "nodes_per_switch": 2},
            "failures": failures | {"repair": {"low": 500, "high": 30_000},
                                    "notice_seconds": draw(st.sampled_from([0.0, 120.0]))},
            "evaluation": {"load_share": draw(st.sampled_from([0.05, 0.5]))} if evaluates else None,
            "policies": list(POLICIES) if evaluates else TRAINING_ONLY,
        }
    )  # fmt: skip


def check(outcome: Outcome) -> None:
    assert set(outcome.losses) == set(LOSSES)
    assert all(value >= -1e-6 for value in outcome.losses.values()), outcome.losses
    parts = sum(outcome.losses.values()) + outcome.ettr * outcome.makespan
    assert parts == pytest.approx(outcome.makespan, rel=1e-6) or outcome.accumulated_waf == 0
    assert 0 <= outcome.ettr <= 1 + 1e-9
    assert outcome.useful_flop >= 0
    assert all(latency >= 0 for latency in outcome.latencies)
    assert 0 <= outcome.busy_gpu_hours <= outcome.gpu_hours * (1 + 1e-9)


@QUICK
@given(scenario=scenarios(), seed=st.integers(0, 1000))
def test_accounts_add_up_under_every_policy(scenario: ClusterScenario, seed: int) -> None:
    world = build_world(scenario, PARAMETERS, seed, "random")
    for name in scenario.policies:
        check(run_policy(world, name))


@QUICK
@given(scenario=scenarios(), seed=st.integers(0, 1000))
def test_the_same_seed_gives_the_same_run(scenario: ClusterScenario, seed: int) -> None:
    one, other = (run_policy(build_world(scenario, PARAMETERS, seed, "random"), "planaria", 10) for _ in range(2))
    assert one == other


@QUICK
@given(scenario=scenarios(), seed=st.integers(0, 1000), name=st.sampled_from(TRAINING_ONLY))
def test_nodes_are_held_by_one_job_and_jobs_use_what_they_hold(scenario: ClusterScenario, seed: int, name: str) -> None:
    sim = Simulation(build_world(scenario, PARAMETERS, seed, "random"), policy(name, PARAMETERS))

    def look() -> None:
        held = [node for job in sim.jobs for node in job.nodes]
        assert len(held) == len(set(held))
        for job in sim.jobs:
            assert len(set(job.active)) == len(job.active)
            if job.stage == "running" and not job.undetected:
                assert set(job.active) <= set(job.nodes), (name, job.name)

    for step in range(1, 200):
        sim.engine.at(step * 200.0, look)
    check(sim.run())
