"""The rank's side of the rank channel: JSON lines to and from its agent (shapes in :mod:`planner.messages`).

Three channels share the :class:`Channel` protocol: :class:`SocketChannel` to an agent, :class:`StreamChannel` for a
bare run, where lines go to standard output, and :class:`ListChannel`, which keeps everything in memory for tests.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple, Protocol

from pydantic import BaseModel, ValidationError

from planner.clock import Clock, SystemClock
from planner.errors import ExitCode, one_line
from planner.leases import DEFAULT_TTL
from planner.messages import AGENT_TO_RANK, Acknowledged, LeaveCollective, Persisted, RankHello, Reform, StopAtBoundary
from pretrain import unix_socket

AgentMessage = StopAtBoundary | Reform | LeaveCollective | Persisted
Handler = Callable[[AgentMessage], None]

RECONNECT_SECONDS = DEFAULT_TTL
"""How long an agent may be away (it restarts) before its ranks end themselves: then the lease of their slots has
expired too, since nobody renewed it."""
_RETRY_SECONDS = 0.2
_SEND_SECONDS = 5.0
_ACKNOWLEDGE_SECONDS = 0.01
_CHUNK = 1 << 16
_LONGEST_LINE = 4 << 20
MOST_UNHEARD = 1000
"""So many messages go with a saved state at most."""


class Channel(Protocol):
    """How a rank talks to its agent."""

    def send(self, message: BaseModel) -> None:
        """Hand ``message`` to the kernel before returning; keep it for later while the agent is away."""

    def listen(self, handler: Handler) -> None:
        """Call ``handler`` with every message of the agent, from another thread, those already here first."""

    def unheard(self) -> list[BaseModel]:
        """What was sent and the agent has not confirmed, oldest first; the newest :data:`MOST_UNHEARD`."""

    def rename(self, incarnation: int, rank: int) -> None:
        """The rank re-formed: if it has to say hello again, then under its new name."""

    def close(self) -> None:
        """Send what is kept, if that is possible at once, and stop."""


class ListChannel:
    """Keeps what was sent; :meth:`tell` speaks as the agent."""

    def __init__(self) -> None:
        self.sent: list[BaseModel] = []
        self.closed = False
        self._handler: Handler | None = None
        self._early: list[AgentMessage] = []

    def send(self, message: BaseModel) -> None:
        """Append to :attr:`sent`."""
        self.sent.append(message)

    def listen(self, handler: Handler) -> None:
        """Deliver from now on, and what came before."""
        self._handler = handler
        for message in self._early:
            handler(message)
        self._early.clear()

    def tell(self, message: AgentMessage) -> None:
        """Deliver ``message`` as if the agent had sent it."""
        if self._handler is None:
            self._early.append(message)
        else:
            self._handler(message)

    def unheard(self) -> list[BaseModel]:
        """Nobody confirms anything, and nobody is missed."""
        return []

    def rename(self, incarnation: int, rank: int) -> None:
        """Nobody asks for a name."""

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


class StreamChannel:
    """JSON lines to a stream, for a rank without an agent; nobody answers."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stdout
        self._lock = threading.Lock()

    def send(self, message: BaseModel) -> None:
        """Write one line and flush it; a reader that is gone is no reason to stop training."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._stream.write(message.model_dump_json() + "\n")
            self._stream.flush()

    def listen(self, handler: Handler) -> None:
        """Nothing ever comes."""

    def unheard(self) -> list[BaseModel]:
        """Nobody confirms anything, and nobody is missed."""
        return []

    def rename(self, incarnation: int, rank: int) -> None:
        """Nobody asks for a name."""

    def close(self) -> None:
        """Nothing to close."""


def _end_process() -> None:
    """A rank whose agent is gone for good must not train on: nobody could stop it, and its slot may be granted anew."""
    os._exit(ExitCode.MISSING_SERVICE)


class _Sent(NamedTuple):
    """A message on its way; ``seq`` 0: nobody numbers, so nobody confirms."""

    seq: int
    line: bytes
    message: BaseModel


class SocketChannel:
    """A Unix socket to the agent, with a thread that reads, reconnects and, after too long, ends the rank.

    The first line of every connection is ``hello``. While the agent is away, messages are kept and sent in order
    once it is back; one that was under way when it died is sent again whole. An agent that acknowledges
    (:class:`planner.messages.Acknowledged`) gets again what its former life took and had not passed on.
    """

    def __init__(
        self,
        path: Path,
        hello: RankHello,
        *,
        limit_seconds: float = RECONNECT_SECONDS,
        on_lost: Callable[[], None] = _end_process,
        clock: Clock | None = None,
    ) -> None:
        """Connect to ``path`` as ``hello``; the agent may come up to ``limit_seconds`` late, also at the start."""
        self._path = path
        self._hello = hello
        self._limit = limit_seconds
        self._on_lost = on_lost
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._kept: deque[_Sent] = deque()
        self._unacknowledged: deque[_Sent] = deque()
        self._seq: int | None = None
        self._socket: socket.socket | None = None
        self._handler: Handler | None = None
        self._early: list[AgentMessage] = []
        self._closing = threading.Event()
        self._away_since = self._clock.monotonic()
        self._connect()
        self._thread = threading.Thread(target=self._read_for_ever, name="rank-channel", daemon=True)
        self._thread.start()

    def send(self, message: BaseModel) -> None:
        """Queue and send; returns once the kernel has it, or at once while the agent is away."""
        with self._lock:
            line = message.model_dump_json().encode() + b"\n"
            if self._seq is not None:
                self._seq += 1
                line = b'{"seq":%d,' % self._seq + line[1:]
            self._kept.append(_Sent(self._seq or 0, line, message))
            self._flush()

    def listen(self, handler: Handler) -> None:
        """Deliver the agent's messages to ``handler`` in the reader's thread; earlier ones at once, in this thread."""
        with self._lock:
            early, self._early = self._early, []
            self._handler = handler
        for message in early:
            handler(message)

    def unheard(self) -> list[BaseModel]:
        """What the agent has not confirmed, sent to it or not."""
        with self._lock:
            sent = [*self._unacknowledged, *self._kept]
        return [one.message for one in sent[-MOST_UNHEARD:]]

    def rename(self, incarnation: int, rank: int) -> None:
        """Say hello under this name from the next connection on; the agent knows it for this one."""
        with self._lock:
            self._hello = self._hello.model_copy(update={"incarnation": incarnation, "rank": rank})

    def close(self) -> None:
        """Wait briefly for kept messages to go, then close."""
        deadline = self._clock.monotonic() + _SEND_SECONDS
        while (self._kept or self._unacknowledged) and self._clock.monotonic() < deadline:
            with self._lock:
                if self._socket is None and not self._connect():
                    break
                self._flush()
            if self._unacknowledged:
                self._closing.wait(_ACKNOWLEDGE_SECONDS)
        self._closing.set()
        self._drop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * _RETRY_SECONDS)

    # ------------------------------------------------------------ sending

    def _connect(self) -> bool:
        """Try once; on success say hello and send what was kept."""
        with self._lock:
            if self._socket is not None:
                return True
            try:
                connection = unix_socket.connect(self._path, _SEND_SECONDS)
            except OSError:
                return False
            connection.settimeout(_SEND_SECONDS)
            try:
                connection.sendall(self._hello.model_dump_json().encode() + b"\n")
            except OSError:
                connection.close()
                return False
            self._socket = connection
            self._flush()
            return self._socket is not None

    def _flush(self) -> None:
        while self._kept and self._socket is not None:
            try:
                self._socket.sendall(self._kept[0].line)
            except OSError:  # the agent died, or has not read for too long: the whole line goes to its successor
                self._drop()
                return
            sent = self._kept.popleft()
            if sent.seq:
                self._unacknowledged.append(sent)

    def _drop(self) -> None:
        with self._lock:
            connection, self._socket = self._socket, None
            if connection is not None:
                self._kept.extendleft(reversed(self._unacknowledged))
                self._unacknowledged.clear()
                self._away_since = self._clock.monotonic()
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    # ------------------------------------------------------------ receiving

    def _read_for_ever(self) -> None:
        while not self._closing.is_set():
            connection = self._socket
            if connection is not None:
                self._read(connection)
            elif not self._connect():
                if self._clock.monotonic() - self._away_since > self._limit:
                    self._on_lost()
                    return
                self._closing.wait(_RETRY_SECONDS)

    def _read(self, connection: socket.socket) -> None:
        """Deliver lines of one connection until it ends."""
        pending = b""
        while not self._closing.is_set() and connection is self._socket:
            try:
                if not select.select([connection], [], [], _RETRY_SECONDS)[0]:
                    continue
                chunk = connection.recv(_CHUNK)
            except (OSError, ValueError):  # closed by another thread between the look and the call
                break
            if not chunk or len(pending) > _LONGEST_LINE:
                break
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._deliver(line)
        if connection is self._socket and not self._closing.is_set():
            self._drop()

    def _deliver(self, line: bytes) -> None:
        """Hand over one message; what is none is logged and kept out, and the rank stays up."""
        if not line.strip():
            return
        try:
            message: AgentMessage | Acknowledged = AGENT_TO_RANK.validate_json(line)
        except ValidationError as error:
            print(f"refused a message of the agent: {one_line(error)[:300]}", file=sys.stderr, flush=True)
            return
        if isinstance(message, Acknowledged):
            self._acknowledged(message.seq)
            return
        with self._lock:
            handler = self._handler
            if handler is None:
                self._early.append(message)
        if handler is not None:
            handler(message)

    def _acknowledged(self, seq: int) -> None:
        """The agent numbers (0), or has passed on everything up to ``seq``."""
        with self._lock:
            self._seq = self._seq or 0
            while self._unacknowledged and self._unacknowledged[0].seq <= seq:
                self._unacknowledged.popleft()
