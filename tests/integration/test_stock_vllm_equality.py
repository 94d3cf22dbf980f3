"""``--exact`` against stock lm-eval's own vLLM class on real engines, on the demo's model and on SmolLM2-135M.

Over every request type, with few-shot examples, groups and filters: ``results`` and ``samples`` are equal for 1, 3 and
17 shards in any order, some of them run twice; with two workers of which one is killed in the middle; and a second run
runs nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from evalsched.engine import EngineSettings
from evalsched.evaluate import run_to_end
from evalsched.ledger import Ledger, sqlite_url
from evalsched.local import LocalFleet
from evalsched.recording import RecordJob, find_recording, record
from evalsched.runs import Run, RunSpec
from evalsched.scoring import ScoreJob, score
from evalsched.shards import cut
from evalsched.types import EvalSettings, RequestId, Response
from planner.events import Action
from tests.support.demo_model import write_demo_model
from tests.support.engine_host import EngineHost
from tests.support.fork_server import Forked, ForkServer
from tests.support.lm_tasks import SHAPES, write_tasks
from tests.support.redis import await_that
from tests.support.smollm import smollm

pytestmark = pytest.mark.timeout(900)
SAMPLED = {"generate_repeats"}
"""lm-eval samples these from one stream over all requests, which cannot be cut."""
GROUPED = {"choice_plain", "choice_fewshot", "choice_own_shots", "last_word", "choice_mutual"}
"""Members of the groups "whole" and "outer", which lm-eval loads once."""
TASKS = (*(name for name in SHAPES if name not in SAMPLED | GROUPED), "functions", "whole", "outer")
"""With the groups' members: ten tasks of all request types."""
CHAT = EvalSettings(
    tasks=("choice_plain", "generate_prefix", "rolling"), num_fewshot=2, apply_chat_template=True, limit=2,
    fewshot_as_multiturn=True, system_instruction="Be brief.", bootstrap_iters=50, exact=True,
)  # fmt: skip
EVERY = EvalSettings(tasks=TASKS, bootstrap_iters=50, exact=True)
CASES = {
    "demo": {"every type": replace(EVERY, limit=8), "chat and shots": replace(CHAT, limit=8)},
    "smollm2": {"every type": replace(EVERY, limit=2), "chat and shots": CHAT},
}
BOTH = [(model, case) for model, cases in CASES.items() for case in cases]
FILE_KEYS = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")


class World:
    """Tasks, models, and what stock lm-eval says of them: both stock processes run side by side from the start."""

    def __init__(self, folder: Path, engines: ForkServer) -> None:
        self.folder = folder
        self._engines = engines
        self.tasks = write_tasks(folder / "tasks")
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PLANARIA_CACHE", raising=False)  # made once per machine, not once per test run
            self.models = {"demo": write_demo_model(folder / "demo-model", seed=5), "smollm2": smollm()}
        self._stock = {model: self._start_stock(model) for model in CASES}
        self._hosts: dict[str, EngineHost] = {}

    def settings(self, model: str, case: str) -> EvalSettings:
        return replace(CASES[model][case], include_path=(str(self.tasks),))

    def _start_stock(self, model: str) -> Forked:
        folders = []
        for case in CASES[model]:
            folders.append(self.folder / model / case)
            folders[-1].mkdir(parents=True)
            (folders[-1] / "settings.json").write_text(json.dumps(self.settings(model, case).to_json()))
        return self._engines.start(
            "tests.support.stock_vllm:main", str(self.models[model]), *map(str, folders),
            out=self.folder / f"{model}.log",
        )  # fmt: skip

    def stock(self, model: str, case: str) -> Path:
        """Folder of stock lm-eval's files."""
        assert self._stock[model].wait(600) == 0, (self.folder / f"{model}.log").read_text()[-3000:]
        return self.folder / model / case

    def host(self, model: str) -> EngineHost:
        """An engine with the model, one process for all cuts."""
        if model not in self._hosts:
            self._hosts[model] = EngineHost(self.folder / model, self.models[model], self._engines, exact=True)
        return self._hosts[model]

    def close(self) -> None:
        for process in self._stock.values():
            process.kill()
            process.wait()
        for host in self._hosts.values():
            host.close()


@pytest.fixture(scope="module")
def world(engines: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("stock")
        made = World(folder, engines)
        patch.setenv("PLANARIA_CACHE", str(folder / "cache"))
        yield made
        made.close()


def assert_equal_files(ours: Path, stock: Path) -> dict[str, Any]:
    """Results and samples are equal; our results."""
    mine, theirs = (json.loads((folder / "results.json").read_text()) for folder in (ours, stock))
    for key in FILE_KEYS:
        assert mine.get(key) == theirs.get(key), key
    for name in theirs["configs"]:
        assert lines(ours / f"samples_{name}.jsonl") == lines(stock / f"samples_{name}.jsonl"), name
    assert isinstance(mine, dict)
    return mine


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- any cut, any order


@pytest.mark.parametrize(("model", "case"), BOTH)
def test_any_cut_in_any_order_equals_stock_lm_eval(world: World, model: str, case: str, tmp_path: Path) -> None:
    settings = world.settings(model, case)
    job = RecordJob(settings=settings, tokenizer=str(world.models[model]))
    recording = find_recording(job) or record(job)
    requests = recording.requests()
    assert len({request.request_type for request in requests}) == 3
    documents = len({(request.task, request.doc_id) for request in requests})
    rng = random.Random(case)
    for shards in (1, 3, 17):
        pieces = cut(requests, lambda request: 1.0, len(requests) / shards)
        assert len(pieces) >= min(shards, documents, 10)
        if shards > 1:
            pieces += rng.sample(pieces, 1)  # one is run twice
        rng.shuffle(pieces)
        answers: dict[RequestId, Response] = {}
        for piece in pieces:
            given = rng.sample(piece.requests, len(piece.requests))
            found = world.host(model).call("run", requests=[request.to_json() for request in given])
            answers |= {response.id: response for response in map(Response.from_json, found)}
        output = tmp_path / str(shards)
        score(
            ScoreJob(
                settings=settings, model=str(world.models[model]), tokenizer=str(world.models[model]), answers="",
                recording=str(recording.folder), output=str(output),
            ),
            answers,
        )  # fmt: skip
        assert_equal_files(output, world.stock(model, case))


# ---------------------------------------------------------------- the whole way: Celery, workers, ledger


def spec(world: World, model: str, case: str, output: Path, target_seconds: float) -> RunSpec:
    return RunSpec(
        model=str(world.models[model]), settings=world.settings(model, case), output=str(output), created=time.time(),
        engine=EngineSettings(exact=True), target_seconds=target_seconds,
    )  # fmt: skip


def completed_shards(fleet: LocalFleet, start: str) -> int:
    found = fleet.store.read_events(start)
    return sum(1 for one in found if one.payload and one.payload.action is Action.SHARD_COMPLETED)


def kill_in_the_middle(fleet: LocalFleet, start: str, what: str) -> None:
    await_that(lambda: completed_shards(fleet, start) >= 2, 400)
    worker = next(iter(fleet.processes().values()))
    os.kill(worker if what == "worker" else psutil.Process(worker).ppid(), signal.SIGKILL)


@pytest.mark.parametrize(("model", "what"), [("demo", "nursery"), ("smollm2", "worker")])
def test_a_worker_killed_in_the_middle_and_a_second_run(world: World, model: str, what: str, tmp_path: Path) -> None:
    """One of two workers is killed, or the process that both were forked from, which takes both with it."""
    case = "every type"
    with LocalFleet(2, 1, metric=False) as fleet, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        start = fleet.store.end_of("events")
        thread = threading.Thread(target=kill_in_the_middle, args=(fleet, start, what))
        thread.start()
        (run,) = run_to_end([spec(world, model, case, tmp_path / "out", 0.02)], ledger, fleet, scorer=score)
        thread.join()
        assert completed_shards(fleet, start) >= 9
        assert_whole(run, world.stock(model, case))
        (again,) = run_to_end([spec(world, model, case, tmp_path / "again", 0.02)], ledger, fleet, scorer=score)
    assert again.prepared is not None
    assert again.prepared.open == ()
    assert_equal_files(tmp_path / "again", world.stock(model, case))


def assert_whole(run: Run, stock: Path) -> None:
    assert run.failed == {}
    check = assert_equal_files(Path(run.spec.output), stock)["planaria"]["batch_check"]
    assert check["checked"] > 0
    assert check["largest_difference"] == 0
    assert check["different"] == 0
