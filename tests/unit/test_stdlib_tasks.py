"""The shipped tasks: held out, deterministic, inside their window, and not to be guessed from form."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import yaml

from evalsched import stdlib_tasks
from planner.stdlib_corpus import HELD_OUT, held_out_files, library_folder, training_files

TASKS = Path(stdlib_tasks.__file__).parent.parent / "tasks"
WINDOW = 256


def test_training_and_held_out_files_share_nothing() -> None:
    train, held_out = training_files(), held_out_files()
    assert not set(train) & set(held_out)
    assert len(held_out) >= 20
    assert sum(path.stat().st_size for path in held_out) > 500_000
    assert sum(path.stat().st_size for path in train) > 3_000_000
    assert train == training_files()
    assert [p.relative_to(library_folder()).as_posix() for p in held_out] == sorted(
        name for name in HELD_OUT if (library_folder() / name).is_file()
    )


def test_odd_files_are_left_out_of_training(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 1\n" * 400)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 400)
    (tmp_path / "tiny.py").write_text("x = 1\n")
    (tmp_path / "heapq.py").write_text("x = 1\n" * 400)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "case.py").write_text("x = 1\n" * 400)
    assert training_files(tmp_path) == [tmp_path / "good.py"]
    assert held_out_files(tmp_path) == [tmp_path / "heapq.py"]


@pytest.mark.parametrize("make", [stdlib_tasks.passages, stdlib_tasks.next_lines, stdlib_tasks.completions])
def test_documents_are_the_same_every_time_and_enough(make: object) -> None:
    first, state = make(), random.getstate()  # type: ignore[operator]
    assert make() == first  # type: ignore[operator]
    assert random.getstate() == state  # whoever else draws is not disturbed
    assert len(first) >= 300
    assert len({doc["module"] for doc in first[:100]}) >= 8  # a small limit meets many modules


def test_choices_fit_the_window_in_bytes() -> None:
    sources = {
        (path.stem if path.stem != "__init__" else path.parent.name): path.read_text().expandtabs(8).splitlines()
        for path in held_out_files()
    }
    for doc in stdlib_tasks.next_lines():
        assert all(2 + len((doc["context"] + choice).encode()) <= WINDOW for choice in doc["choices"])
        true_line = doc["context"].rpartition("\n")[2] + doc["choices"][doc["answer"]]
        assert true_line in sources[doc["module"]]
        assert doc["context"].rpartition("\n")[2].strip(), "the line's beginning is given"


def test_completions_fit_the_window_and_hold_their_answer() -> None:
    for doc in stdlib_tasks.completions():
        assert 1 + len(doc["context"].encode()) + 24 <= WINDOW
        name = doc["context"][-3:] + doc["target"]
        assert name in doc["context"][:-3]
        assert len(doc["target"].encode()) < 24


def test_choices_differ_and_their_place_and_length_tell_nothing() -> None:
    documents = stdlib_tasks.next_lines()
    places = Counter(doc["answer"] for doc in documents)
    assert all(0.2 < places[n] / len(documents) < 0.3 for n in range(4))
    longest = shortest = 0
    for doc in documents:
        assert len(set(doc["choices"])) == 4
        wrong = [choice for n, choice in enumerate(doc["choices"]) if n != doc["answer"]]
        assert all(choice[0] != doc["choices"][doc["answer"]][0] for choice in wrong)
        lengths = [len(choice) for choice in doc["choices"]]
        longest += lengths[doc["answer"]] == max(lengths) and lengths.count(max(lengths)) == 1
        shortest += lengths[doc["answer"]] == min(lengths) and lengths.count(min(lengths)) == 1
    assert longest / len(documents) < 0.35
    assert shortest / len(documents) < 0.35


def test_passages_are_whole_lines_of_bounded_length() -> None:
    for doc in stdlib_tasks.passages():
        assert doc["text"].endswith("\n")
        assert 500 < len(doc["text"].encode()) <= stdlib_tasks.PASSAGE_BYTES


def test_each_task_folder_has_a_task_and_a_readme_with_source_and_licence() -> None:
    folders = [path for path in TASKS.iterdir() if path.is_dir() and not path.name.startswith("_")]
    assert {"stdlib_bits_per_byte", "stdlib_next_line", "stdlib_complete"} <= {path.name for path in folders}
    for folder in folders:
        text = (folder / f"{folder.name}.yaml").read_text()
        task = yaml.safe_load(text.replace("!function ", ""))
        assert task["task"] == folder.name
        readme = (folder / "README.md").read_text()
        assert "Source" in readme
        assert "Licence" in readme
