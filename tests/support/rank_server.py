"""Ranks without their import time: a server that has imported everything forks one process per rank.

Run as ``python -m tests.support.rank_server`` it reads ``{"spec", "out", "err"}`` lines from standard input, forks,
runs :func:`pretrain.rank.main` in the child, and writes ``{"pid"}`` and later ``{"pid", "status"}`` lines.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


class ForkedRank:
    """A rank that the server forked, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        if self.returncode is None and self.pid in self._server.statuses:
            self.returncode = os.waitstatus_to_exitcode(self._server.statuses[self.pid])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._server.changed:
            while self.poll() is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
                self._server.changed.wait(left)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


class RankServer:
    """The parent's side: start ranks, hear of their ends."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_server"],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.statuses: dict[int, int] = {}
        self.changed = threading.Condition()
        self._pids: list[int] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, spec: Path, out: Path, err: Path) -> ForkedRank:
        """Fork a rank with this spec; its output goes to the two files."""
        assert self._process.stdin is not None
        with self.changed:
            self._process.stdin.write(json.dumps({"spec": str(spec), "out": str(out), "err": str(err)}) + "\n")
            self._process.stdin.flush()
            assert self.changed.wait_for(lambda: self._pids, timeout=120), "the rank server does not answer"
            return ForkedRank(self, self._pids.pop(0))

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._reader.join(timeout=30)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            value = json.loads(line)
            with self.changed:
                if "status" in value:
                    self.statuses[value["pid"]] = value["status"]
                else:
                    self._pids.append(value["pid"])
                self.changed.notify_all()


def _fork(case: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        for path, fd in ((case["out"], 1), (case["err"], 2)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        from pretrain.rank import main

        code = main([case["spec"]])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Fork and reap until standard input ends."""
    from pretrain import device

    device.prepare()
    import pretrain.assembly  # noqa: F401 - the point of this process

    answers: Any = os.fdopen(os.dup(1), "w", buffering=1)
    children: set[int] = set()
    pending = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line))
                children.add(pid)
                answers.write(json.dumps({"pid": pid}) + "\n")
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                answers.write(json.dumps({"pid": pid, "status": status}) + "\n")


if __name__ == "__main__":
    serve()
