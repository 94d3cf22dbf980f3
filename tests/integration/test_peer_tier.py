"""Snapshots on another node: authenticated, bounded, hashed on arrival, found again by the node that lost its own."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planner.auth import job_token, new_secret, seal
from planner.errors import MissingServiceError
from pretrain import peer, snapshot
from pretrain.snapshot import SnapshotError
from tests.support import snapshots

SECRET = new_secret()
TOKEN = job_token(SECRET, "job")
ROWS = 200_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[peer.PeerServer]:
    keeper = peer.PeerServer(tmp_path / "peer", 200 << 20, lambda job: job_token(SECRET, job))
    keeper.start()
    yield keeper
    keeper.close()


def _shard(memory: Path, step: int = 1, rows: int = ROWS) -> snapshot.Shard:
    snapshots.take(memory, step, rows=rows).close()
    return next(one for one in snapshot.find(snapshot.job_dir(memory, "job")) if one.step == step).shards[0]


def test_a_lost_snapshot_comes_back_from_the_peer(server: peer.PeerServer, tmp_path: Path) -> None:
    memory = tmp_path / "own"
    shard = _shard(memory)
    peer.push(shard, server.address, node="n1", token=TOKEN)
    shutil.rmtree(memory)
    assert peer.fetch(memory, server.address, job="job", node="n1", token=TOKEN) == [1]
    (found,) = snapshot.find(snapshot.job_dir(memory, "job"))
    assert found.complete
    assert found.shards[0].description == shard.description
    with snapshot.opened(found.shards[0]) as mapping:
        snapshot.verify(found.shards[0], mapping)
        weight = mapping.tensor(found.shards[0].description.tensors[0]).clone()
    assert weight.equal(snapshots.tensors(1, ROWS)["weight"])


def test_the_memory_bound_holds_and_says_busy(tmp_path: Path) -> None:
    keeper = peer.PeerServer(tmp_path / "peer", 9_000_000, lambda job: TOKEN)
    keeper.start()
    try:
        for step in (1, 2):
            peer.push(_shard(tmp_path / "own", step), keeper.address, node="n1", token=TOKEN)
        peer.push(_shard(tmp_path / "own", 3), keeper.address, node="n1", token=TOKEN)  # takes the oldest's place
        with pytest.raises(peer.PeerBusyError, match="used up"):
            peer.push(_shard(tmp_path / "other", 1), keeper.address, node="n2", token=TOKEN)
        assert keeper.held_bytes() <= 9_000_000
        kept = snapshot.find(peer.peer_dir(tmp_path / "peer", "job", "n1"))
        assert [one.step for one in kept] == [3, 2]
    finally:
        keeper.close()


def _with_wrong_token(address: tuple[str, int], shard: snapshot.Shard) -> None:
    peer.push(shard, address, node="n1", token=job_token(new_secret(), "job"))


def _with_an_overheard_request(address: tuple[str, int], shard: snapshot.Shard) -> None:
    request = {"kind": "fetch", "node": "n1", "step": None, "nonce": "of another connection", "job": "job"}
    with socket.create_connection(address, timeout=5) as connection, connection.makefile("rb") as stream:
        stream.readline()
        connection.sendall(json.dumps({"job": "job", "request": seal(TOKEN, request)}).encode() + b"\n")
        answer = json.loads(stream.readline())
    raise SnapshotError(answer["reason"])


def _with_a_path_for_a_name(address: tuple[str, int], shard: snapshot.Shard) -> None:
    peer.push(shard, address, node="../../escape", token=TOKEN)


@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        (_with_wrong_token, "not allowed"),
        (_with_an_overheard_request, "not allowed"),
        (_with_a_path_for_a_name, "no node name"),
    ],
)
def test_strangers_are_refused(
    server: peer.PeerServer,
    tmp_path: Path,
    attack: Callable[[tuple[str, int], snapshot.Shard], None],
    answer: str,
) -> None:
    with pytest.raises(SnapshotError, match=answer):
        attack(server.address, _shard(tmp_path / "own", rows=8))
    assert server.held_bytes() == 0


def test_damage_before_or_on_the_way_is_never_committed(server: peer.PeerServer, tmp_path: Path) -> None:
    shard = _shard(tmp_path / "own")
    raw = bytearray(shard.buffer.data_path.read_bytes())
    raw[1000] ^= 1
    shard.buffer.data_path.write_bytes(raw)
    with pytest.raises(SnapshotError, match="arrived with hash"):
        peer.push(shard, server.address, node="n1", token=TOKEN)
    assert snapshot.find(peer.peer_dir(tmp_path / "peer", "job", "n1")) == []


def test_a_sender_that_dies_leaves_the_older_copy(server: peer.PeerServer, tmp_path: Path) -> None:
    peer.push(_shard(tmp_path / "own", 1), server.address, node="n1", token=TOKEN)
    said = _shard(tmp_path / "own", 2).description
    request = {"kind": "push", "node": "n1", "description": said.to_json()}
    with peer._connected(server.address, "job", TOKEN, request) as (connection, stream):
        assert json.loads(stream.readline())["ok"]
        connection.sendall(b"x" * 100_000)
    kept = snapshot.find(peer.peer_dir(tmp_path / "peer", "job", "n1"))
    assert [one.step for one in kept] == [1]


def test_copies_go_out_in_the_gaps_of_training_traffic(server: peer.PeerServer, tmp_path: Path) -> None:
    flags = peer.TrafficFlags(tmp_path / "flags", 2)
    shard = _shard(tmp_path / "own")
    done = threading.Event()

    def send() -> None:
        peer.push(shard, server.address, node="n1", token=TOKEN, flags=flags, longest_pause=30)
        done.set()

    with flags.busy(1):
        sender = threading.Thread(target=send)
        sender.start()
        assert not done.wait(0.3), "nothing is sent while a collective runs"
    assert done.wait(20)
    sender.join()
    began = time.monotonic()
    with flags.busy(0):
        peer.push(shard, server.address, node="n1", token=TOKEN, flags=flags, longest_pause=0.02)
    assert time.monotonic() - began < 10, "a job that always communicates still gets its copies"


def test_a_peer_that_is_gone_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = taken.getsockname()
    with pytest.raises(MissingServiceError, match=str(address[1])):
        peer.fetch(tmp_path, address, job="job", node="n1", token=TOKEN)
