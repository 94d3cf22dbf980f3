"""Atomic writes leave the old file or the new one; a cut line is not a document."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.files import append_json_line, read_json_lines, write_atomic, write_json


def test_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "latest"
    write_atomic(target, "step-1")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "step-2")
    assert target.read_text() == "step-1"
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_mode_is_set_before_the_name_appears(tmp_path: Path) -> None:
    write_json(tmp_path / "cluster.json", {"a": 1}, mode=0o600)
    assert (tmp_path / "cluster.json").stat().st_mode & 0o777 == 0o600


def test_cut_last_line_is_left_out_and_the_next_append_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_json_line(path, {"n": 1})
    with path.open("a") as stream:
        stream.write('{"n": 2')
    assert list(read_json_lines(path)) == [{"n": 1}]
    append_json_line(path, {"n": 3})
    assert list(read_json_lines(path)) == [{"n": 1}, {"n": 3}]


def test_no_file_is_no_lines(tmp_path: Path) -> None:
    assert list(read_json_lines(tmp_path / "none")) == []
