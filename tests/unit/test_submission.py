"""What is said about a job before anything is started: one line that names file, field and value."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import BadInputError
from pretrain.submission import check_slots, new_job_id, read_config
from tests.support.redis import drop_to_nobody

BASE: dict[str, Any] = {
    "name": "s",
    "workers": {"min": 1, "max": 2},
    "model": {"layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "heads": 2, "seq_length": 32},
    "data": {"train": ["stdlib"]},
    "batch": {"global": 4, "micro": 2},
    "optimizer": {"lr": 1.0e-3},
    "steps": 10,
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**BASE, **changes}))
    return path


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.layers=3", "parallel.pipeline=2", "workers.min=2"], ["model.layers 3", "parallel.pipeline 2"]),
        (
            ["model.heads=4", "parallel.tensor=3", "workers.min=3", "workers.max=3"],
            ["model.heads 4", "parallel.tensor 3"],
        ),
        (["batch.global=5"], ["global 5", "micro 2"]),
        (["model.heads=8", "evaluate.tasks=[stdlib_bits_per_byte]"], ["head size of 8"]),
        (["workers.min=3"], ["workers", "max 2 is below min 3"]),
        (["stepz=3"], ["stepz", "unknown key"]),
        (["steps=many"], ["steps", "many"]),
        (["optimizer.lr=-1"], ["optimizer.lr", "-1"]),
        (["data.train=[/nowhere/*.txt]"], ["data.train", "/nowhere/*.txt"]),
        (["data.valid=[/nowhere/*.txt]"], ["data.valid", "/nowhere/*.txt"]),
        (["tokenizer=/nowhere/tok"], ["tokenizer", "/nowhere/tok"]),
        (["checkpoint.dir=/dev/null/x"], ["checkpoint.dir", "/dev/null"]),
        (["noequals"], ["--set noequals", "key=value"]),
    ],
)
def test_one_line_names_what_is_wrong(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    path = write(tmp_path)
    with pytest.raises(BadInputError) as caught:
        read_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    for word in [*words, *([path.name] if not overrides[0].startswith("no") else [])]:
        assert word in text, text


def test_empty_and_binary_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    path = write(tmp_path, data={"train": [str(tmp_path / "*.txt")]})
    with pytest.raises(BadInputError, match=r"data\.train: all 2 files .* are empty"):
        read_config(path, [])
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe" * 200)
    with pytest.raises(BadInputError, match=r"data\.train: .*a\.txt is not UTF-8"):
        read_config(path, [])


def test_a_character_cut_by_the_look_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" + "ä".encode() * 40_000)
    config = read_config(write(tmp_path, data={"train": [str(tmp_path / "a.txt")]}), [])
    assert config.data.train == [str(tmp_path / "a.txt")]


def test_relative_paths_mean_the_callers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words")
    path = write(tmp_path, data={"train": ["text/*.txt", "stdlib"]}, checkpoint={"dir": "out"})
    monkeypatch.chdir(tmp_path)
    config = read_config(path, [])
    assert config.data.train == [str(tmp_path / "text/*.txt"), "stdlib"]
    assert config.checkpoint.dir == str(tmp_path / "out")


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{")
    with pytest.raises(BadInputError, match="tok"):
        read_config(write(tmp_path, tokenizer=str(tmp_path / "tok")), [])


def test_more_ranks_than_slots(tmp_path: Path) -> None:
    path = write(tmp_path, workers={"min": 2, "max": 2})
    with pytest.raises(BadInputError, match=r"workers\.min: 2 ranks need as many slots, this run has 1"):
        check_slots(read_config(path, []), path, 1, "this run has")


def test_job_ids_are_plain_and_never_the_same() -> None:
    ids = {new_job_id("../My Job: ä") for _ in range(50)}
    assert len(ids) == 50
    assert all("/" not in job and " " not in job and not job.startswith((".", "-")) for job in ids)


def _as_nobody(folder: Path, path: Path, overrides: list[str]) -> str:
    """What ``read_config`` says in a forked child that is an ordinary user."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "accepted"
        try:
            drop_to_nobody(folder)
            read_config(path, overrides)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode()
    os.waitpid(child, 0)
    return said


def test_what_another_user_keeps_to_himself_is_refused(tmp_path: Path) -> None:
    """As root permissions prove nothing, so the check runs as an ordinary user."""
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.is_relative_to("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    (tmp_path / "locked").mkdir(mode=0o700)
    (tmp_path / "open.txt").write_text("words")
    secret = tmp_path / "private.txt"
    secret.write_text("words")
    secret.chmod(0o600)
    path = write(tmp_path, data={"train": [str(tmp_path / "open.txt")]})
    path.chmod(0o644)
    assert _as_nobody(tmp_path, path, []) == "accepted"
    refused = _as_nobody(tmp_path, path, [f"checkpoint.dir={tmp_path}/locked/x"])
    assert "BadInputError" in refused
    assert "checkpoint.dir" in refused
    refused = _as_nobody(tmp_path, path, [f"data.train=[{secret}]"])
    assert "BadInputError" in refused
    assert "private.txt" in refused
