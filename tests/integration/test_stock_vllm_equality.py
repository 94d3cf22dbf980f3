"""``planaria eval --exact`` against stock lm-eval's own vLLM class on a real engine: results and samples are equal,
for few and many shards, with two workers of which one is killed in the middle, and for a second run that runs nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalsched.engine import EngineSettings
from evalsched.evaluate import run_to_end
from evalsched.ledger import Ledger, sqlite_url
from evalsched.local import LocalFleet
from evalsched.runs import Run, RunSpec
from evalsched.scoring import score
from evalsched.types import EvalSettings
from planner.events import Action
from tests.support.lm_tasks import SHAPES, write_tasks
from tests.support.redis import await_that
from tests.support.tiny_model import write_model

pytestmark = pytest.mark.timeout(900)
SAMPLED = {"generate_repeats"}
"""lm-eval samples these from one stream over all requests, which cannot be cut."""
GROUPED = {"choice_plain", "choice_fewshot", "choice_own_shots", "last_word", "choice_mutual"}
"""Members of the groups "whole" and "outer", which lm-eval loads once."""
TASKS = (*(name for name in SHAPES if name not in SAMPLED | GROUPED), "functions", "whole", "outer")
CASES = {
    "every type": EvalSettings(tasks=TASKS, bootstrap_iters=50, limit=12, exact=True),
    "chat and shots": EvalSettings(
        tasks=("choice_plain", "generate_prefix", "rolling"), num_fewshot=2, apply_chat_template=True, limit=8,
        fewshot_as_multiturn=True, system_instruction="Be brief.", bootstrap_iters=50, exact=True,
    ),
}  # fmt: skip
FILE_KEYS = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, Path]]:
    folder = tmp_path_factory.mktemp("stock")
    old = os.environ.get("PLANARIA_CACHE")
    os.environ["PLANARIA_CACHE"] = str(folder / "cache")
    tasks, model = write_tasks(folder / "tasks"), write_model(folder / "model", seed=5)
    for case in CASES:
        (folder / case).mkdir()
        (folder / case / "settings.json").write_text(json.dumps(settings(case, tasks).to_json()))
    command = [sys.executable, "-m", "tests.support.stock_vllm", str(model), *(str(folder / case) for case in CASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    yield folder, tasks, model
    if old is None:
        del os.environ["PLANARIA_CACHE"]
    else:
        os.environ["PLANARIA_CACHE"] = old


@pytest.fixture(scope="module")
def fleet() -> Iterator[LocalFleet]:
    """Two workers with real engines, kept for all cases."""
    with LocalFleet(2, 1) as made:
        yield made


def settings(case: str, tasks: Path) -> EvalSettings:
    return replace(CASES[case], include_path=(str(tasks),))


def spec(world: tuple[Path, Path, Path], case: str, output: Path, target_seconds: float) -> RunSpec:
    return RunSpec(
        model=str(world[2]), settings=settings(case, world[1]), output=str(output), created=time.time(),
        engine=EngineSettings(exact=True), target_seconds=target_seconds,
    )  # fmt: skip


def assert_equal_to_stock(run: Run, stock: Path) -> None:
    output = Path(run.spec.output)
    ours, theirs = (json.loads((folder / "results.json").read_text()) for folder in (output, stock))
    for key in FILE_KEYS:
        assert ours.get(key) == theirs.get(key), key
    for name in theirs["configs"]:
        assert lines(output / f"samples_{name}.jsonl") == lines(stock / f"samples_{name}.jsonl"), name
    check = ours["planaria"]["batch_check"]
    assert check["checked"] > 0
    assert check["largest_difference"] == 0
    assert check["different"] == 0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("case", CASES)
def test_equal_to_stock_lm_eval(world: tuple[Path, Path, Path], fleet: LocalFleet, case: str, tmp_path: Path) -> None:
    with Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        (run,) = run_to_end([spec(world, case, tmp_path / "out", 60.0)], ledger, fleet, scorer=score)
        assert run.failed == {}
        assert_equal_to_stock(run, world[0] / case)
        (again,) = run_to_end([spec(world, case, tmp_path / "again", 60.0)], ledger, fleet, scorer=score)
    assert again.prepared is not None
    assert again.prepared.open == ()
    ours, second = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("out", "again"))
    assert ours["results"] == second["results"]


def test_equal_with_many_shards_and_a_worker_killed_in_the_middle(
    world: tuple[Path, Path, Path], fleet: LocalFleet, tmp_path: Path
) -> None:
    case = "every type"
    start = fleet.store.end_of("events")

    def completed() -> int:
        found = fleet.store.read_events(start)
        return sum(1 for one in found if one.payload and one.payload.action is Action.SHARD_COMPLETED)

    def kill_one() -> None:
        await_that(lambda: completed() >= 2, 400)
        os.kill(next(iter(fleet.processes().values())), signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        (run,) = run_to_end([spec(world, case, tmp_path / "out", 0.02)], ledger, fleet, scorer=score)
    thread.join()
    assert completed() >= 9
    assert run.failed == {}
    output, stock = tmp_path / "out", world[0] / case
    assert (
        json.loads((output / "results.json").read_text())["results"]
        == json.loads((stock / "results.json").read_text())["results"]
    )
