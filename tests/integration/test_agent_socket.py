"""The agent's socket: who may speak, what is refused, what is not lost."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.auth import job_token, new_secret
from planner.messages import RankHello, RankPhase, StopAtBoundary
from pretrain import unix_socket
from pretrain.agent_socket import MAX_LINE, RankChannel
from pretrain.channel import SocketChannel
from tests.support.redis import await_that

SECRET = new_secret()


class Side:
    """The agent's side, served by a thread."""

    def __init__(self, path: Path) -> None:
        self.said: list[tuple[tuple[str, int, int], Any, int]] = []
        self.refusals: list[str] = []
        self.selector = selectors.DefaultSelector()
        self.channel = RankChannel(path, self.selector, SECRET, self._expected, self._said, self.refusals.append)
        self._stop = threading.Event()
        self.acknowledge = True
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _expected(self, job: str, incarnation: int, rank: int, pid: int) -> bool:
        return (job, incarnation, rank, pid) == ("j", 1, 0, os.getpid())

    def _said(self, who: tuple[str, int, int], message: Any, pid: int, seq: int) -> None:
        self.said.append((who, message, seq))
        if seq and self.acknowledge:
            self.channel.acknowledge(pid, seq)

    def _serve(self) -> None:
        while not self._stop.is_set():
            for key, mask in self.selector.select(0.05):
                key.data(mask)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.channel.close()

    def steps(self) -> list[int]:
        return [message.step for _, message, _ in self.said if message.kind == "phase"]


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    made = Side(tmp_path / "agent.sock")
    yield made
    made.stop()


def hello(**changes: Any) -> RankHello:
    known = {"token": job_token(SECRET, "j"), "job": "j", "incarnation": 1, "rank": 0, "pid": os.getpid()}
    return RankHello(**{**known, **changes})


def line(message: Any) -> bytes:
    return bytes(message.model_dump_json().encode() + b"\n")


def closed(client: socket.socket) -> bool:
    client.settimeout(5.0)
    try:
        while data := client.recv(1 << 16):
            assert b"ack" in data
    except ConnectionResetError:
        pass
    return True


@pytest.mark.parametrize(
    "first",
    [
        hello(token="0" * 64),
        hello(token=job_token(SECRET, "other")),
        hello(job="other", token=job_token(SECRET, "other")),
        hello(incarnation=2),
        hello(rank=1),
        RankPhase(phase="step", step=1, time=0.0),
    ],
)
def test_a_stranger_is_sent_away(side: Side, first: Any) -> None:
    with unix_socket.connect(side.channel.path, 5.0) as client:
        client.sendall(line(first) + line(RankPhase(phase="x", step=9, time=0.0)))
        assert closed(client)
    assert len(side.refusals) == 1
    assert side.said == []


def test_the_last_words_of_a_rank_that_ended_before_it_was_accepted_are_heard(tmp_path: Path) -> None:
    """Its end is seen first where both happen between two looks."""
    heard: list[Any] = []
    selector = selectors.DefaultSelector()
    channel = RankChannel(
        tmp_path / "agent.sock", selector, SECRET, lambda *_: True, lambda *said: heard.append(said[1]), heard.append
    )
    with unix_socket.connect(channel.path, 5.0) as client:
        client.sendall(line(hello()))
        for step in range(100):
            client.sendall(line(RankPhase(phase="step", step=step, time=0.0)))
    channel.drain(os.getpid())
    channel.close()
    selector.close()
    assert [message.kind for message in heard[:1]] == ["hello"]
    assert [message.step for message in heard[1:]] == list(range(100))


def test_garbage_is_refused_and_the_connection_stays(side: Side) -> None:
    good = line(RankPhase(phase="step", step=3, time=0.0))
    with unix_socket.connect(side.channel.path, 5.0) as client:
        client.sendall(line(hello()))
        for bad in (b"not json", b"[1]", b'{"kind": "step"}', b'{"kind": "shell", "line": "rm"}', b"\xff\xfe", b""):
            client.sendall(bad + b"\n")
        client.sendall(good[:10])
        time.sleep(0.05)  # so that the two halves come in two reads
        client.sendall(good[10:])
        await_that(lambda: side.steps() == [3], 5)
    assert len(side.refusals) == 5


def _pour(client: socket.socket, count: int) -> None:
    for _ in range(count):
        client.sendall(b"x" * (1 << 16))


def test_a_line_without_end_is_cut_off(side: Side) -> None:
    with unix_socket.connect(side.channel.path, 5.0) as client:
        client.sendall(line(hello()))
        with pytest.raises(OSError, match=r"reset|pipe"):
            _pour(client, 2 * MAX_LINE // (1 << 16))
    assert side.refusals


def test_a_path_of_any_length_works_and_belongs_to_its_owner(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 90) / ("e" * 90) / "agent.sock"
    side = Side(deep)
    channel = SocketChannel(deep, hello())
    channel.send(RankPhase(phase="step", step=1, time=0.0))
    await_that(lambda: side.steps() == [1], 5)
    assert deep.stat().st_mode & 0o777 == 0o600
    heard: list[Any] = []
    channel.listen(heard.append)
    assert side.channel.send(("j", 1, 0), StopAtBoundary(why="paused"))
    await_that(lambda: heard, 5)
    assert heard[0].why == "paused"
    channel.close()
    side.stop()
    assert not deep.exists()


def test_what_a_dead_agent_took_and_did_not_pass_on_comes_again_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    side = Side(path)
    channel = SocketChannel(path, hello())
    await_that(lambda: channel._seq is not None, 5, "the agent asked for numbers")
    channel.send(RankPhase(phase="step", step=1, time=0.0))
    await_that(lambda: side.steps() == [1] and not channel._unacknowledged, 5)
    side.acknowledge = False
    for step in (2, 3):
        channel.send(RankPhase(phase="step", step=step, time=0.0))
    await_that(lambda: side.steps() == [1, 2, 3], 5)
    side.stop()
    channel.send(RankPhase(phase="step", step=4, time=0.0))
    assert [one.step for one in channel.unheard() if isinstance(one, RankPhase)] == [2, 3, 4]
    successor = Side(path)
    await_that(lambda: successor.steps() == [2, 3, 4], 10)
    assert [seq for _, message, seq in successor.said if message.kind == "phase"] == [2, 3, 4]
    await_that(lambda: not channel.unheard(), 5)
    channel.close()
    successor.stop()
