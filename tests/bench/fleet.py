"""The evaluation fleet on real processes: slots given back, workers killed, engines kept, a thousand random kills."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from evalsched.evaluate import run_to_end
from evalsched.judge import JudgeTask, judging
from evalsched.ledger import Ledger, sqlite_url
from evalsched.local import WORKER, LocalFleet
from evalsched.priors import DEFAULT_SPREAD, Observation, calibration
from evalsched.runs import RunSpec
from evalsched.types import EvalSettings
from planner.auth import new_secret
from planner.events import Action
from planner.redis_server import start_redis
from planner.store import ClusterStore
from tests.bench.figures import Figure
from tests.support.fleet_chaos import chaos
from tests.support.fork_server import engine_server
from tests.support.llm_server import MODEL, llm_server
from tests.support.lm_tasks import write_tasks
from tests.support.redis import await_that, end_server
from tests.support.scheduler_cluster import Coordinator, cluster, training
from tests.support.smollm import smollm

TASKS = ("choice_plain", "last_word", "rolling")
PATIENCE = 300.0


def measure(quick: bool) -> list[Figure]:
    """All figures; ``quick`` takes fewer repetitions."""
    figures: list[Figure] = []
    for part in (_revocations, _kills, _engines, _judge, _chaos):
        folder = Path(tempfile.mkdtemp(prefix="planaria-bench-"))
        try:
            figures += part(folder, quick)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return figures


def _spread(name: str, values: list[float], unit: str, bar: str, reached: bool, note: str = "") -> Figure:
    return Figure(name=name, value=median(values), unit=unit, bar=bar, reached=reached, runs=len(values),
                  low=min(values), high=max(values), note=note)  # fmt: skip


@contextmanager
def _store(folder: Path) -> Iterator[ClusterStore]:
    server = start_redis(folder / "redis")
    store = ClusterStore(server.url, new_secret())
    try:
        yield store
    finally:
        store.close()
        end_server(server)


def _ask(store: ClusterStore, folder: Path, model: Path, documents: int, target: float) -> None:
    tasks = write_tasks(folder / "tasks", documents=documents)
    settings = EvalSettings(tasks=TASKS, include_path=(str(tasks),), bootstrap_iters=0)
    spec = RunSpec(model=str(model), settings=settings, output=str(folder / "out"), created=0.0, target_seconds=target)
    store.send_request("evaluate", spec=spec.to_json())


def _in_hand(coordinator: Coordinator) -> list[Any]:
    """Shards that a worker has begun and not finished."""
    conductor = coordinator.scheduler.conductor
    return [one for one in list(conductor.out.values()) if one.begun and conductor.table.claimed(one.dispatch)]


# ---------------------------------------------------------------- a slot that training takes back


def _revocations(folder: Path, quick: bool) -> list[Figure]:
    """A real worker with a real 135 M model, in the middle of a shard; training asks for its slot."""
    seconds, kept = [], []
    with _store(folder) as store, cluster(store, folder, slots=1, program=WORKER) as (coordinator, agent):
        _ask(store, folder, smollm(), documents=600, target=20.0)
        for _ in range(2 if quick else 7):
            await_that(lambda: _under_way(coordinator), PATIENCE)
            out = _under_way(coordinator)[0]
            run = coordinator.scheduler.conductor.runs[out.run]
            asked = time.monotonic()
            store.set_demand("job:j", training(1))
            await_that(lambda: store.leases("job:j"), 30)
            seconds.append(time.monotonic() - asked)
            await_that(lambda: not agent.infer(), 10)
            time.sleep(0.3)  # the scheduler reads what the worker left
            kept.append(sum(one.id not in run.open for one in out.shard.requests) / len(out.shard.requests))
            store.drop_demand("job:j")
            for lease in store.leases("job:j"):
                store.release(lease)
        failed = len(coordinator.events(Action.SHARD_FAILED))
    return [
        _spread("revocation to slot granted to training, in the middle of a shard (SmolLM2-135M)", seconds, "s",
                "median under 2 s", median(seconds) < 2),
        _spread("share of that shard's requests that were answered and are not run again", kept, "", "", True),
        Figure(name="failed attempts counted by it", value=failed, unit="", bar="0", reached=failed == 0),
    ]  # fmt: skip


def _under_way(coordinator: Coordinator) -> list[Any]:
    """Shards that a worker is in the middle of: begun a second ago, to take as long again at least."""
    now = time.time()
    return [one for one in _in_hand(coordinator) if 1.0 < now - one.begun < one.shard.seconds - 1.0]


# ---------------------------------------------------------------- a worker that is killed


def _kills(folder: Path, quick: bool) -> list[Figure]:
    """kill -9 of a worker (stub engine): until another worker has begun what is left of its shard."""
    seconds: list[float] = []
    with _store(folder) as store, cluster(store, folder, slots=2, STUB_SECONDS="0.05") as (coordinator, agent):
        _ask(store, folder, _tiny(folder), documents=400, target=0.05)
        for _ in range(3 if quick else 15):
            await_that(lambda: len(agent.infer()) == 2 and _fresh(coordinator), PATIENCE)
            out = _fresh(coordinator)[0]
            run = coordinator.scheduler.conductor.runs[out.run]
            pid = agent.infer().get(out.worker)
            if pid is None:
                continue
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            mine = {one.id for one in out.shard.requests}

            def elsewhere(mine: set[Any] = mine, worker: str = out.worker, run: Any = run) -> bool:
                if not mine & run.open:
                    return True
                return any(
                    one.worker != worker and mine & {request.id for request in one.shard.requests}
                    for one in _in_hand(coordinator)
                )

            await_that(elsewhere, 60)
            seconds.append(time.monotonic() - killed)
    bar = "under 3 s"
    return [_spread("kill -9 of a worker to its shard running elsewhere", seconds, "s", bar, max(seconds) < 3)]


def _fresh(coordinator: Coordinator) -> list[Any]:
    """Those that were not killed before: three kills of one shard would fail its task, as they should."""
    return [one for one in _in_hand(coordinator) if one.attempts == 0]


def _tiny(folder: Path) -> Path:
    model = folder / "model"
    program = "import sys,pathlib; from tests.support.tiny_model import write_model as w; w(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, str(model)], check=True, stdout=subprocess.DEVNULL)
    return model


# ---------------------------------------------------------------- engines that stay


_NEXT = """
import sys, shutil, torch
from safetensors.torch import load_file, save_file
source, target, factor = sys.argv[1:]
shutil.copytree(source, target)
weights = load_file(f"{target}/model.safetensors")
save_file({k: v * float(factor) if v.ndim > 1 else v for k, v in weights.items()}, f"{target}/model.safetensors",
          metadata={"format": "pt"})
"""


def _engines(folder: Path, quick: bool) -> list[Figure]:
    """One real worker, several checkpoints of one architecture: how often an engine is started, what a swap takes."""
    count = 3 if quick else 6
    models = [smollm()]
    for number in range(1, count):
        target = folder / f"checkpoint-{number}"
        subprocess.run(
            [sys.executable, "-c", _NEXT, str(models[0]), str(target), str(1 + number / 100)], check=True
        )  # fmt: skip
        models.append(target)
    tasks = write_tasks(folder / "tasks", documents=16)
    settings = EvalSettings(tasks=TASKS, include_path=(str(tasks),), bootstrap_iters=0)
    with LocalFleet(1, 1) as fleet, Ledger(sqlite_url(folder / "l.sqlite"), 1) as ledger:
        for number, model in enumerate(models):
            spec = RunSpec(model=str(model), settings=settings, output=str(folder / f"out-{number}"), created=0.0)
            run_to_end([spec], ledger, fleet)
        changes = [
            one.payload.details
            for one in fleet.store.read_events("0-0", count=5000)
            if one.payload and one.payload.action is Action.WORKER_SWAPPED
        ]
        shards = ledger.observations("shard", 5000)
    starts = [one["seconds"] for one in changes if one["how"] == "start"]
    swaps = [one["seconds"] for one in changes if one["how"] == "swap"]
    ratio = starts[0] / median(swaps)
    return [
        Figure(name=f"engine starts of one worker over {count} checkpoints of one architecture", value=len(starts),
               unit="", bar="1", reached=len(starts) == 1),
        _spread("swap of a 135 M checkpoint in place", swaps, "s", "", True),
        Figure(name="an engine's start against a swap (135 M)", value=ratio, unit="×", bar="at least 10 ×",
               reached=ratio >= 10, note=f"start {starts[0]:.1f} s, without the process and its imports"),
        *_predictions(shards),
    ]  # fmt: skip


def _predictions(shards: list[Observation]) -> list[Figure]:
    """How well shards' seconds were predicted: before anything was learned, and after."""
    first = [one for one in shards if one.spread == DEFAULT_SPREAD]
    found = {
        "with the shipped defaults": first,
        "learned from earlier checkpoints": [one for one in shards if one.spread != DEFAULT_SPREAD],
    }
    return [
        Figure(name=f"predicted shard seconds, {name}: off by", value=held["error"], unit="×", runs=held["count"],
               note=f"{held['covered']:.0%} in the interval that was to hold 80%")
        for name, own in found.items()
        if (held := calibration(own))["count"]
    ]  # fmt: skip


# ---------------------------------------------------------------- a judge that is a real server


def _judge(folder: Path, quick: bool) -> list[Figure]:
    """vLLM's own OpenAI-compatible server with a 135 M model judges answers; the second time nobody is asked."""
    task = JudgeTask("kindness", "Rate how kind this is, from [[1]] to [[10]]: {question} {answer}", low=1, high=10)
    docs = [{"question": f"Question {number}?"} for number in range(4 if quick else 12)]
    found = []
    with contextlib.closing(engine_server()) as engines, llm_server(folder, engines, 1024) as url:
        os.environ["PLANARIA_JUDGE_URL"], os.environ["PLANARIA_JUDGE_MODEL"] = url, MODEL
        for _ in range(2):
            with judging(folder, None) as session:
                task.filter([["Have a nice day."]] * len(docs), docs)
            found.append(session.judge)
    first, again = found
    return [
        Figure(name=f"verdicts of a real vLLM server (SmolLM2-135M), of {len(docs)}", value=first.asked, unit="",
               bar=str(len(docs)), reached=first.asked == len(docs), note=f"{first.spent:,} tokens"),
        Figure(name="asked again when the same answers are scored again", value=again.asked, unit="", bar="0",
               reached=again.asked == 0),
    ]  # fmt: skip


# ---------------------------------------------------------------- a thousand random kills


def _chaos(folder: Path, quick: bool) -> list[Figure]:
    kills = 100 if quick else 1000
    found = chaos(folder, kills=kills, runs=12 if quick else 110, requests=2000, workers=4, pause=0.2, seed=1)
    done = sum(found.kills.values())
    what = ", ".join(f"{count} {name}" for name, count in sorted(found.kills.items()))
    lost = found.requests - found.answered
    return [
        Figure(name="random kills", value=done, unit="", bar=f"{kills}", reached=done >= kills, note=what),
        Figure(name=f"lost, doubled or wrong responses of {found.requests:,}", value=lost + found.wrong, unit="",
               bar="0", reached=lost + found.wrong == 0),
        Figure(name="runs with a task given up after three kills of one shard", value=found.failed, unit="", bar="0",
               reached=found.failed == 0),
        Figure(name="seconds of it", value=found.seconds, unit="s"),
    ]  # fmt: skip
