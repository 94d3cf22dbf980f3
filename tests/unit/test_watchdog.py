"""A hung process shows its stack and is killed, also when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.watchdog import dump_and_kill, dump_stack

PROGRAM = """
import os, time
def where_it_hangs():
    os.write(1, b"ready\\n")
    time.sleep(3600)
where_it_hangs()
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_the_stack_is_in_the_log_and_the_process_is_gone(tmp_path: Path, stopped: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    if stopped:
        process.send_signal(signal.SIGSTOP)
    log = tmp_path / "rank.log"
    pidfd = os.pidfd_open(process.pid)
    thread = dump_and_kill(process.pid, pidfd, log)
    os.close(pidfd)
    assert process.wait(timeout=30) == -signal.SIGKILL
    thread.join(timeout=10)
    assert "where_it_hangs" in log.read_text()
    process.stdout.close()


def test_a_process_that_is_gone_is_no_error(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait(timeout=30)
    assert not dump_stack(process.pid, tmp_path / "log")
    assert not (tmp_path / "log").exists()
