"""The end of a rank that hangs: its stack is captured first, from outside, then it is killed.

A rank that lost its agent ends itself (:class:`pretrain.channel.SocketChannel`), and the agent ends ranks whose lease
is gone; this is for ranks that are there and make no progress. ``py-spy`` reads the memory of the process, so that a
stopped one (SIGSTOP) or one that is stuck in C code shows where it stands as well.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

DUMP_SECONDS = 5.0
"""Longest wait for the stack; the rank is killed then in any case."""


def dump_stack(pid: int, log: Path, seconds: float = DUMP_SECONDS) -> bool:
    """Append the stacks of all threads of ``pid`` to ``log``; False where that did not succeed in time."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return False
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, timeout=seconds, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode != 0 or not done.stdout:
        return False
    with contextlib.suppress(OSError), log.open("ab") as stream:
        stream.write(b"stack of the rank when it was ended because it hung:\n" + done.stdout + b"\n")
        return True
    return False


def dump_and_kill(pid: int, pidfd: int, log: Path) -> threading.Thread:
    """Capture the stack and SIGKILL the process, without waiting for either; the thread is returned for tests.

    ``pidfd`` names the process for good: it is duplicated, so that the caller may close it meanwhile.
    """
    own = os.dup(pidfd)

    def work() -> None:
        try:
            dump_stack(pid, log)
        finally:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(own, signal.SIGKILL)
            os.close(own)

    thread = threading.Thread(target=work, name=f"end-hung-{pid}", daemon=True)
    thread.start()
    return thread
