"""``planaria submit | logs | cancel | pause | resume | run`` as people type them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.events import JobState
from tests.support.cluster import PLAIN, Cluster, cluster, cluster_of_module
from tests.support.redis import redis_of_session

__all__ = ["cluster", "cluster_of_module", "redis_of_session"]


def planaria(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command; ``environment`` is added to the caller's."""
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", *arguments],
        env={**os.environ, "PLANARIA_URL": "", "PLANARIA_STATE_DIR": "", **environment},
        capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def config(folder: Path, **changes: Any) -> str:
    path = folder / f"{changes.get('name', 'plain')}.yaml"
    path.write_text(yaml.safe_dump({**PLAIN, "workers": {"min": 1, "max": 2}, **changes}))
    return str(path)


def test_a_job_from_submission_to_its_logs(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ensure_agent("n1", 2)
    url = ["--url", cluster.store.url]
    done = planaria("submit", config(tmp_path), "--wait", "--set", "steps=8", *url)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert job.startswith("plain-")
    assert cluster.record(job)["step"] == 8

    said = planaria("logs", job, *url)
    assert said.returncode == 0
    assert "job.state" in said.stdout
    assert "running → done" in said.stdout

    failed = planaria("submit", config(tmp_path, name="refused"), "--wait", *url)
    assert failed.returncode == 5
    assert "bad input" in failed.stderr

    for command in ("cancel", "pause", "resume"):
        late = planaria(command, job, *url)
        assert late.returncode == 1
        assert "done already" in late.stderr
        unknown = planaria(command, job[:-1], *url)
        assert unknown.returncode == 2
        assert "did you mean" in unknown.stderr


def test_pause_resume_and_cancel_return_when_it_is_so(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ensure_agent("n1", 2)
    url = ["--url", cluster.store.url]
    job = planaria("submit", config(tmp_path, name="plain-50ms", steps=5000), *url).stdout.strip()
    cluster.wait_step(3, job)
    assert planaria("pause", job, *url).stdout == f"{job}: paused\n"
    assert cluster.record(job)["state"] == JobState.PAUSED
    assert planaria("resume", job, *url).returncode == 0
    again = planaria("resume", job, *url)
    assert again.returncode == 1
    assert "only a paused job" in again.stderr
    cancelled = planaria("cancel", job, *url)
    assert (cancelled.returncode, cancelled.stdout) == (0, f"{job}: cancelled\n")
    assert cluster.record(job)["published"], "what it published stays"


def test_more_ranks_than_the_cluster_has_slots_is_a_missing_device(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ensure_agent("n1", 2)
    before = cluster.store.jobs().keys()
    answer = planaria("submit", config(tmp_path, workers={"min": 3, "max": 3}), "--url", cluster.store.url)
    assert answer.returncode == 3
    assert "workers.min" in answer.stderr
    assert cluster.store.jobs().keys() == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["submit", "CONFIG", "--url", "redis://127.0.0.1:1"], 3, "not reachable"),
        (["submit", "CONFIG", "--set", "steps=0"], 2, "steps"),
        (["submit", "/nowhere.yaml"], 2, "no such file"),
        (["run", "CONFIG", "--slots", "1", "--set", "workers={min: 2, max: 2}"], 2, "workers.min"),
        (["run", "CONFIG", "--set", "data.train=[/nowhere/*]"], 2, "/nowhere/*"),
        (["run", "CONFIG", "--set", "model.heads=3"], 2, "heads 3"),
    ],
)
def test_what_cannot_work_is_one_line_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    path = config(tmp_path)
    state = tmp_path / "state"
    home = tmp_path / "home"
    arguments = [path if word == "CONFIG" else word for word in arguments]
    answer = planaria(*arguments, "--state-dir", str(state), XDG_STATE_HOME=str(home))
    assert answer.returncode == code, answer.stderr
    assert answer.stdout == ""
    assert len(answer.stderr.strip().splitlines()) == 1
    assert words in answer.stderr
    assert not state.exists()
    assert not home.exists()


def test_run_refuses_a_state_directory_that_is_busy(tmp_path: Path) -> None:
    import fcntl

    state = tmp_path / "state"
    state.mkdir()
    with (state / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer = planaria("run", config(tmp_path), "--slots", "1", "--state-dir", str(state), "--json")
    assert answer.returncode == 2
    assert "is up there already" in answer.stderr
    assert [path.name for path in state.iterdir() if path.name != ".command.lock"] == ["lock"]
    assert answer.stdout == ""
