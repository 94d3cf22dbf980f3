"""Figures of healing in place, beside the same model under ``torchrun --max-restarts``.

The machine's two cores carry all ranks, so absolute times are those of an overloaded node; baseline and project are
measured one after the other in the same run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure
from tests.conformance.test_leave_collective import PHASES, serve_cases
from tests.support.fork_server import ForkServer, trainer_server
from tests.support.ranks import TINY, merged
from tests.support.reform_cluster import ReformCluster
from tests.support.schedules import LOSS_TOLERANCE, Schedule, compare, draw, run

JOB: dict[str, Any] = merged(
    TINY,
    {
        "name": "healing",
        "workers": {"min": 1, "max": 4},
        "model": {"hidden_size": 128, "ffn_hidden_size": 384, "seq_length": 64},
        "batch": {"global": 32, "micro": 2},
        "checkpoint": {"every_steps": 10_000, "snapshot_every_steps": 10},
        "steps": 60,
    },
)
SECONDS_BETWEEN_FAULTS = 60.0


def measure(quick: bool) -> list[Figure]:
    """All figures; ``quick`` leaves the ten-minute ones out and repeats less."""
    figures = leaving(quick)
    healed, step = healing(1 if quick else 3)
    restarted = restarting(1 if quick else 3)
    figures += compare_healing(healed, step, restarted)
    figures += schedules(6 if quick else 40)
    figures.append(overhead(quick))
    if not quick:
        figures += effective_time(600.0, step)
    return figures


# ---------------------------------------------------------------- leaving the collective


def leaving(quick: bool) -> list[Figure]:
    """Six ranks, one breaks in each phase: when the last of the five survivors is out."""
    found: dict[str, list[float]] = {"sigkill": [], "sigstop": []}
    cases = serve_cases()
    run_case = next(cases)
    for kind, seconds in found.items():
        for _ in range(1 if quick else 5):
            for phase in PHASES:
                result = run_case(kind, phase)
                assert not result["blocked"], result
                seconds.append(max(result["left"].values()))
    cases.close()
    names = {
        "sigkill": "rank killed → all 5 survivors out of the collective",
        "sigstop": "rank declared hung → all 5 survivors out of the collective",
    }
    return [_median(names[kind], values, "s", "under 0.3 s", 0.3) for kind, values in found.items()]


def _median(name: str, values: Sequence[float], unit: str, bar: str, limit: float, note: str = "") -> Figure:
    middle = statistics.median(values)
    return Figure(
        name=name, value=middle, unit=unit, bar=bar, reached=middle < limit if bar else None, runs=len(values),
        low=min(values), high=max(values), note=note,
    )  # fmt: skip


# ---------------------------------------------------------------- one rank of four


def supervised(config: dict[str, Any], slots: int, seconds: float) -> dict[str, Any]:
    """``planaria run`` of a config, in a state directory of its own; its JSON and its metrics."""
    folder = Path(tempfile.mkdtemp(prefix="healing-"))
    (folder / "job.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "planner.cli", "run", str(folder / "job.yaml"), "--slots", str(slots)]
    done = subprocess.run(
        [*command, "--state-dir", str(folder / "state"), "--json"], capture_output=True, text=True, timeout=seconds,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    lines = (Path(answer["folder"]) / "metrics.jsonl").read_text().splitlines()
    return answer | {"metrics": [json.loads(line) for line in lines]}


def healing(runs: int) -> tuple[list[float], float]:
    """Seconds from the kill to the next step's end, 4 → 3 ranks, through agent and supervisor; and the step's own."""
    recovered, steps = [], []
    for number in range(runs):
        fault = {"at_step": 30, "kind": "sigkill", "rank": number % 4, "phase": "forward", "micro_batch": 1}
        answer = supervised(JOB | {"faults": [fault]}, 4, 300)
        recovered.append(answer["faults"][0]["recovered_seconds"])
        steps += [line["seconds"] for line in answer["metrics"] if 10 <= line["step"] < 30]
    return recovered, statistics.median(steps)


def baseline(config: dict[str, Any], kill: dict[int, int], seconds: float) -> tuple[Path, float]:
    """The job under torchrun; its folder and the wall seconds."""
    folder = Path(tempfile.mkdtemp(prefix="torchrun-"))
    script = Path(__file__).with_name("torchrun_baseline.py")
    asked = json.dumps({"folder": str(folder), "config": config, "kill": kill})
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone", "--max-restarts=99"]
    root = str(script.parent.parent.parent)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    started = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, str(script), asked], stdout=log, stderr=log, env=environment)
        try:
            code = process.wait(seconds)
        finally:
            process.terminate()  # torchrun then ends its workers, which have sessions of their own
            process.wait(60)
    assert code == 0, (folder / "log").read_text()[-3000:]
    return folder, time.monotonic() - started


def restarting(runs: int) -> list[float]:
    """Seconds from the kill until the step that was killed is complete, under torchrun."""
    found = []
    for number in range(runs):
        folder, _ = baseline(JOB | {"steps": 40}, {30: number % 4}, 600)
        killed = float((folder / "killed-30").read_text())
        lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        found.append(next(line["time"] for line in lines if line["step"] == 30) - killed)
    return found


def compare_healing(healed: Sequence[float], step: float, restarted: Sequence[float]) -> list[Figure]:
    """The project's figure, the baseline's, and their ratio."""
    over = [max(0.0, seconds - step) for seconds in healed]
    ratio = statistics.median(restarted) / statistics.median(healed)
    return [
        _median("rank killed → next step finished, over the step's own time (4 → 3 ranks)", over, "s", "under 1 s", 1.0,
                f"step {step:.2f} s; from the kill through agent and supervisor"),
        _median("the same under torchrun --max-restarts, checkpoint each 10 steps", restarted, "s", "", float("inf")),
        Figure(name="torchrun's time over ours", value=ratio, unit="×", bar="at least 15 ×", reached=ratio >= 15),
    ]  # fmt: skip


# ---------------------------------------------------------------- correctness over many schedules


def schedules(count: int) -> list[Figure]:
    """Random fault schedules against undisturbed runs: losses, samples, and what was run again."""
    server = trainer_server()
    calm: dict[tuple[int, int, int], ReformCluster] = {}
    worst, needless, joined = 0.0, 0, 0
    kinds, phases = Counter[str](), Counter[str]()
    for seed in range(count):
        case = draw(seed)
        key = (case.world, case.tensor, case.pipeline)
        if key not in calm:
            calm[key] = run(case.config(calm=True), case, Path(tempfile.mkdtemp()), server)
        healed = run(case.config(), case, Path(tempfile.mkdtemp()), server)
        worst = max(worst, compare(healed, calm[key]))
        kinds.update(case.faults[message["index"]]["kind"] for message in healed.of("fault"))
        phases.update(message["phase"] for message in healed.of("fault"))
        joined += sum(message["joined"] for message in healed.of("reformed"))
        needless += needlessly_redone(server) if seed == 0 else 0
    server.close()
    return [
        Figure(
            name=f"largest difference in loss over {count} random fault schedules", value=worst, unit="", runs=count,
            bar="at most 1e-5, samples identical", reached=worst <= LOSS_TOLERANCE,
            note=f"samples of every step identical; faults that fired: {_counts(kinds)}; in {_counts(phases)}; layouts "
            f"(ranks, TP, PP): {', '.join(map(str, sorted(calm)))}; {joined} ranks joined on the way",
        ),
        Figure(
            name="micro-batches run again beyond those of the lost replica", value=needless, unit="",
            bar="0", reached=needless == 0, note="rank killed in forward, backward and reduction, each of 4 ranks",
        ),
    ]  # fmt: skip


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()))


def needlessly_redone(server: ForkServer) -> int:
    """Over several kills of one of four ranks: micro-batches redone that were not the dead rank's."""
    from planner.microbatches import assign

    needless = 0
    for rank, phase in enumerate(("forward", "backward", "reduce", "reduce")):
        fault = {"at_step": 3, "kind": "sigkill", "rank": rank, "phase": phase}
        case = Schedule(4, 1, 1, False, (fault,))
        cluster = run(case.config(), case, Path(tempfile.mkdtemp()), server)
        own = set(assign(case.config().batch.micro_batches, 4)[rank])
        redone = [batch for message in cluster.of("reformed") for batch in message["redone"]]
        needless += len([batch for batch in redone if batch not in own]) + len(redone) - len(set(redone))
    return needless


# ---------------------------------------------------------------- overhead when healthy


def overhead(quick: bool) -> Figure:
    """What detection and bookkeeping add to a healthy step: copies of the buckets, messages, checks, on one rank."""
    import torch

    from planner.clock import SystemClock
    from planner.messages import RankPhase, RankStep
    from pretrain.collective import Membership

    parameters = 1_300_000  # of a step that takes 0.2 s here
    gradient, spare = torch.ones(parameters), torch.empty(parameters)
    membership, clock = Membership(1), SystemClock()
    repeats = 200 if quick else 2000
    spent = []
    for step in range(repeats):
        started = time.perf_counter()
        spare.copy_(gradient)
        with membership.private():
            for _ in range(8):
                membership.check()
        RankPhase(phase="step", step=step, time=clock.time()).model_dump_json()
        RankStep(
            step=step, loss=1.0, grad_norm=1.0, tokens=1, seconds=0.2, lr=0.1, workers=4, ids=list(range(32)),
            batch=list(range(32)), incarnation=1, time=clock.time(), phases={"data": 0.1},
        ).model_dump_json()  # fmt: skip
        spent.append(time.perf_counter() - started)
    each = statistics.median(spent)  # what else runs on the machine is no overhead of ours
    share = 100.0 * each / 0.2
    return Figure(
        name="healthy overhead of detection and bookkeeping at steps of 0.2 s", value=share, unit="%",
        bar="under 1%", reached=share < 1.0, runs=repeats, note=f"{1e3 * each:.2f} ms a step on each rank",
    )  # fmt: skip


# ---------------------------------------------------------------- effective time


def effective_time(seconds: float, step: float) -> list[Figure]:
    """ETTR over ``seconds`` with a rank killed each minute, ranks replaced; beside it torchrun with the same kills over
    the first half of the same steps, since it needs twice as long for each."""
    return [ours_with_kills(seconds, step), torchrun_with_kills(0.5 * seconds, step)]


def kill_each_minute(seconds: float, step: float) -> tuple[int, dict[int, int]]:
    """(steps, step → rank to kill) of a run of about ``seconds`` without faults, at ``step`` seconds a step."""
    between = max(5, round(SECONDS_BETWEEN_FAULTS / step))
    steps = max(2 * between, round(seconds / step))
    return steps, {at: number % 4 for number, at in enumerate(range(between, steps, between))}


def ours_with_kills(seconds: float, step: float) -> Figure:
    """A supervised job of four ranks through these kills."""
    steps, kills = kill_each_minute(seconds, step)
    faults = [{"at_step": at, "kind": "sigkill", "rank": rank, "phase": "forward"} for at, rank in kills.items()]
    answer = supervised(JOB | {"steps": steps, "faults": faults}, 4, 4 * seconds)
    wall = sum(answer["ettr_losses"].values()) / max(1e-9, 1.0 - answer["ettr"])
    losses = ", ".join(f"{name} {100 * lost / wall:.1f}%" for name, lost in answer["ettr_losses"].items() if lost)
    healed = sum(fault["recovered_seconds"] is not None for fault in answer["faults"])
    return Figure(
        name="ETTR with a fault every 60 s, ranks replaced", value=answer["ettr"], unit="", bar="at least 0.90",
        reached=answer["ettr"] >= 0.90,
        note=f"{steps} steps in {wall:.0f} s, {len(kills)} kills, {healed} healed; of the wall: {losses}",
    )  # fmt: skip


def torchrun_with_kills(seconds: float, step: float) -> Figure:
    """The same job under torchrun, from its own steps."""
    steps, kills = kill_each_minute(seconds, step)
    folder, wall = baseline(JOB | {"steps": steps}, kills, 6 * seconds)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return Figure(
        name="the same under torchrun --max-restarts", unit="",
        value=steps * statistics.median(line["seconds"] for line in lines) / wall,
        note=f"{steps} steps in {wall:.0f} s, {len(kills)} kills",
    )  # fmt: skip
