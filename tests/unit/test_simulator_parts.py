"""The simulator's parts against arithmetic: event order, accounts, failures, evaluation, loads, shards, costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.severity import Severity
from planner.simulation.cluster import Simulation, World
from planner.simulation.engine import Engine, generator
from planner.simulation.evaluation import EvaluationService, Report
from planner.simulation.failures import Failure, draw
from planner.simulation.jobs import RUNNING, RunningJob
from planner.simulation.parameters import read_parameters
from planner.simulation.policies import policy
from planner.simulation.policies.elastic import Oobleck
from planner.simulation.policies.planaria import Planaria
from planner.simulation.scenario import ClusterScenario, ClusterSpec, FailureSpec, JobSpec
from planner.simulation.trials import Loads, baseline, datasets, lower_bound, ours
from planner.simulation.workload import Work, build
from planner.simulation.worlds import build_world

PARAMETERS = read_parameters()
CLUSTER = ClusterSpec(nodes=4)
SPEC = JobSpec(name="a", throughput={8: 1e15, 16: 2e15, 24: 3e15, 32: 4e15}, checkpoint_interval_seconds=1000)


def world(*failures: Failure, horizon: float = 100_000.0, spec: JobSpec = SPEC, nodes: int = 4) -> World:
    cluster = ClusterSpec(nodes=nodes)
    job = build(spec, cluster, PARAMETERS, "test")
    return World(cluster=cluster, jobs=(job,), failures=failures, horizon=horizon, parameters=PARAMETERS)


def run(name: str, *failures: Failure, **options: object) -> Simulation:
    sim = Simulation(world(*failures, **options), policy(name, PARAMETERS))  # type: ignore[arg-type]
    sim.run()
    return sim


def test_events_run_in_order_and_ties_as_asked() -> None:
    engine, seen = Engine(), []
    for time, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (0.1 + 0.2, "z"), (9.0, "late")):
        engine.at(time, lambda name=name: seen.append((name, engine.now)))  # type: ignore[misc]
    engine.run(5.0)
    assert seen == [("z", 0.1 + 0.2), ("a", 1.0), ("b", 1.0), ("c", 2.0)]
    assert engine.now == 5.0


def test_streams_of_random_numbers_do_not_disturb_each_other() -> None:
    first = generator(7, "failures.permanent").uniform(size=3)
    generator(7, "something else").uniform(size=100)
    assert list(generator(7, "failures.permanent").uniform(size=3)) == list(first)
    assert list(generator(7, "failures.transient").uniform(size=3)) != list(first)


def test_a_roll_back_gives_up_exactly_what_came_after_the_checkpoint() -> None:
    job = RunningJob(build(SPEC, CLUSTER, PARAMETERS, "test"), full=4e15, stage=RUNNING, rate=4e15)
    job.active = [0, 1, 2, 3]
    job.settle(2600.0)  # checkpoints at 1000 and 2000
    assert job.saved_useful == pytest.approx(4e15 * 2000)
    job.roll_back()
    assert job.account.useful == pytest.approx(4e15 * 2000)
    assert job.account.lost["redo"] == pytest.approx(4e15 * 600)
    assert job.run_clock == 2000.0
    job.roll_back()
    assert job.account.lost["redo"] == pytest.approx(4e15 * 600)
    job.settle(2650.0)
    job.roll_back(snapshot_interval=30.0)
    assert job.run_clock == pytest.approx(2040.0)
    assert job.account.useful + job.account.lost["redo"] == pytest.approx(job.account.reference)


def test_fixed_failures_are_exactly_as_many_and_others_about() -> None:
    fixed = draw(FailureSpec(process="fixed", permanent=10, transient=33), CLUSTER, 1e6, PARAMETERS, 5)
    assert sum(f.severity == Severity.SEV1 for f in fixed) == 10
    assert len(fixed) == 43
    assert [f.time for f in fixed] == sorted(f.time for f in fixed)
    assert all(f.permanent == (f.severity == Severity.SEV1) for f in fixed)
    for process, shape in (("poisson", 1.0), ("weibull", 0.7)):
        spec = FailureSpec(process=process, shape=shape, transient=400)  # type: ignore[arg-type]
        assert 300 < len(draw(spec, CLUSTER, 1e6, PARAMETERS, 5)) < 500


def test_a_switch_takes_all_its_nodes() -> None:
    spec, cluster = FailureSpec(switch=20), ClusterSpec(nodes=10, nodes_per_switch=4)
    groups = {failure.nodes for failure in draw(spec, cluster, 1e6, PARAMETERS, 1)}
    assert groups == {(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)}


# ---------------------------------------------------------------- policies against arithmetic

FAULT = Failure(time=10_500.0, nodes=(1,), cause="cuda_error")
NODE_LOST = Failure(time=10_500.0, nodes=(1,), cause="ecc_error", away_seconds=20_000.0)


def test_megatron_pays_the_68_minutes() -> None:
    sim = run("megatron-restart", FAULT)
    losses, full = sim.jobs[0].account.lost, sim.jobs[0].full
    start = 540 + 840  # it starts at 1380, so 10,500 is 120 s after its ninth checkpoint
    assert losses["detect"] == pytest.approx(1800 * full)
    assert losses["reallocate"] + losses["start"] == pytest.approx(2 * start * full)
    assert losses["redo"] == pytest.approx(120 * full * 0.99)


def test_megatron_waits_for_the_repair() -> None:
    losses = run("megatron-restart", NODE_LOST).jobs[0].account.lost
    full = 4e15
    assert losses["waiting"] == pytest.approx((20_000 - 1800) * full)


def test_planaria_heals_in_place_without_going_back() -> None:
    sim = run("planaria", FAULT)
    losses, full = sim.jobs[0].account.lost, sim.jobs[0].full
    given, reform = PARAMETERS.planaria, PARAMETERS.communicators.seconds
    assert losses["detect"] == pytest.approx(0.3 * full)
    assert losses["reallocate"] == pytest.approx((reform(24) + reform(32) + given.join) * full)
    assert losses["degraded"] == pytest.approx(given.newcomer_start * 1e15, rel=0.01)  # one of four starts
    assert losses["redo"] < 10 * full
    assert losses["start"] == pytest.approx(given.process_start * full)  # only the very first start stands still


def test_planaria_goes_on_smaller_and_takes_the_node_back() -> None:
    sim = run("planaria", NODE_LOST)
    job = sim.jobs[0]
    assert sorted(job.active) == [0, 1, 2, 3]
    assert job.account.lost["waiting"] == 0
    assert job.account.lost["degraded"] == pytest.approx(20_000 * 1e15, rel=0.01)


def test_a_spare_node_takes_the_lost_ones_place() -> None:
    spec = SPEC.model_copy(update={"max_workers": 32})
    job = run("planaria", NODE_LOST, spec=spec, nodes=5).jobs[0]
    assert job.account.lost["degraded"] < 100 * 1e15
    assert job.account.useful / job.account.reference > 0.99


def test_a_failure_during_recovery_is_survived() -> None:
    second = Failure(time=10_505.0, nodes=(2,), cause="nvlink_error", away_seconds=30_000.0)
    for name in ("planaria", "unicron", "megatron-restart", "oobleck", "varuna", "bamboo", "recycle"):
        sim = run(name, NODE_LOST, second)
        assert len(sim.jobs[0].active) == 4, name
        assert sim.jobs[0].stage == RUNNING


def test_a_warned_preemption_costs_less_than_a_sudden_one() -> None:
    sudden = Failure(time=10_500.0, nodes=(1,), cause="preempted", away_seconds=5000.0)
    warned = replace(sudden, notice_seconds=120.0)
    lost = [run("planaria", failure).jobs[0].account.lost["detect"] for failure in (sudden, warned)]
    assert lost[0] > lost[1] == 0.0


def test_a_straggler_is_isolated_by_those_who_watch() -> None:
    slow = Failure(time=10_000.0, nodes=(1,), cause="straggler", slowdown=2.0, away_seconds=50_000.0)
    ours_, theirs = (run(name, slow).jobs[0].account.useful for name in ("planaria", "megatron-restart"))
    assert ours_ > 1.15 * theirs  # a quarter of 50,000 s is lost, not half of it


def test_no_node_belongs_to_two_jobs() -> None:
    sim = Simulation(world(), Planaria(PARAMETERS))
    other = RunningJob(sim.jobs[0].spec)
    sim.assign(sim.jobs[0], [0, 1])
    with pytest.raises(RuntimeError, match="node 1 is given to a twice"):
        sim.assign(other, [1, 2])


def test_oobleck_between_its_published_points() -> None:
    seconds = Oobleck(PARAMETERS)._seconds
    assert [seconds(gpus) for gpus in (8, 16, 32, 64)] == [10.5, 21.5, 39.1, 83.7]
    assert seconds(24) == pytest.approx((21.5 + 39.1) / 2)
    assert seconds(128) == pytest.approx(2 * 83.7)


# ---------------------------------------------------------------- evaluation


def test_the_service_works_reports_off_in_order() -> None:
    engine = Engine()
    service = EvaluationService(engine, load_seconds=10.0, finished=lambda: None)
    work = Work(slot_seconds=100.0, longest=1.0, tail=5.0, datasets=1)
    service.publish(Report("a", 1, work, 0.0, 100.0))
    service.publish(Report("a", 2, work, 0.0, 100.0))
    service.change_slots(4)
    engine.at(20.0, lambda: service.change_slots(-2))
    engine.run(1000.0)
    # 4 slots from 10 to 20 s do 40, then 2 slots do the other 160 in 80 s.
    assert service.latencies == pytest.approx([10 + 10 + 30 + 5, 100 + 5])
    service.settle()
    assert service.gpu_seconds == pytest.approx(4 * 20 + 2 * 980)
    assert service.pending == 0


def test_what_is_done_while_reports_are_awaited_is_doubtful() -> None:
    job = RunningJob(build(SPEC, CLUSTER, PARAMETERS, "test"), full=4e15, stage=RUNNING, rate=4e15)
    job.stop_probability = 0.1
    rate = 4e15 * job.kept_share
    job.settle(100.0)
    job.unread = 1
    job.settle(300.0)
    job.unread = 2
    job.settle(350.0)
    job.unread = 0
    job.settle(1000.0)
    assert job.account.useful == pytest.approx(rate * 1000)
    assert job.account.doubtful == pytest.approx(rate * (0.1 * 200 + 0.19 * 50))


def test_every_published_checkpoint_is_read_in_the_end() -> None:
    spec = ClusterScenario.model_validate(
        {
            "name": "t", "seed": 1, "horizon_seconds": 40_000, "cluster": {"nodes": 4},
            "jobs": [{"name": "a", "throughput": {8: 1e15, 16: 2e15, 24: 3e15}, "checkpoint_interval_seconds": 2000}],
            "evaluation": {"load_share": 0.05, "every_checkpoints": 2}, "policies": ["planaria"],
        }
    )  # fmt: skip
    sim = Simulation(build_world(spec, PARAMETERS, 1, "test"), policy("planaria", PARAMETERS))
    outcome = sim.run()
    assert len(outcome.latencies) > 5
    assert sim.jobs[0].unread == outcome.pending
    assert outcome.accumulated_waf > outcome.certain_waf
    # All reports are on one job: at most one at a time is awaited where each is out before the next checkpoint.
    assert max(outcome.latencies) < 4000
    done = outcome.accumulated_waf / 40_000
    wasted = PARAMETERS.evaluation.stop_probability * sum(outcome.latencies) * done
    assert outcome.accumulated_waf - outcome.certain_waf == pytest.approx(wasted, rel=0.3)


def test_slots_that_still_load_are_given_up_first() -> None:
    service = EvaluationService(Engine(), load_seconds=10.0, finished=lambda: None)
    service.change_slots(2, loaded=True)
    service.change_slots(3)
    service.change_slots(-4)
    assert (service.loaded, service.slots) == (1, 1)


def test_loads_share_the_nic_and_the_storage() -> None:
    trial = PARAMETERS.trial
    engine, done = Engine(), []
    loads = Loads(engine, trial)
    for node in (0, 0, 1):
        loads.start(node, trial.model_bytes, lambda node=node: done.append((node, engine.now)))
    engine.run(1e6)
    alone = trial.model_bytes / trial.nic_bytes_per_second
    assert done == [(1, pytest.approx(alone)), (0, pytest.approx(2 * alone)), (0, pytest.approx(2 * alone))]


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_packed_makespan_against_the_lower_bound(nodes: int) -> None:
    trial = PARAMETERS.trial
    given = datasets(trial)
    found, bound = ours(trial, given, nodes, 8).makespan, lower_bound(trial, nodes, 8)
    assert bound <= found <= 1.05 * bound
    assert found < baseline(trial, given, nodes, 8).makespan


def test_every_scenario_file_is_one_of_the_simulators(tmp_path: Path) -> None:
    from planner.simulation.parameters import default_path
    from planner.simulation.scenario import read_scenario

    for path in sorted(default_path().parent.glob("*.yaml")):
        if path != default_path():
            assert read_scenario(path).name == path.stem
