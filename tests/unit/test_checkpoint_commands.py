"""``planaria checkpoint list | verify``: every damage is named, exit codes are the contract's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from planner import manifest
from planner.errors import BadInputError
from pretrain import published
from pretrain.checkpoint_commands import list_command, verify_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 5 and 10, the latter with an export, and what a crash may leave."""
    checkpoints = tmp_path / "checkpoints"
    for step, export in ((5, False), (10, False), (10, True)):
        work = checkpoints / "work"
        (work / "megatron").mkdir(parents=True)
        (work / "megatron" / "data").write_bytes(random.Random(step).randbytes(5000))
        described = manifest.Described(
            job="j", step=step, consumed_samples=step * 8, incarnation=2, created=12.5, description={"format": 1}
        )
        target = checkpoints / manifest.step_dir_name(step, export)
        published.commit(work, target, fence=None, described=described, latest=not export)
    (checkpoints / "step-00000015" / "megatron").mkdir(parents=True)
    (checkpoints / ".step-00000015.j.2-0.tmp").mkdir()
    return checkpoints


def _verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = verify_command(path, True)
    return int(code), json.loads(capsys.readouterr().out)


def test_list_shows_what_is_published(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_command(folder.parent, True) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["latest"], bool(row["export"])) for row in rows] == [(5, False, False), (10, True, True)]
    assert rows[0]["bytes"] > 5000
    assert list_command(folder, False) == 0
    assert "step-00000010" in capsys.readouterr().out


def test_verify_answers_in_the_contract_s_shape(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "step-00000010"
    assert _verify(path, capsys) == (0, {"path": str(path), "ok": True, "step": 10, "errors": []})
    (path / "megatron" / "data").unlink()
    code, said = _verify(path, capsys)
    assert (code, said["ok"], said["step"]) == (1, False, 10)
    assert said["errors"] == [{"file": "megatron/data", "problem": "missing"}]
    code, said = _verify(folder / "step-00000015", capsys)
    assert (code, said["step"], said["errors"][0]["file"]) == (1, 15, "manifest.json")


def test_one_flipped_bit_anywhere_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """C7, the manifest included."""
    path = folder / "step-00000010"
    dice = random.Random(3)
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        whole = file.read_bytes()
        for _ in range(150):
            position, bit = dice.randrange(len(whole)), dice.randrange(8)
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            file.write_bytes(damaged)
            code, said = _verify(path, capsys)
            assert code == 1, (
                f"{file.name}: byte {position}, bit {bit} ({bytes(whole[position - 20 : position + 20])!r})"
            )
            assert said["errors"]
        file.write_bytes(whole)
    assert _verify(path, capsys)[0] == 0


@pytest.mark.parametrize("damage", ["rename", "outside", "empty", "no hash"])
def test_manifests_that_lie(folder: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    path = folder / "step-00000010"
    said = json.loads((path / manifest.NAME).read_text())
    if damage == "rename":
        path = path.rename(folder / "step-00000011")
    elif damage == "outside":
        said["files"]["../step-00000005/megatron/data"] = said["files"]["megatron/data"]
    elif damage == "empty":
        said["files"] = {}
    else:
        said["files"]["megatron/data"] = {"bytes": 5000}
    (path / manifest.NAME).write_text(json.dumps(said))
    assert _verify(path, capsys)[0] == 1


def test_what_is_no_checkpoint_is_bad_input(folder: Path) -> None:
    with pytest.raises(BadInputError, match="no such directory"):
        verify_command(folder / "nowhere", True)
    with pytest.raises(BadInputError, match="no such directory"):
        list_command(folder / "latest", False)
    with pytest.raises(BadInputError, match="a folder of checkpoints; give one of them"):
        verify_command(folder, False)


def test_the_newest_that_verifies_is_picked_and_the_refused_are_named(folder: Path) -> None:
    assert published.newest_verified(folder) == (folder / "step-00000010", [])
    (folder / "step-00000010" / "megatron" / "data").write_bytes(b"")
    path, (refused,) = published.newest_verified(folder)
    assert path == folder / "step-00000005"
    assert (refused.step, refused.problems[0].file) == (10, "megatron/data")
    assert "size 0" in refused.reason


def test_a_replayed_step_keeps_the_published_one_and_replaces_a_broken_one(folder: Path) -> None:
    described = manifest.Described(job="j", step=10, consumed_samples=80, incarnation=3, created=1.0)
    for broken in (False, True):
        if broken:
            (folder / "step-00000010" / "megatron" / "data").write_bytes(b"x")
        work = folder / "work"
        work.mkdir()
        (work / "data").write_bytes(b"new")
        used = published.commit(work, folder / "step-00000010", fence=None, described=described)
        assert used is broken
        published.remove_tree(work)
    assert manifest.read_manifest(folder / "step-00000010").incarnation == 3


def test_exports_outlive_their_checkpoint(folder: Path) -> None:
    work = folder / "work"
    work.mkdir()
    (work / "data").write_bytes(b"new")
    described = manifest.Described(job="j", step=20, consumed_samples=1, incarnation=2, created=1.0)
    published.commit(work, folder / "step-00000020", fence=None, described=described)
    gone = published.apply_retention(folder, keep=1, keep_every=None, newest_verified=20)
    assert [path.name for path in gone] == ["step-00000005", "step-00000010"]
    assert (folder / "step-00000010.hf").is_dir(), "its trial may still need it: the supervisor knows"


def test_a_roll_back_takes_newer_checkpoints_out_of_the_count(folder: Path) -> None:
    (retired,) = published.retire_after(folder, 5)
    assert published.newest_verified(folder)[0] == folder / "step-00000005"
    assert published.read_latest(folder) == folder / "step-00000005"
    assert (retired / "megatron" / "data").exists(), "nothing is deleted by going back"


def test_the_last_claim_holds(folder: Path) -> None:
    from planner.errors import FencedError
    from pretrain.published import Fence

    published.claim(folder, Fence("j", 3, 40))
    with pytest.raises(FencedError, match="has taken over"):
        published.claim(folder, Fence("j", 2, 90))
    with pytest.raises(FencedError, match="has taken over"):
        published.claim(folder, Fence("j", 3, 39))
    published.claim(folder, Fence("other", 1))
    with pytest.raises(FencedError, match="job other"):
        published.check_fence(folder, Fence("j", 3, 40))
