"""Processes told apart by start time and mark, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from planner.processes import ProcessId, detach, marked, reap, shared_memory_of, start_ticks, wait_gone
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
