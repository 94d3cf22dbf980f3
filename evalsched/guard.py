"""Ends private processes when their owner is gone, however it went.

``python -m evalsched.guard FOLDER`` reads process ids and when each of them started, one a line, from standard input.
When the input ends (the owner closed it, or was killed) it kills their process groups and removes the folder. A number
that the system gave to another process meanwhile is left alone.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # it is started as a file, without any package's search path: sooner
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planner.processes import end_groups, start_ticks


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
        self._process.stdin.write(f"{pid} {start_ticks(pid) or ''}\n".encode())
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
    started = [line.split() for line in sys.stdin.readlines()]
    # The children of one that is gone may live on.
    end_groups([int(leader) for leader, *start in started if start_ticks(int(leader)) in (None, *map(int, start))])
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
