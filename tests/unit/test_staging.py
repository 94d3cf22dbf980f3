"""Staging: once per node, verified, counted by live processes, bounded, least recently used goes first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evalsched.digests import model_digest
from evalsched.staging import in_use, stage, unstage
from planner.errors import BadInputError


def model(folder: Path, text: str, size: int = 1000) -> tuple[Path, str]:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(text.encode() * size)
    return folder, model_digest(folder)


def test_it_is_copied_once_and_read_by_all(tmp_path: Path) -> None:
    source, digest = model(tmp_path / "a", "x")
    first = stage(source, digest, root=tmp_path / "shm", budget=10_000)
    (source / "model.safetensors").unlink()
    second = stage(source, digest, root=tmp_path / "shm", budget=10_000)
    assert first.folder == second.folder == tmp_path / "shm" / digest
    assert (second.folder / "model.safetensors").stat().st_size == 1000


def test_another_content_than_asked_for_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source, _ = model(tmp_path / "a", "x")
    with pytest.raises(BadInputError, match="was asked for; it changed meanwhile"):
        stage(source, "0" * 32, root=tmp_path / "shm", budget=10_000)
    assert [path for path in (tmp_path / "shm").iterdir() if not path.name.endswith(".lock")] == []


def test_the_least_recently_used_makes_room_and_what_is_used_stays(tmp_path: Path) -> None:
    root, budget = tmp_path / "shm", 2_100
    held = {}
    for name in "abc":
        source, digest = model(tmp_path / name, name)
        held[name] = (stage(source, digest, root=root, budget=budget), digest)
        if name == "b":
            held["a"][0].release()
    assert not (root / held["a"][1]).exists()
    assert (root / held["b"][1]).is_dir()
    source, digest = model(tmp_path / "d", "d")
    direct = stage(source, digest, root=root, budget=budget)
    assert direct.folder == source, "no room beside what others use: it is read where it lies"
    direct.release()


def test_a_dead_processes_reference_does_not_count(tmp_path: Path) -> None:
    source, digest = model(tmp_path / "a", "x")
    environment = os.environ | {"PLANARIA_SHM": str(tmp_path / "node"), "PLANARIA_STAGE_BYTES": "5000"}
    command = [sys.executable, "-m", "evalsched.staging", str(source), digest]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    root = tmp_path / "node" / "models"
    assert done.stdout.strip() == str(root / digest)
    assert not in_use(root, digest)
    mine = stage(source, digest, root=root)
    assert in_use(root, digest)
    assert not unstage(digest, root=root)
    mine.release()
    assert unstage(digest, root=root)
    assert not (root / digest).exists()


def test_two_at_once_copy_once(tmp_path: Path) -> None:
    source, digest = model(tmp_path / "a", "x" * 1000, 2000)
    environment = os.environ | {"PLANARIA_SHM": str(tmp_path / "node"), "PLANARIA_STAGE_BYTES": "50000000"}
    command = [sys.executable, "-m", "evalsched.staging", str(source), digest]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=60)[0].strip() for process in running}
    assert said == {str(tmp_path / "node" / "models" / digest)}
    assert [process.returncode for process in running] == [0, 0, 0]
