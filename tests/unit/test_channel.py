"""The rank's side of the rank channel, against a real Unix socket."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.messages import LeaveCollective, RankHello, RankPhase, StopAtBoundary
from pretrain import unix_socket
from pretrain.channel import ListChannel, SocketChannel, StreamChannel

HELLO = RankHello(token="secret", job="j", incarnation=3, rank=1, pid=42)
STOP = StopAtBoundary(why="paused")
LEAVE = LeaveCollective(incarnation=3, reason="rank 0 died")


def phase(step: int) -> RankPhase:
    return RankPhase(phase="step", step=step, time=0.0)


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The condition's value once it is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)
    return value


class Agent:
    """The other side: accepts, and keeps the lines of every connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[list[dict[str, Any]]] = []
        self.connections: list[socket.socket] = []
        self._server = unix_socket.listen(path)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                self.connections.append(connection)
                lines: list[dict[str, Any]] = []
                self.lines.append(lines)
                threading.Thread(target=self._read, args=(connection, lines), daemon=True).start()

    @staticmethod
    def _read(connection: socket.socket, lines: list[dict[str, Any]]) -> None:
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as stream:
            for line in stream:
                lines.append(json.loads(line))

    def say(self, raw: bytes) -> None:
        until(lambda: self.connections)
        self.connections[-1].sendall(raw)

    def die(self) -> None:
        """Go away, socket file and all, as a killed agent whose folder is cleaned."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(timeout=5)
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / ("deep" * 30) / "agent.sock"


def steps(lines: list[dict[str, Any]]) -> list[int]:
    return [line["step"] for line in lines if line["kind"] == "phase"]


def test_hello_is_the_first_line_and_messages_follow_in_order(place: Path) -> None:
    agent = Agent(place)
    channel = SocketChannel(place, HELLO)
    for step in range(20):
        channel.send(phase(step))
    until(lambda: agent.lines and len(agent.lines[0]) == 21)
    assert agent.lines[0][0] == HELLO.model_dump()
    assert steps(agent.lines[0]) == list(range(20))
    channel.close()
    agent.die()


def test_messages_while_the_agent_is_away_arrive_once_in_order_after_a_new_hello(place: Path) -> None:
    agent = Agent(place)
    channel = SocketChannel(place, HELLO)
    channel.send(phase(0))
    until(lambda: agent.lines and steps(agent.lines[0]) == [0])
    agent.die()
    until(lambda: channel._socket is None)
    for step in range(1, 6):
        channel.send(phase(step))
    successor = Agent(place)
    until(lambda: successor.lines and len(successor.lines[0]) >= 6)
    channel.send(phase(6))
    until(lambda: len(successor.lines[0]) == 7)
    assert successor.lines[0][0]["kind"] == "hello"
    assert steps(successor.lines[0]) == [1, 2, 3, 4, 5, 6]
    channel.close()
    successor.die()


def test_the_agent_may_come_after_the_rank(place: Path) -> None:
    place.parent.mkdir(parents=True)
    channel = SocketChannel(place, HELLO)
    channel.send(phase(1))
    agent = Agent(place)
    until(lambda: agent.lines and steps(agent.lines[0]) == [1])
    channel.close()
    agent.die()


def test_a_rank_whose_agent_stays_away_ends_itself(place: Path) -> None:
    lost = threading.Event()
    agent = Agent(place)
    channel = SocketChannel(place, HELLO, limit_seconds=0.3, on_lost=lost.set)
    until(lambda: agent.lines)
    assert not lost.wait(0.5), "a present agent is not lost"
    agent.die()
    assert lost.wait(10.0)
    channel.close()


def test_messages_of_the_agent_reach_the_handler_those_before_it_too(place: Path) -> None:
    agent = Agent(place)
    channel = SocketChannel(place, HELLO)
    raw = STOP.model_dump_json().encode() + b"\n"
    agent.say(raw[:7])
    agent.say(raw[7:])
    until(lambda: channel._early)
    got: list[Any] = []
    channel.listen(got.append)
    assert got == [STOP]
    agent.say(LEAVE.model_dump_json().encode() + b"\n")
    until(lambda: len(got) == 2)
    assert got == [STOP, LEAVE]
    channel.close()
    agent.die()


@pytest.mark.parametrize("garbage", [b"no json\n", b"{}\n", b'{"kind": "unknown"}\n', b"\xff\xfe\n", b"\n", b"[1]\n"])
def test_garbage_is_refused_and_the_rank_stays_up(place: Path, garbage: bytes) -> None:
    agent = Agent(place)
    channel = SocketChannel(place, HELLO)
    got: list[Any] = []
    channel.listen(got.append)
    agent.say(garbage + STOP.model_dump_json().encode() + b"\n")
    until(lambda: got == [STOP])
    channel.send(phase(1))
    until(lambda: agent.lines and steps(agent.lines[0]) == [1])
    channel.close()
    agent.die()


def test_an_agent_that_does_not_read_blocks_training_only_briefly(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.channel._SEND_SECONDS", 0.2)
    server = unix_socket.listen(place)
    channel = SocketChannel(place, HELLO, limit_seconds=1000.0)
    big = RankPhase(phase="x" * 2_000_000, step=1, time=0.0)
    started = time.monotonic()
    channel.send(big)
    assert time.monotonic() - started < 5.0
    server.close()
    place.unlink()
    agent = Agent(place)
    until(lambda: agent.lines and steps(agent.lines[0]) == [1])
    channel.close()
    agent.die()


def test_stream_channel_writes_one_json_line_per_message() -> None:
    stream = io.StringIO()
    channel = StreamChannel(stream)
    channel.send(HELLO)
    channel.send(phase(4))
    assert [json.loads(line)["kind"] for line in stream.getvalue().splitlines()] == ["hello", "phase"]


def test_list_channel_delivers_early_and_late_messages() -> None:
    channel = ListChannel()
    channel.tell(STOP)
    got: list[Any] = []
    channel.listen(got.append)
    channel.tell(LEAVE)
    channel.send(phase(1))
    channel.close()
    assert got == [STOP, LEAVE]
    assert channel.sent == [phase(1)]
    assert channel.closed
