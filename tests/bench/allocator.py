"""The allocator's figures (issue "The cost-aware allocator"): plans, the next-event table, look-ups, optimality."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from planner.event_table import build, foreseen
from planner.lending import Backlog, PendingReport, lend
from planner.placement import Request, place
from planner.solver import solve
from planner.topology import Topology
from planner.types import Cluster, Job, Node
from tests.bench.figures import Figure
from tests.support.allocator_cases import brute_force, large_case, random_case

JOBS, GPUS, COUNTS = 64, 16_384, 24


def measure(quick: bool = False) -> list[Figure]:
    """All figures; ``quick`` takes fewer runs."""
    runs = 5 if quick else 20
    return [
        *_plans(runs),
        *_tables(1 if quick else 3),
        _look_up(),
        _arrival(runs),
        *_lending(runs),
        _thousand_jobs(2 if quick else 5),
        _optimality(400 if quick else 2000),
        _placement(),
        _command(2 if quick else 5),
    ]


Times = list[tuple[float, float]]
"""Wall and CPU seconds of each run: on a busy machine they part."""


def _timed(action: Callable[[], object], runs: int) -> Times:
    found = []
    for _ in range(runs):
        started, used = time.perf_counter(), _cpu_seconds()
        action()
        found.append((time.perf_counter() - started, _cpu_seconds() - used))
    return found


def _cpu_seconds() -> float:
    """Of this process and of the ones that it started and that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _figure(name: str, times: Times, unit: str, scale: float, bar: float, note: str = "") -> Figure:
    values = [wall * scale for wall, _ in times]
    median = statistics.median(values)
    used = statistics.median(cpu * scale for _, cpu in times)
    note = f"{note}, CPU {used:.3g} {unit}".removeprefix(", ")
    return Figure(
        name=name, value=median, unit=unit, bar=f"< {bar:g} {unit}", reached=median < bar, runs=len(values),
        low=min(values), high=max(values), note=note,
    )  # fmt: skip


def _plans(runs: int) -> list[Figure]:
    figures = []
    for unit, words, bar in ((8, "nodes of 8", 50.0), (1, "single GPUs", 150.0)):
        cases = [large_case(JOBS, GPUS, COUNTS, unit, seed) for seed in range(runs)]
        times = [_timed(lambda case=case: solve(*case), 1)[0] for case in cases]  # type: ignore[misc]
        figures.append(_figure(f"plan, {JOBS} jobs on {GPUS} GPUs in {words}, ties broken", times, "ms", 1e3, bar))
    tied = large_case(JOBS, GPUS, COUNTS, 1, seed=0, linear=True)
    times = _timed(lambda: solve(*tied), min(runs, 5))
    figures.append(_figure("the same in single GPUs, every full plan tied", times, "ms", 1e3, 150.0, "linear scaling"))
    return figures


def _tables(runs: int) -> list[Figure]:
    figures = []
    for unit, words in ((8, "nodes of 8"), (1, "single GPUs")):
        cluster, jobs = large_case(JOBS, GPUS, COUNTS, unit, seed=1)
        candidate = replace(jobs[0], name="newcomer", workers=0)
        events = len(list(foreseen(cluster, jobs, (), candidate)))
        times = _timed(lambda c=cluster, j=jobs, n=candidate: build(c, j, (), n), runs)  # type: ignore[misc]
        figures.append(_figure(f"next-event table, {words}", times, "s", 1.0, 2.0, f"{events} events"))
        figures.append(_damaged_table(cluster, jobs, candidate, unit, words, runs))
    return figures


def _damaged_table(cluster: Cluster, jobs: Sequence[Job], candidate: Job, group: int, words: str, runs: int) -> Figure:
    """18 of the nodes have lost a slot or two; each job's groups must lie on one node."""
    nodes = GPUS // 8
    capacities = (8,) * (nodes - 18) + (7,) * 12 + (6,) * 6
    damaged = cluster.resized(sum(capacities))
    grouped = tuple(replace(job, group=group) for job in jobs)
    newcomer = replace(candidate, group=group)
    sizes: list[int] = []
    times = _timed(lambda: sizes.append(len(build(damaged, grouped, (), newcomer, capacities))), runs)
    name = f"next-event table, {words}, 18 of {nodes} nodes damaged"
    return _figure(name, times, "s", 1.0, 2.0, f"{sizes[0]} events")


def _look_up() -> Figure:
    cluster, jobs = large_case(JOBS, GPUS, COUNTS, 8, seed=1)
    table = build(cluster, jobs)
    # A state that was read anew is equal to the table's, but no object of it is the same.
    fresh = pickle.loads(pickle.dumps(jobs))
    times: Times = []
    answers: list[object] = []
    for event in foreseen(cluster, jobs):
        times += _timed(lambda event=event: answers.append(table.answer(cluster, fresh, event)), 1)  # type: ignore[misc]
    assert None not in answers
    return _figure("answer for a foreseen event, checks included", times, "ms", 1e3, 1.0)


def _arrival(runs: int) -> Figure:
    """A job like the expected one comes, under a name of its own: its prices and words are made at the look-up."""
    cluster, jobs = large_case(JOBS, GPUS, COUNTS, 8, seed=1)
    expected = replace(jobs[0], name="newcomer", workers=0)
    table = build(cluster, jobs, candidate=expected)
    then = pickle.loads(pickle.dumps((*jobs[:20], replace(expected, name="job:other"), *jobs[20:])))
    answers: list[object] = []
    times = _timed(lambda: answers.append(table.answer_for_state(cluster, then)), 10 * runs)
    assert None not in answers
    return _figure("answer when a job like the expected one comes", times, "ms", 1e3, 1.0)


def _lending(runs: int) -> list[Figure]:
    """What training lends to 20 reports of 20,000 slot-seconds: every lender at its planned count, no slot idle."""
    figures = []
    for unit, words in ((8, "nodes of 8"), (1, "single GPUs")):
        cluster, jobs = large_case(JOBS, GPUS, COUNTS, unit, seed=1)
        planned = dict(solve(cluster, jobs).assignments)
        settled = tuple(replace(job, workers=planned[job.name]) for job in jobs)
        reports = tuple(
            PendingReport(name=job.name, slot_seconds=20_000.0, rate=job.rate(job.workers), probability=0.05)
            for job in settled[:20]
        )
        for fleet in (512, GPUS):
            backlog = Backlog(reports=reports, load_seconds=60.0, most_slots=fleet)
            times = _timed(lambda j=settled, p=planned, b=backlog: lend(j, p, b, GPUS, 0), runs)  # type: ignore[misc]
            name = f"lending plan, {words}, a fleet of at most {fleet} slots"
            figures.append(_figure(name, times, "ms", 1e3, 250.0))
    return figures


def _thousand_jobs(runs: int) -> Figure:
    cases = [large_case(1000, 100_000, COUNTS, 8, seed) for seed in range(runs)]
    times = [_timed(lambda case=case: solve(*case), 1)[0] for case in cases]  # type: ignore[misc]
    return _figure("plan, 1,000 jobs on 100,000 GPUs in nodes of 8", times, "s", 1.0, 2.0)


def _optimality(cases: int) -> Figure:
    worst, wrong = 0.0, 0
    for number in range(cases):
        cluster, jobs = random_case(random.Random(f"bench/{number}"))
        plan = solve(cluster, jobs)
        best, expected = brute_force(cluster, jobs)
        worst = max(worst, abs(plan.objective - best) / (abs(best) or 1.0))
        wrong += dict(plan.assignments) != expected
    return Figure(
        name="distance from brute force, relative",
        value=worst,
        unit="",
        bar="≤ 1e-9, same plan",
        reached=worst <= 1e-9 and not wrong,
        runs=cases,
        note=f"{cases} cases, {wrong} other plans than the order of ties wants",
    )


def _placement() -> Figure:
    topology = Topology(tuple(Node(name=f"n{i:04d}", slots=8, switch=f"s{i // 32:02d}") for i in range(GPUS // 8)))
    pool = [slot for node in topology.nodes for slot in node.slot_list()]
    held = [frozenset(pool[index * 240 : (index + 1) * 240]) for index in range(JOBS)]
    requests = [Request(job=f"j{i:02d}", count=240, group=8, held=held[i]) for i in range(JOBS)]
    requests[0] = replace(requests[0], count=160)
    requests[1] = replace(requests[1], count=320)
    return _figure(
        "placement after one event, 2,048 nodes", _timed(lambda: place(topology, requests), 3), "s", 1.0, 2.0
    )


def _command(runs: int) -> Figure:
    cluster, jobs = large_case(12, 512, 12, 8, seed=3)
    lines = [f"cluster: {{gpus: {cluster.gpus}}}", "jobs:"]
    for job in jobs:
        rates = dict(zip(job.profile.counts, job.profile.flops, strict=True))
        lines.append(
            f"  - {{name: {job.name}, workers: {job.workers}, throughput: {json.dumps(rates).replace(chr(34), '')}}}"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text("\n".join(lines))
        command = [sys.executable, "-m", "planner.cli", "plan", str(path), "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        times = _timed(lambda: subprocess.run(command, check=True, capture_output=True, env=environment), runs)
    return _figure("planaria plan as a command, 12 jobs", times, "s", 1.0, 1.0)


def main() -> None:
    """Print the figures as a table and as JSON."""
    from tests.bench.figures import table, to_json

    figures = measure("--quick" in sys.argv)
    print(table(figures))
    print(json.dumps(to_json(figures)))


if __name__ == "__main__":
    main()
