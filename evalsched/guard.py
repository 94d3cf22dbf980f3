"""Ends private processes when their owner is gone, however it went.

``python -m evalsched.guard FOLDER`` reads process ids, one a line, from standard input. When the input ends (the
owner closed it, or was killed) it kills their process groups and removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


class Guard:
    """The owner's end."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def add(self, pid: int) -> None:
        """Let ``pid``, the leader of its session, not outlive this process."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{pid}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """End what is left and remove the folder; returns when that is done."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def main(folder: str) -> None:
    """Wait for the end of the input, then end and remove everything."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leaders = [int(line) for line in sys.stdin if line.strip().isdigit()]
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
