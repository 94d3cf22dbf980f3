"""Nodes that stage one model at once: real processes, real HTTP, one read of storage; a loader that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pytest

from evalsched.digests import model_digest
from evalsched.peer_staging import PeerStaging, _open, token_of
from evalsched.staging import stage
from planner.errors import BadInputError
from planner.store import ClusterStore
from tests.support.redis import await_that

_NODE = """
import sys, time
from pathlib import Path
from evalsched.peer_staging import PeerStaging
from evalsched.staging import stage
from planner.store import ClusterStore
url, secret, name, source, digest, root, rate = sys.argv[1:]
store = ClusterStore(url, secret)
peers = PeerStaging(store, name, root=Path(root), bytes_per_second=float(rate) or None)
stage(Path(source), digest, root=Path(root), budget=1 << 30, copy=peers.copy)
peers.announce(digest)
print("staged", flush=True)
time.sleep(300)
"""


def model(folder: Path, megabytes: int = 8) -> tuple[Path, str]:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "extra").mkdir()
    (folder / "extra" / "a file.txt").write_text("x")
    (folder / "model.safetensors").write_bytes(os.urandom(megabytes << 20))
    return folder, model_digest(folder)


class Node:
    def __init__(
        self, store: ClusterStore, folder: Path, name: str, source: Path, digest: str, rate: float = 0
    ) -> None:
        self.root, self.digest = folder / name, digest
        arguments = [store.url, str(store.secret), name, str(source), digest, str(self.root), str(rate)]
        self.process = subprocess.Popen([sys.executable, "-c", _NODE, *arguments], stdout=subprocess.DEVNULL)

    def staged(self) -> bool:
        return (self.root / self.digest / "model.safetensors").is_file()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def reads(store: ClusterStore, digest: str) -> int:
    return int(store.link.call(lambda client: client.hget("planaria:staging_reads", digest)) or 0)


def test_many_nodes_cost_storage_one_read_and_a_killed_loader_two(store: ClusterStore, tmp_path: Path) -> None:
    source, digest = model(tmp_path / "model")
    other, second = model(tmp_path / "other")
    nodes: list[Node] = []
    try:
        nodes += [Node(store, tmp_path, f"n{number}", source, digest) for number in range(5)]
        await_that(lambda: all(node.staged() for node in nodes), 60)
        assert reads(store, digest) == 1
        for node in nodes:
            assert model_digest(node.root / digest) == digest
            node.kill()
        slow = Node(store, tmp_path, "slow", other, second, rate=1 << 20)
        nodes.append(slow)
        await_that(lambda: reads(store, second) == 1, 30)
        quick = Node(store, tmp_path, "quick", other, second)
        nodes.append(quick)
        time.sleep(1.0)
        assert not quick.staged(), "it waits for the one that reads"
        slow.kill()
        await_that(quick.staged, 30)
        assert reads(store, second) == 2
    finally:
        for node in nodes:
            node.kill()


def test_what_a_peer_gives_is_verified_and_goes_on_after_a_break(store: ClusterStore, tmp_path: Path) -> None:
    source, digest = model(tmp_path / "model", megabytes=1)
    holder = PeerStaging(store, "holder", root=tmp_path / "h")
    taker = PeerStaging(store, "taker", root=tmp_path / "t")
    try:
        stage(source, digest, root=tmp_path / "h", budget=1 << 30, copy=holder.copy)
        holder.announce(digest)
        part = tmp_path / "t" / f".{digest}.part"
        part.mkdir(parents=True)
        whole = (source / "model.safetensors").read_bytes()
        (part / "model.safetensors").write_bytes(whole[:1000])
        (part / "config.json").write_text("{}")
        elsewhere = tmp_path / "nowhere"
        elsewhere.mkdir()
        got = stage(elsewhere, digest, root=tmp_path / "t", budget=1 << 30, copy=taker.copy)
        assert (got.folder / "model.safetensors").read_bytes() == whole
        (tmp_path / "h" / digest / "model.safetensors").write_bytes(whole[:-1] + b"?")
        taker.withdraw()
        with pytest.raises(BadInputError, match="was asked for"):
            stage(elsewhere, digest, root=tmp_path / "u", budget=1 << 30, copy=taker.copy)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            _open(f"{holder.url}/{digest}/", "wrong")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            _open(f"{holder.url}/{digest}/..%2F..%2Fmodel%2Fconfig.json", token_of(str(store.secret), digest))
    finally:
        holder.close()
        taker.close()


def test_an_agents_command_gets_a_model_from_a_peer_and_drops_it(store: ClusterStore, tmp_path: Path) -> None:
    """What an agent runs for ``stage`` and ``unstage``: the source itself is not reachable from this node."""
    source, digest = model(tmp_path / "model", megabytes=1)
    (tmp_path / "secret").write_text(str(store.secret))
    own = {"PLANARIA_URL": store.url, "PLANARIA_SECRET_FILE": str(tmp_path / "secret"), "PLANARIA_NODE": "n2",
           "PLANARIA_SHM": str(tmp_path / "n2")}  # fmt: skip
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "evalsched.staging", *arguments]
        return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)

    holder = PeerStaging(store, "holder", root=tmp_path / "h")
    try:
        stage(source, digest, root=tmp_path / "h", budget=1 << 30, copy=holder.copy)
        holder.announce(digest)
        done = run(str(nowhere), digest)
        assert done.returncode == 0, done.stderr
        staged = Path(done.stdout.strip())
        assert staged == tmp_path / "n2" / "models" / digest
        assert model_digest(staged) == digest
        assert run("--drop", digest).returncode == 0
        assert not staged.exists()
        assert run("one").returncode == 2
    finally:
        holder.close()
