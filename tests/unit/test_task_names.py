"""Unknown task names are refused at once, by an index that needs no lm-eval."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from evalsched.task_names import names_in_text, refuse_unknown
from planner.cli import app
from planner.errors import BadInputError
from tests.unit.test_submission import write


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_CACHE", str(cache))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("task: one\ntag: [two, 'three']\n", {"one", "two", "three"}),
        ('group: g # why\ntask:\n  - a\n  # c\n  - "b"\nother:\n  - no\n', {"g", "a", "b"}),
        ("tag:\n- x\n- y\ndoc_to_text: 'no'\n", {"x", "y"}),
        ('{"task": "flow", "tag": "t"}', {"flow", "t"}),
        ("task:\n  - task: inner\n    tag: deep\n", {"inner", "deep"}),
        ("num_tasks: no\n", set()),
    ],
)
def test_names_are_read_from_text(text: str, names: set[str]) -> None:
    assert names_in_text(text) == names


def test_what_is_there_passes_and_what_is_not_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: my_task\n")
    own = (str(tmp_path),)
    refuse_unknown(["stdlib_next_line", "gsm8k_100", "my_task", "hellaswag", "mmlu", "arc_*"], "--tasks", own)
    refuse_unknown([str(tmp_path / "mine.yaml")], "--tasks")
    for name, near in (
        ("stdlib_next_lime", "stdlib_next_line"), ("my_tusk", "my_task"), ("helaswag", "hellaswag"),
        ("no*such*pattern", "planaria tasks list"), ("/no/such.yaml", "planaria tasks list"),
    ):  # fmt: skip
        with pytest.raises(BadInputError) as refused:
            refuse_unknown(["stdlib_next_line", name], "job.yaml: evaluate.tasks", own)
        text = str(refused.value)
        assert text.startswith(f"job.yaml: evaluate.tasks: unknown task {name!r}")
        assert near in text


@pytest.mark.parametrize("command", ["submit", "run"])
def test_a_job_with_an_unknown_task_is_refused_before_anything_starts(tmp_path: Path, command: str) -> None:
    path = write(tmp_path, evaluate={"tasks": ["stdlib_next_lime"]})
    result = CliRunner().invoke(app, [command, str(path)])
    assert isinstance(result.exception, BadInputError)
    text = str(result.exception)
    assert text.startswith(f"{path}: evaluate.tasks: unknown task 'stdlib_next_lime'; did you mean stdlib_next_line")
    assert "\n" not in text
