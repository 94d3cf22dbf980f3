"""A published directory is refused by name of file for whatever is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.errors import BadInputError
from planner.manifest import NAME, parse_step_dir, publish, read_manifest, step_dir_name, verify


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / step_dir_name(50)
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "a.distcp").write_bytes(bytes(range(256)) * 40)
    (folder / "megatron" / "common.pt").write_bytes(b"common")
    (folder / "empty").write_bytes(b"")
    publish(folder, job="j1", step=50, consumed_samples=800, incarnation=3, created=1.5)
    return folder


def test_names_and_steps_agree() -> None:
    assert parse_step_dir(step_dir_name(50)) == (50, False)
    assert parse_step_dir(step_dir_name(50, export=True)) == (50, True)
    for foreign in ("step-50", "step-00000050.tmp", ".step-00000050", "latest"):
        assert parse_step_dir(foreign) is None


def test_published_directory_verifies(published: Path) -> None:
    assert verify(published) == []
    manifest = read_manifest(published)
    assert (manifest.job, manifest.step, manifest.consumed_samples, manifest.incarnation) == ("j1", 50, 800, 3)
    assert manifest.files["megatron/a.distcp"]["bytes"] == 256 * 40
    assert set(json.loads((published / NAME).read_text())) == {
        "format", "job", "step", "consumed_samples", "incarnation", "created", "files",
    }  # fmt: skip


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip, "hash"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "size"),
        (lambda path: path.write_bytes(b""), "size 0"),
        (lambda path: path.unlink(), "missing"),
    ],
)
def test_damage_is_named(published: Path, damage: Callable[[Path], None], problem: str) -> None:
    damage(published / "megatron" / "a.distcp")
    problems = verify(published)
    assert [found.file for found in problems] == ["megatron/a.distcp"]
    assert problem in problems[0].problem


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "files": 3}', "\x00"])
def test_bad_manifest_is_a_problem_not_a_crash(published: Path, text: str) -> None:
    (published / NAME).write_text(text)
    assert [found.file for found in verify(published)] == [NAME]
    with pytest.raises(BadInputError):
        read_manifest(published)


def test_manifest_may_not_point_outside(published: Path) -> None:
    data = json.loads((published / NAME).read_text())
    data["files"]["../../etc/passwd"] = {"bytes": 1, "xxh3": "0"}
    (published / NAME).write_text(json.dumps(data))
    assert any("outside" in found.problem for found in verify(published))
