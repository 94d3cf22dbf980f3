"""The agent's side of the rank channel: JSON lines over a Unix socket, a checked hello first.

A connection is nobody until its first line is a ``hello`` with the job's token from a process that this agent
watches. Afterwards a line that is no rank message is refused and told, and the connection stays.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from planner.auth import job_token
from planner.errors import one_line
from planner.messages import RANK_MESSAGES, Acknowledged, RankHello
from pretrain import unix_socket

MAX_LINE = 4 << 20
"""Bytes of the longest line; a connection that sends more is dropped."""
_CHUNK = 1 << 16


@dataclass(eq=False)
class Connection:
    """One rank's connection. ``who`` is (job, incarnation, rank) of its last hello, None before."""

    socket: socket.socket
    pid: int
    who: tuple[str, int, int] | None = None
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)


class RankChannel:
    """All connections of ranks to one agent. Not thread-safe: used by the agent's main thread alone.

    Args:
        path: of the socket; its folder is made (0700).
        selector: connections and the listening socket are registered with a callable as data.
        secret: cluster secret, from which job tokens derive.
        expected: (job, incarnation, rank, pid) -> whether this agent watches such a process.
        said: called with (who, message, process id, number) for each message, hello included (its number is 0).
        refused: called with a reason for what was dropped.
    """

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        secret: str,
        expected: Callable[[str, int, int, int], bool],
        said: Callable[[tuple[str, int, int], Any, int, int], None],
        refused: Callable[[str], None],
    ) -> None:
        self.path = path
        self._selector = selector
        self._secret = secret
        self._expected = expected
        self._said = said
        self._refused = refused
        self._connections: set[Connection] = set()
        self._server = unix_socket.listen(path)
        self._server.setblocking(False)
        selector.register(self._server, selectors.EVENT_READ, lambda mask: self._accept())

    def close(self) -> None:
        """Close everything and remove the socket's file."""
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.unregister(self._server)
        self._server.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> bool:
        """Take one connection that waits; False when there is none."""
        try:
            client, _ = self._server.accept()
        except BlockingIOError:
            return False
        client.setblocking(False)
        packed = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        connection = Connection(client, struct.unpack("3i", packed)[0])
        self._connections.add(connection)
        self._selector.register(client, selectors.EVENT_READ, lambda mask: self._ready(connection, mask))
        return True

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if mask & selectors.EVENT_READ and connection in self._connections:
            self._receive(connection)

    def _receive(self, connection: Connection) -> bool:
        """Read what is there; False when the connection is at its end (and dropped)."""
        try:
            data = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        connection.inbox += data
        while (end := connection.inbox.find(b"\n")) >= 0:
            line = bytes(connection.inbox[:end])
            del connection.inbox[: end + 1]
            if line.strip() and not self._line(connection, line):
                self._drop(connection)
                return False
        if not data or len(connection.inbox) > MAX_LINE:
            if data:
                self._refused(f"a line of more than {MAX_LINE} bytes; the connection was dropped")
            self._drop(connection)
            return False
        return True

    def _line(self, connection: Connection, line: bytes) -> bool:
        """Act on one line; False when the connection must go."""
        try:
            raw = json.loads(line)
            seq = int(raw.pop("seq", 0))
            message = RANK_MESSAGES.validate_python(raw)
        except (ValueError, TypeError, AttributeError) as error:  # pydantic's ValidationError is a ValueError
            self._refused(f"no rank message: {one_line(error)[:200]}")
            return connection.who is not None
        if isinstance(message, RankHello):
            return self._hello(connection, message)
        if connection.who is None:
            self._refused(f"{message.kind} before hello; the connection was dropped")
            return False
        self._said(connection.who, message, connection.pid, seq)
        return True

    def _hello(self, connection: Connection, hello: RankHello) -> bool:
        if not hmac.compare_digest(hello.token.encode(), job_token(self._secret, hello.job).encode()):
            self._refused(f"hello of job {hello.job} with a wrong token from pid {connection.pid}")
            return False
        if not self._expected(hello.job, hello.incarnation, hello.rank, connection.pid):
            self._refused(
                f"hello of rank {hello.rank}, incarnation {hello.incarnation} of job {hello.job} from pid "
                f"{connection.pid}, which this agent did not start as that"
            )
            return False
        connection.who = (hello.job, hello.incarnation, hello.rank)
        self._said(connection.who, hello, connection.pid, 0)
        self._queue(connection, Acknowledged(seq=0))
        return True

    def send(self, who: tuple[str, int, int], message: BaseModel) -> bool:
        """Queue a message for a rank and send what goes; False when it has no connection."""
        found = [connection for connection in self._connections if connection.who == who]
        for connection in found:
            self._queue(connection, message)
        return bool(found)

    def acknowledge(self, pid: int, seq: int) -> None:
        """Tell a process that what it said up to ``seq`` is safe; nothing happens where it is gone."""
        for connection in [c for c in self._connections if c.pid == pid and c.who is not None]:
            self._queue(connection, Acknowledged(seq=seq))

    def _queue(self, connection: Connection, message: BaseModel) -> None:
        connection.outbox += message.model_dump_json().encode() + b"\n"
        self._flush(connection)

    def rename(self, old: tuple[str, int, int], new: tuple[str, int, int]) -> None:
        """A rank that re-forms speaks under its new name from its next hello on; what it is sent goes there now."""
        for connection in self._connections:
            if connection.who == old:
                connection.who = new

    def _flush(self, connection: Connection) -> None:
        try:
            while connection.outbox:
                sent = connection.socket.send(connection.outbox)
                del connection.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:  # it is gone; what it wrote before is read until its end
            connection.outbox.clear()
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        self._selector.modify(connection.socket, mask, lambda ready: self._ready(connection, ready))

    def drain(self, pid: int) -> None:
        """Take everything that a process wrote before it ended, then close its connections.

        One that connected, spoke and ended at once may still wait to be accepted.
        """
        while self._accept():
            pass
        for connection in [c for c in self._connections if c.pid == pid]:
            while connection in self._connections and self._readable(connection):
                if not self._receive(connection):
                    break
            if connection in self._connections:
                self._drop(connection)

    @staticmethod
    def _readable(connection: Connection) -> bool:
        try:
            connection.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _drop(self, connection: Connection) -> None:
        self._connections.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
