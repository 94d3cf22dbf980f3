"""Ranks that die go on from host memory; the run is that of a job without the fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain import snapshot
from tests.support.ranks import RankRun, run_ranks, start_ranks, tiny


def _said(run: RankRun, what: str) -> list[dict[str, object]]:
    return [message for message in run.of("checkpoint") if message["what"] == what]


@pytest.mark.slow
def test_killed_ranks_are_healed_from_the_newest_snapshot_that_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7, C10: a damaged snapshot is refused by name, the one before is used, and the losses are the calm run's."""
    settings = {"every_steps": 3, "snapshot_every_steps": 1}
    (calm,) = run_ranks(tiny(checkpoint=settings, steps=7), 1, tmp_path / "calm")

    monkeypatch.setenv("PLANARIA_SHM", str(tmp_path / "memory"))
    folder = snapshot.job_dir(tmp_path / "memory", "job")
    fault = [{"at_step": 6, "rank": 1, "kind": "sigkill", "phase": "forward"}]
    config = tiny(checkpoint=settings, steps=7, faults=fault)
    assert start_ranks(config, 2, tmp_path / "job").finish()[1].code == -9
    newest = snapshot.find(folder)[0]
    assert newest.step == 5, "the snapshots outlive the ranks"
    path = newest.shards[0].buffer.data_path
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)

    resume = str(tmp_path / "job" / "checkpoints" / "step-00000003")
    fields = {"incarnation": 2, "resume": resume, "fired_faults": [0]}
    healed, other = run_ranks(config, 2, tmp_path / "job", **fields)
    (refused,) = _said(healed, "refused")
    assert refused["step"] == 5
    assert "hash" in str(refused["reason"])
    (loaded,) = _said(healed, "loaded")
    assert loaded["step"] == 4, "the older snapshot is still newer than the checkpoint"
    assert sorted(healed.losses) == [5, 6, 7]
    for step, loss in healed.losses.items():
        assert loss == pytest.approx(calm.losses[step], abs=1e-5)
    ids = {
        one["step"]: sorted(one["ids"] + two["ids"])
        for one, two in zip(healed.of("step"), other.of("step"), strict=True)
    }
    assert ids == {message["step"]: sorted(message["ids"]) for message in calm.of("step") if message["step"] in ids}
    assert not folder.exists(), "a finished job gives its memory back"


@pytest.mark.slow
def test_a_roll_back_does_not_take_the_newer_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``exact_resume`` an earlier checkpoint is wanted on purpose."""
    monkeypatch.setenv("PLANARIA_SHM", str(tmp_path / "memory"))
    fault = [{"at_step": 5, "rank": 0, "kind": "sigkill", "phase": "forward"}]
    config = tiny(checkpoint={"every_steps": 2, "snapshot_every_steps": 1}, steps=5, faults=fault)
    start_ranks(config, 1, tmp_path / "job").finish()
    assert snapshot.find(snapshot.job_dir(tmp_path / "memory", "job"))[0].step == 4
    resume = str(tmp_path / "job" / "checkpoints" / "step-00000002")
    fields = {"incarnation": 2, "resume": resume, "fired_faults": [0], "exact_resume": True}
    (run,) = run_ranks(config, 1, tmp_path / "job", **fields)
    assert [message["step"] for message in _said(run, "loaded")] == [2]
    assert sorted(run.losses) == [3, 4, 5]
