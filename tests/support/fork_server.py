"""Processes without their import time: a server that has imported what they need forks one process per request.

``python -m tests.support.fork_server NAME...`` imports modules, or calls functions named ``module:function``, and then
serves requests on the socket that is its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from planner.processes import end_groups
from planner.scratch import scratch_environment

KEPT = 3
"""Number of the descriptor that a process may be given besides the standard ones."""
_LARGEST = 1 << 17


class Forked:
    """A process that the server forked, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
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
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
                self._server.changed.wait(left)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it while it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and what it started: it leads a session of its own."""
        if self.poll() is None:
            end_groups([self.pid])
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it may not have come to lead a session yet


class ForkServer:
    """The parent's side: start processes, hear of their ends."""

    def __init__(self, *imports: str) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", *imports],
                cwd=Path(__file__).resolve().parents[2],
                stdin=other,
            )
        self.statuses: dict[int, int] = {}
        self.changed = threading.Condition()
        self._pids: list[int] = []
        self._scratch = Path(tempfile.mkdtemp(prefix="planaria-tests-"))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(
        self, function: str, *arguments: str, out: Path, err: Path | None = None, stdin: int | None = None,
        keep: int | None = None, environment: Mapping[str, str] | None = None,
    ) -> Forked:  # fmt: skip
        """Fork a process that calls ``module:function`` with ``arguments`` as ``sys.argv[1:]``.

        Args:
            out: file that its output is added to; its errors too when ``err`` is left out.
            stdin: descriptor of its standard input, else there is none.
            keep: a descriptor that it has as number :data:`KEPT`.
            environment: what it has besides the caller's.
        """
        own = os.environ | scratch_environment(self._scratch) | (environment or {})
        request = {"function": function, "arguments": arguments, "environment": own}
        with contextlib.ExitStack() as files:
            streams = [os.devnull if stdin is None else stdin, out, err or out]
            numbers = [
                one if isinstance(one, int) else files.enter_context(open(one, "ab" if one is not os.devnull else "rb"))
                for one in streams
            ]
            given = [one if isinstance(one, int) else one.fileno() for one in numbers]
            with self.changed:
                socket.send_fds(self._socket, [json.dumps(request).encode()], given + ([] if keep is None else [keep]))
                assert self.changed.wait_for(lambda: self._pids, timeout=180), "the server does not answer"
                return Forked(self, self._pids.pop(0))

    def close(self) -> None:
        """End the server."""
        self._socket.shutdown(socket.SHUT_WR)
        self._process.wait(timeout=30)
        self._reader.join(timeout=30)
        self._socket.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _read(self) -> None:
        while message := self._socket.recv(_LARGEST):
            value = json.loads(message)
            with self.changed:
                if "status" in value:
                    self.statuses[value["pid"]] = value["status"]
                else:
                    self._pids.append(value["pid"])
                self.changed.notify_all()


def trainer_server() -> ForkServer:
    """A server whose processes train."""
    return ForkServer("pretrain.device:prepare", "pretrain.assembly", "pretrain.checkpoint", "pretrain.snapshot_state")


def engine_server() -> ForkServer:
    """A server whose processes infer."""
    return ForkServer("evalsched.residency:preload", "vllm.entrypoints.llm", "lm_eval.evaluator")


@pytest.fixture(scope="session")
def trainers() -> Iterator[ForkServer]:
    """Megatron is imported once per session."""
    with contextlib.closing(trainer_server()) as server:
        yield server


@pytest.fixture(scope="session")
def engines() -> Iterator[ForkServer]:
    """vLLM and lm-eval are imported once per session."""
    with contextlib.closing(engine_server()) as server:
        yield server


# ---------------------------------------------------------------------- the server


def _fork(request: dict[str, Any], descriptors: Sequence[int], channel: socket.socket) -> int:
    pid = os.fork()
    if pid:
        for one in descriptors:
            os.close(one)
        return pid
    code: Any = 1
    try:
        os.setsid()
        # Above all targets first: one of them may be the number of another's source.
        moved = [os.dup2(one, 100 + number) for number, one in enumerate(descriptors)]
        channel.close()
        for number, one in enumerate(moved):
            os.dup2(one, number)
            os.close(one)
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None
        module, _, name = request["function"].partition(":")
        sys.argv = [module, *request["arguments"]]
        code = getattr(import_module(module), name)() or 0
    except SystemExit as left:
        code = left.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def serve(imports: Sequence[str]) -> None:
    """Import, then fork and reap until the other end of the socket is closed."""
    channel = socket.socket(fileno=os.dup(0))
    for one in imports:
        module, _, name = one.partition(":")
        loaded = import_module(module)
        if name:
            getattr(loaded, name)()
    gc.freeze()
    channel.settimeout(0.01)
    children: set[int] = set()
    while True:
        with contextlib.suppress(TimeoutError):
            message, descriptors, *_ = socket.recv_fds(channel, _LARGEST, 4)
            if not message:
                return
            pid = _fork(json.loads(message), descriptors, channel)
            children.add(pid)
            channel.send(json.dumps({"pid": pid}).encode())
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                channel.send(json.dumps({"pid": pid, "status": status}).encode())


if __name__ == "__main__":
    serve(sys.argv[1:])
