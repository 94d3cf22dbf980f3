"""Ranks by fork, from a process that has imported what they need: a replacement starts at once (CPU only).

Python, torch and Megatron take seconds to import, and a rank that takes a dead one's place would spend most of its
start on that. So an agent keeps one process that did the imports, made no tensor and holds no device, and asks it to
fork. It is begun while the first ranks train; until it is ready, ranks are started as programs. A forked CUDA is of no
use, so with GPUs there is no nursery.

``python -m pretrain.nursery FD`` serves one request per datagram on a socket that it inherited: ``{"argv", "env",
"log"}`` is answered by ``{"pid"}``; it says ``{"ready": true}`` first and ``{"pid", "code"}`` of each end. When the
agent closes the socket or dies, it exits, and its ranks go on as orphans do: a new agent adopts them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from planner.forked import live

_LARGEST = 1 << 18
"""Bytes of the largest datagram: a rank's environment."""
ANSWER_SECONDS = 2.0
"""How long the nursery may take to fork, or to tell of an end that its owner saw already."""


# ---------------------------------------------------------------------- the agent's end


class ForkedChild:
    """A rank that the nursery forked, with the part of ``subprocess.Popen`` that an agent uses."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid = nursery, pid

    def wait(self) -> int | None:
        """Its exit code (minus the signal) once its end was seen; None where nobody can say any more."""
        return self._nursery.code_of(self.pid)


class Nursery:
    """Begins the nursery, asks it to fork, hears of ends. Used by one thread.

    Args:
        python: interpreter of ranks.
        environment: of the nursery, which its ranks start from: what must be set before the imports.
        log: file for what it prints.
    """

    def __init__(self, python: str, environment: Mapping[str, str], log: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("ab") as stream:
            self._process = subprocess.Popen(
                [python, "-m", "pretrain.nursery", str(theirs.fileno())], env=dict(environment),
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self._socket = ours
        self._ready = False
        self._codes: dict[int, int] = {}

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still fork."""
        return self._process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether its imports are done."""
        while not self._ready and self._hear(0.0) is not None:
            pass
        return self._ready and self.alive

    def fork(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> ForkedChild | None:
        """A rank with the arguments ``argv`` (without the program), or None where it must be started as a program."""
        if not self.ready:
            return None
        request = json.dumps({"argv": list(argv), "env": dict(environment), "log": str(log)}).encode()
        try:
            self._socket.send(request)
        except OSError:
            return None
        deadline = time.monotonic() + ANSWER_SECONDS
        while (said := self._hear(deadline - time.monotonic())) is not None:
            if "code" not in said and "pid" in said:
                return ForkedChild(self, int(said["pid"]))
        self.close()  # an answer that comes too late would be a rank that nobody knows of
        return None

    def code_of(self, pid: int) -> int | None:
        """The exit code of a rank whose end was seen already."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while pid not in self._codes and self._hear(deadline - time.monotonic()) is not None:
            pass
        if pid not in self._codes:  # the nursery died first, so its ranks became the agent's
            with contextlib.suppress(ChildProcessError):
                gone, status = os.waitpid(pid, os.WNOHANG)
                return os.waitstatus_to_exitcode(status) if gone else None
        return self._codes.pop(pid, None)

    def close(self) -> None:
        """End it; ranks go on."""
        self._ready = False
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _hear(self, seconds: float) -> dict[str, Any] | None:
        """The next thing it says within ``seconds``, ends noted; None if there is none."""
        if self._socket.fileno() < 0 or not select.select([self._socket], [], [], max(0.0, seconds))[0]:
            return None
        try:
            raw = self._socket.recv(_LARGEST)
        except OSError:
            return None
        if not raw:
            return None
        said: dict[str, Any] = json.loads(raw)
        if "code" in said:
            self._codes[said["pid"]] = said["code"]
        self._ready = self._ready or "ready" in said
        return said


# ---------------------------------------------------------------------- the nursery


class _Ward:
    """The nursery's own end: one thread, no locks."""

    def __init__(self, owner: socket.socket) -> None:
        self._owner = owner
        self._wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Fork and reap until the owner is gone."""
        self._say(ready=True)
        while True:
            ready, _, _ = select.select([self._owner.fileno(), self._wake], [], [])
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if self._owner.fileno() in ready:
                raw = self._owner.recv(_LARGEST)
                if not raw:
                    return
                self._bear(json.loads(raw))

    def _bear(self, request: Mapping[str, Any]) -> None:
        pid = os.fork()
        if pid == 0:
            self._owner.close()
            signal.set_wakeup_fd(-1)
            os.close(self._wake)
            live(request["log"], partial(_be_rank, request["argv"], request["env"]), append=True)
        self._say(pid=pid)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._say(pid=found[0], code=os.waitstatus_to_exitcode(found[1]))

    def _say(self, **report: Any) -> None:
        with contextlib.suppress(OSError):
            self._owner.send(json.dumps(report).encode())


def _be_rank(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    _own_random_state()
    from pretrain import rank

    sys.argv = ["pretrain.rank", *argv]
    return rank.main()


def _own_random_state() -> None:
    """Forks of one process would otherwise draw the same numbers wherever nobody seeds."""
    import random

    import numpy as np

    random.seed()
    np.random.seed()


def _import() -> None:
    from pretrain import device

    device.prepare("cpu")  # before whatever imports Megatron-core
    import pretrain.assembly
    import pretrain.rank  # noqa: F401


def main() -> int:
    """Import, then serve on the inherited socket."""
    owner = socket.socket(fileno=int(sys.argv[1]))
    owner.set_inheritable(False)
    _import()
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        print("an import started a thread, and a process with threads cannot be forked safely", file=sys.stderr)
        return 1
    gc.freeze()
    _Ward(owner).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
