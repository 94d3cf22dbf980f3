"""The guard of a private fleet: what it was told of ends with its owner, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalsched import guard
from evalsched.guard import Guard
from planner.processes import start_ticks
from tests.support.redis import await_that

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_what_it_was_told_of_is_ended_and_the_folder_is_removed(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    kept = Guard(folder)
    kept.add(sleeper.pid)
    kept.close()
    assert sleeper.wait(10) == -9
    assert not folder.exists()


def test_a_number_that_another_process_has_now_is_left_alone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Guard(tmp_path / "private")
    with monkeypatch.context() as patch:
        patch.setattr(guard, "start_ticks", lambda pid: 1)  # as if it had begun long before
        kept.add(sleeper.pid)
    kept.close()
    assert sleeper.poll() is None


def test_children_of_a_leader_that_is_gone_are_ended(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        f"print(subprocess.Popen({SLEEP!r}, stdout=subprocess.DEVNULL).pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    kept = Guard(tmp_path / "private")
    kept.add(leader.pid)
    leader.communicate(timeout=10)
    assert start_ticks(child) is not None
    kept.close()
    await_that(lambda: start_ticks(child) is None, 10, "the child is gone")
