"""Digests are of content: another folder does not change them, another bit does."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from evalsched.digests import FileHashes, model_digest, task_files_digest, tokenizer_digest
from planner.errors import BadInputError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in {
        "config.json": "{}",
        "model-00001-of-00002.safetensors": "weights one",
        "model-00002-of-00002.safetensors": "weights two",
        "tokenizer.json": "{}",
        "manifest.json": "{}",
        "README.md": "words",
    }.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def hashes(tmp_path: Path) -> FileHashes:
    return FileHashes(tmp_path / "hashes.json")


def test_a_copy_has_the_same_digest(model: Path, hashes: FileHashes, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert model_digest(model, hashes) == model_digest(tmp_path / "copy", hashes)


def test_a_changed_bit_has_another_though_size_and_time_stay(model: Path, hashes: FileHashes) -> None:
    before = model_digest(model, hashes)
    path = model / "model-00002-of-00002.safetensors"
    stat = path.stat()
    path.write_text("weights twO")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert model_digest(model, hashes) != before


def test_words_and_manifest_do_not_count_but_configuration_does(model: Path, hashes: FileHashes) -> None:
    before = model_digest(model, hashes)
    (model / "README.md").write_text("other words")
    (model / "manifest.json").write_text('{"a": 1}')
    assert model_digest(model, hashes) == before
    (model / "config.json").write_text('{"a": 1}')
    assert model_digest(model, hashes) != before


def test_the_tokenizer_is_apart_from_the_weights(model: Path, hashes: FileHashes) -> None:
    weights, tokenizer = model_digest(model, hashes), tokenizer_digest(model, hashes)
    (model / "chat_template.jinja").write_text("{{ x }}")
    assert model_digest(model, hashes) == weights
    assert tokenizer_digest(model, hashes) != tokenizer


def test_the_memory_is_kept_and_a_broken_one_is_no_error(model: Path, tmp_path: Path) -> None:
    memory = tmp_path / "hashes.json"
    first = FileHashes(memory)
    digest = model_digest(model, first)
    known = json.loads(memory.read_text())
    assert str(model / "config.json") in known
    known[str(model / "config.json")][4] = "remembered"
    memory.write_text(json.dumps(known))
    assert FileHashes(memory).of(model / "config.json") == "remembered"
    memory.write_text("{ broken")
    assert model_digest(model, FileHashes(memory)) == digest


def test_missing_parts_are_named(tmp_path: Path, hashes: FileHashes) -> None:
    with pytest.raises(BadInputError, match="no such model directory"):
        model_digest(tmp_path / "none", hashes)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match="no weights there"):
        model_digest(tmp_path / "empty", hashes)
    with pytest.raises(BadInputError, match="no tokenizer there"):
        tokenizer_digest(tmp_path / "empty", hashes)


def test_task_folders_by_their_definitions(tmp_path: Path, hashes: FileHashes) -> None:
    (tmp_path / "tasks" / "a").mkdir(parents=True)
    (tmp_path / "tasks" / "a" / "a.yaml").write_text("task: a")
    before = task_files_digest(tmp_path / "tasks", hashes)
    (tmp_path / "tasks" / "a" / "data.bin").write_text("big")
    assert task_files_digest(tmp_path / "tasks", hashes) == before
    (tmp_path / "tasks" / "a" / "utils.py").write_text("x = 1")
    assert task_files_digest(tmp_path / "tasks", hashes) != before
