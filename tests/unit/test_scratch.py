"""Temporary files of processes that may be killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from planner.scratch import RECORD, remove_scratch, renew_scratch, scratch_environment, scratch_of


def test_a_scratch_folder_is_found_again_and_removed(tmp_path: Path) -> None:
    assert scratch_of(tmp_path) is None
    folder = renew_scratch(tmp_path)
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder / "12-of-marker" / ("x" * 36))) < 107
        assert renew_scratch(tmp_path) == folder
    finally:
        (folder / "left").write_text("x")
        remove_scratch(tmp_path)
    assert not folder.exists()
    assert scratch_of(tmp_path) is None
    remove_scratch(tmp_path)


def test_one_that_was_taken_away_is_made_anew(tmp_path: Path) -> None:
    first = renew_scratch(tmp_path)
    first.rmdir()
    second = renew_scratch(tmp_path)
    assert second.is_dir()
    remove_scratch(tmp_path)


@pytest.mark.parametrize("named", ["/", "", "planaria-x", "/usr", "/tmp"])
def test_a_record_that_names_no_folder_of_ours_is_not_believed(tmp_path: Path, named: str) -> None:
    (tmp_path / RECORD).write_text(named)
    assert scratch_of(tmp_path) is None


def test_a_process_keeps_its_files_there_and_what_torch_compiled_elsewhere(tmp_path: Path) -> None:
    code = "import os, tempfile; print(tempfile.mkdtemp()); print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    said = subprocess.run(
        [sys.executable, "-c", code], env=scratch_environment(tmp_path), capture_output=True, text=True, check=True
    ).stdout.split()
    assert Path(said[0]).parent == tmp_path
    assert Path(said[1]).name.startswith("torchinductor_")
    assert tmp_path not in Path(said[1]).parents
