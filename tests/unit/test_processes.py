"""Processes told apart by start time and mark, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.processes import (
    ProcessId,
    detach,
    end_groups,
    group_of,
    marked,
    reap,
    remove_unheld,
    shared_memory_of,
    start_ticks,
    wait_gone,
)
from tests.support.redis import await_that

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


def _start(mark: str = "") -> subprocess.Popen[bytes]:
    process = subprocess.Popen(SLEEP, env={**os.environ, "PLANARIA_STACK": mark}, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_a_process_is_itself_until_it_ends_and_a_zombie_is_gone() -> None:
    process = _start()
    this = ProcessId.of(process.pid)
    assert this is not None
    assert this.alive()
    other = ProcessId(process.pid, this.start + 1)
    other.kill(signal.SIGKILL)  # another process had this pid: not touched
    assert not other.alive()
    assert this.alive()
    this.kill(signal.SIGKILL)
    await_that(lambda: not this.alive(), 5.0)
    assert start_ticks(process.pid) is None, "a zombie counts as gone"
    assert process.wait() == -signal.SIGKILL
    assert ProcessId.of(process.pid) is None


def test_a_zombie_whose_other_threads_live_is_not_gone() -> None:
    """The leader of a thread group may be a zombie while another thread still holds files and ports."""
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=lambda: (print('up', flush=True), time.sleep(600))).start()\n"
        "time.sleep(0.2)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    try:
        stat = Path(f"/proc/{process.pid}/stat")
        await_that(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", 10.0, "the leader is a zombie")
        assert start_ticks(process.pid) is not None
    finally:
        process.kill()
        process.wait()


def test_marked_processes_are_found_with_their_shared_memory_and_waited_for() -> None:
    processes = [_start("mark-of-a-test") for _ in range(2)]
    found = marked("mark-of-a-test")
    assert {process.pid for process in found} == {process.pid for process in processes}
    assert marked("mark-of-a-tes") == []
    assert shared_memory_of(found) == set()
    assert len(wait_gone(found, 0.05)) == 2
    for process in found:
        process.kill(signal.SIGKILL)
    assert wait_gone(found, 10.0) == []
    for handle in processes:
        reap([detach(handle)])


OPENS = "import sys, time; file = open(sys.argv[1]); print('open', flush=True); time.sleep(60)"
HOLDER = """
import subprocess, sys, time, mmap
from multiprocessing import shared_memory
kept = shared_memory.SharedMemory(create=True, size=4096)
with open(sys.argv[1], "r+b") as file:
    corpus = mmap.mmap(file.fileno(), 0)
if len(sys.argv) == 3:  # a child holds it too, as an engine's workers do
    subprocess.Popen([sys.executable, "-c", sys.argv[-1], "/dev/shm/" + kept.name], stdout=subprocess.DEVNULL)
    time.sleep(0.5)
print(kept.name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def corpus() -> Iterator[Path]:
    """What a user keeps in memory, and only our processes have open."""
    path = Path("/dev/shm") / f"corpus-of-a-test-{os.getpid()}"
    path.write_bytes(b"x" * 4096)
    yield path
    path.unlink()


def _holder(*arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, *arguments], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        return process, Path("/dev/shm") / said.readline().decode().strip()


def test_a_group_is_ended_with_the_shared_memory_that_its_libraries_made_and_nothing_else(corpus: Path) -> None:
    process, segment = _holder(str(corpus), OPENS)
    assert segment.exists()
    assert shared_memory_of(group_of(process.pid)) == {segment}
    end_groups([process.pid])
    assert process.wait(10) == -signal.SIGKILL
    assert group_of(process.pid) == []
    assert not segment.exists()
    assert corpus.exists()


def test_shared_memory_that_somebody_else_holds_stays(corpus: Path) -> None:
    process, segment = _holder(str(corpus))
    other = subprocess.Popen([sys.executable, "-c", OPENS, segment], stdout=subprocess.PIPE)
    assert other.stdout is not None
    with other.stdout as said:
        said.readline()
    end_groups([process.pid])
    process.wait(10)
    assert segment.exists()
    other.kill()
    other.wait(10)
    remove_unheld([segment])
    assert not segment.exists()
