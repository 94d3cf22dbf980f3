"""Recorded, cut up, shuffled, repeated, replayed: results and samples equal stock lm-eval's to the last digit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evalsched.ledger import Ledger, sqlite_url
from evalsched.recording import RecordJob, find_recording, record
from evalsched.scoring import ScoreJob, score, write_answers
from evalsched.shards import cut
from evalsched.types import EvalSettings
from tests.support.hash_lm import respond
from tests.support.lm_tasks import SHAPES, write_tasks
from tests.support.tiny_model import write_tokenizer

ALL = (*SHAPES, "functions", "python_task")
FILE_KEYS = (
    "results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples", "task_hashes",
    "system_instruction", "system_instruction_sha", "fewshot_as_multiturn", "chat_template", "chat_template_sha",
)  # fmt: skip

CASES = {
    "all shapes": EvalSettings(tasks=ALL, bootstrap_iters=200),
    "groups and tags": EvalSettings(tasks=("whole", "outer", "tagged"), limit=7, bootstrap_iters=200),
    "shots and seed": EvalSettings(tasks=ALL[:7], num_fewshot=4, fewshot_random_seed=77, limit=0.3, bootstrap_iters=50),
    "chat": EvalSettings(
        tasks=("choice_fewshot", "generate_filters", "generate_prefix"), apply_chat_template=True,
        fewshot_as_multiturn=True, system_instruction="Be brief.", bootstrap_iters=50,
    ),
    "samples": EvalSettings(
        tasks=("choice_fewshot", "rolling"), samples={"choice_fewshot": (1, 5, 6), "rolling": (0, 20)},
        bootstrap_iters=50,
    ),
    "settings of generation": EvalSettings(
        tasks=("generate_repeats", "generate_filters"), gen_kwargs={"temperature": 0.5, "max_gen_toks": 9},
        bootstrap_iters=50,
    ),
    "outputs only": EvalSettings(tasks=("choice_plain", "generate_filters"), predict_only=True, bootstrap_iters=50),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("equality")
    old = os.environ.get("PLANARIA_CACHE")
    os.environ["PLANARIA_CACHE"] = str(folder / "cache")
    tasks, tokenizer = write_tasks(folder / "tasks"), write_tokenizer(folder / "tokenizer")
    _run_stock(folder / "stock", tasks, tokenizer)
    yield folder / "stock", tasks, tokenizer
    if old is None:
        del os.environ["PLANARIA_CACHE"]
    else:
        os.environ["PLANARIA_CACHE"] = old


def _settings(case: str, tasks: Path) -> EvalSettings:
    return EvalSettings.from_json(CASES[case].to_json() | {"include_path": [str(tasks)]})


def _run_stock(root: Path, tasks: Path, tokenizer: Path) -> None:
    """All cases in one process of stock lm-eval."""
    for case in CASES:
        (root / case).mkdir(parents=True)
        (root / case / "settings.json").write_text(json.dumps(_settings(case, tasks).to_json()))
    command = [sys.executable, "-m", "tests.support.hash_lm", str(tokenizer), *(str(root / case) for case in CASES)]
    environment = os.environ | {"TQDM_DISABLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


def _ours(settings: EvalSettings, tokenizer: Path, output: Path, shards: int, rng: random.Random) -> None:
    job = RecordJob(settings=settings, tokenizer=str(tokenizer))
    recording = find_recording(job) or record(job)
    requests = recording.requests()
    pieces = cut(requests, lambda request: 1.0, len(requests) / shards)
    assert min(shards, 5) <= len(pieces) <= shards + 1  # scoring and generation do not share a shard
    pieces += rng.sample(pieces, min(3, len(pieces)))  # some are delivered twice
    rng.shuffle(pieces)
    output.mkdir(parents=True)
    with Ledger(sqlite_url(output / "ledger.db"), token=1) as ledger:
        trials = {}
        for task in recording.tasks:
            own = [request for request in requests if request.task == task.task]
            set_id = ledger.put_requests(task.digest, task.task, own)
            trials[task.task] = ledger.put_trial(
                key=task.digest, key_parts={}, task=task.task, set_id=set_id, model_path="m"
            )
        for piece in pieces:
            answers = [respond(request) for request in piece.requests]
            rng.shuffle(answers)
            for task in piece.tasks:
                ledger.put_responses({trials[task].id: [a for a in answers if a.id.task == task]}, "worker")
        kept = [response for trial in trials.values() for response in ledger.responses_of(trial.id)]
    rng.shuffle(kept)
    write_answers(output / "answers.jsonl", kept)
    outcome = score(
        ScoreJob(
            settings=settings, model="hash", tokenizer=str(tokenizer), recording=str(recording.folder),
            answers=str(output / "answers.jsonl"), output=str(output),
        )
    )  # fmt: skip
    assert outcome.exit_code == 0


@pytest.mark.parametrize("case", CASES)
def test_equal_to_stock_lm_eval(world: Any, case: str, tmp_path: Path) -> None:
    root, tasks, tokenizer = world
    settings = _settings(case, tasks)
    rng = random.Random(case)
    stock = json.loads((root / case / "results.json").read_text())
    for shards in (1, 3, 17):
        folder = tmp_path / f"ours-{shards}"
        _ours(settings, tokenizer, folder, shards, rng)
        ours = json.loads((folder / "results.json").read_text())
        for key in FILE_KEYS:
            assert ours.get(key) == stock.get(key), key
        assert {name: _config(c) for name, c in ours["configs"].items()} == {
            name: _config(c) for name, c in stock["configs"].items()
        }
        for name in stock["configs"]:
            assert _lines(folder / f"samples_{name}.jsonl") == _lines(root / case / f"samples_{name}.jsonl")
        assert set(stock) <= set(ours)


def _config(config: dict[str, Any]) -> dict[str, Any]:
    """Without what says where model and task files lie, and addresses of functions."""
    text = {name: value for name, value in config.items() if name != "metadata"}
    return {name: value for name, value in text.items() if " at 0x" not in str(value)}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
