"""Every answer of the next-event table is the one that solving from scratch gives, ties, prices and words included."""

from __future__ import annotations

import pickle
import random
import time
from dataclasses import replace

import pytest

from planner.ceilings import ceilings, changed
from planner.event_table import build, foreseen
from planner.solver import decide
from planner.types import Cluster, ClusterEvent, Job, ThroughputProfile, Trigger
from tests.support.allocator_cases import damaged_case, large_case, random_case


def case(seed: str) -> tuple[Cluster, tuple[Job, ...], list[frozenset[str]], Job]:
    rng = random.Random(seed)
    cluster, jobs = random_case(rng)
    _, others = random_case(rng)
    candidate = replace(others[0], name=rng.choice("abcdefghz") + "-new")
    names = [job.name for job in jobs]
    holders = [frozenset(rng.sample(names, 2))] if len(names) > 1 else []
    return cluster, jobs, holders, candidate


@pytest.mark.parametrize("block", range(4))
def test_answers_equal_solving_from_scratch(block: int) -> None:
    answers = 0
    for number in range(50):
        cluster, jobs, holders, candidate = case(f"table/{block}/{number}")
        table = build(cluster, jobs, holders, candidate)
        for event in foreseen(cluster, jobs, holders, candidate):
            after, then = event.apply(cluster, jobs)
            expected = decide(after, then, event.trigger)
            assert table.answer(cluster, jobs, event) == expected, (block, number, event)
            by_state = table.answer_for_state(after, then)
            assert by_state is not None
            assert by_state.plan == expected.plan
            answers += 1
    assert answers > 200


@pytest.mark.parametrize("block", range(4))
def test_answers_on_damaged_nodes_equal_solving_from_scratch(block: int) -> None:
    """For every kind of node that an event may strike: what whole groups can use of the rest bounds the plan."""
    bounded = 0
    for number in range(60):
        rng = random.Random(f"damaged-table/{block}/{number}")
        cluster, jobs, capacities = damaged_case(rng)
        candidate = replace(rng.choice(jobs), name=rng.choice("akz") + "-new", workers=0)
        holders = [frozenset(job.name for job in jobs[:2])] if len(jobs) > 1 else []
        table = build(cluster, jobs, holders, candidate, capacities)
        for event in foreseen(cluster, jobs, holders, candidate, sorted(set(capacities))):
            after, then = event.apply(cluster, jobs)
            for nodes in changed(capacities, event.slots):
                most = ceilings(nodes, [job.group for job in then])
                expected = decide(after, then, event.trigger, most=most)
                assert table.answer(cluster, jobs, event, most) == expected, (block, number, event, nodes)
                by_state = table.answer_for_state(after, then, most)
                assert by_state is not None
                assert by_state.plan == expected.plan
                bounded += bool(most)
    assert bounded > 200


def test_a_loss_is_foreseen_for_every_kind_of_node() -> None:
    assert changed((8, 8, 7), 0) == [(8, 8, 7)]
    assert changed((8, 8, 7), -1) == [(8, 8, 6), (8, 7, 7)]
    assert changed((8, 8, 7), -8) == [(8, 7)]
    assert changed((8, 8, 7), -3) == []
    assert changed((1, 2), -1) == [(2,), (1, 1)]
    assert changed((8,), 8) == [(8, 8)]
    assert changed((), -1) == [()]


def test_answers_at_scale_equal_solving_from_scratch() -> None:
    cluster, jobs = large_case(24, 2048, 10, 8, seed=9)
    candidate = replace(jobs[0], name="newcomer", workers=0)
    table = build(cluster, jobs, candidate=candidate)
    events = list(foreseen(cluster, jobs, candidate=candidate))
    assert len(table) == len(events)
    for event in events[::7] + events[-1:]:
        after, then = event.apply(cluster, jobs)
        assert table.answer(cluster, jobs, event) == decide(after, then, event.trigger)


@pytest.mark.parametrize("block", range(4))
def test_a_job_like_the_expected_one_is_foreseen_under_any_name(block: int) -> None:
    """Whatever its name and its place in the list, the plan, prices and words are those of solving from scratch."""
    asked = answers = bounded = 0
    for number in range(60):
        rng = random.Random(f"arrival/{block}/{number}")
        cluster, jobs, capacities = damaged_case(rng)
        _, others, _ = damaged_case(rng)
        candidate = replace(rng.choice((*jobs, *others)), name="newcomer", workers=0, faulted=False)
        table = build(cluster, jobs, (), candidate, capacities)
        for name in ("!", f"{rng.choice(jobs).name}~", "zz"):
            place = rng.randrange(len(jobs) + 1)
            then = (*jobs[:place], replace(candidate, name=name), *jobs[place:])
            most = ceilings(capacities, [job.group for job in then])
            found = table.answer_for_state(cluster, then, most)
            asked += 1
            if found is not None:
                answers += 1
                bounded += bool(most)
                assert found == decide(cluster, then, most=most), (block, number, name)
            assert table.answer_for_state(cluster, (replace(then[place], weight=77.0),), most) is None
            changed_jobs = (*then[:place], replace(then[place], weight=77.0), *then[place + 1 :])
            assert table.answer_for_state(cluster, changed_jobs, most) is None
    assert answers > asked / 2
    assert bounded > 20


def test_every_kind_of_event_is_foreseen() -> None:
    cluster, jobs = large_case(6, 512, 6, 8, seed=2)
    running = {job.name for job in jobs if job.workers}
    candidate = replace(jobs[0], name="newcomer", workers=0)
    events = list(foreseen(cluster, jobs, [frozenset(sorted(running)[:2])], candidate))
    struck = {(event.slots, event.faulted) for event in events}
    for name in running:
        assert {(0, frozenset({name})), (-1, frozenset({name})), (-8, frozenset({name}))} <= struck
    assert (8, frozenset()) in struck
    assert (-8, frozenset()) in struck
    assert (-8, frozenset(sorted(running)[:2])) in struck
    assert {event.ended for event in events} - {None} == {job.name for job in jobs}
    assert any(event.submitted == candidate for event in events)


def test_a_changed_state_or_an_unforeseen_event_gets_no_answer() -> None:
    cluster, jobs, _, candidate = case("stale/1")
    table = build(cluster, jobs, candidate=candidate)
    timer = ClusterEvent(trigger=Trigger.TIMER)
    assert table.answer(cluster, jobs, timer) is not None
    moved = (replace(jobs[0], workers=jobs[0].workers + 1), *jobs[1:])
    assert table.answer(cluster, moved, timer) is None
    assert table.answer(replace(cluster, price_per_gpu_hour=9.0), jobs, timer) is None
    assert table.answer(cluster, jobs, ClusterEvent(trigger=Trigger.NODE_LOST, slots=-3)) is None
    other = ClusterEvent(trigger=Trigger.JOB_SUBMITTED, submitted=replace(candidate, weight=7.0))
    assert table.answer(cluster, jobs, other) is None


def test_an_equal_state_read_anew_is_recognised_quickly() -> None:
    cluster, jobs = large_case(64, 4096, 24, 8, seed=4)
    table = build(cluster, jobs)
    again = tuple(replace(job, profile=pickle.loads(pickle.dumps(job.profile))) for job in jobs)
    event = ClusterEvent(
        trigger=Trigger.WORKER_LOST, slots=-1, faulted=frozenset({next(j.name for j in jobs if j.workers)})
    )
    times = []
    for _ in range(50):
        started = time.perf_counter()
        assert table.answer(cluster, again, event) is not None
        times.append(time.perf_counter() - started)
    assert min(times) < 1e-3


def test_losing_the_last_slots_is_not_foreseen_and_refused() -> None:
    cluster = Cluster(gpus=1, gpus_per_node=1)
    job = Job(name="a", profile=ThroughputProfile.of({1: 1.0}), workers=1)
    assert all(cluster.gpus + event.slots > 0 for event in foreseen(cluster, (job,)))
    with pytest.raises(ValueError, match="no slot is left"):
        ClusterEvent(trigger=Trigger.NODE_LOST, slots=-1).apply(cluster, (job,))
    with pytest.raises(ValueError, match="not there"):
        ClusterEvent(trigger=Trigger.JOB_ENDED, ended="b").apply(cluster, (job,))
    with pytest.raises(ValueError, match="already there"):
        ClusterEvent(trigger=Trigger.JOB_SUBMITTED, submitted=job).apply(cluster, (job,))
