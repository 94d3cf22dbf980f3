"""The peer tier: snapshots copied to other nodes' memory, and fetched back by a node that lost its own.

One TCP connection per transfer. The server sends a nonce; the client answers with a request sealed with the job's
token (:mod:`planner.auth`), so that nobody without the token can store or read state, and an overheard request is
worth nothing later. The description in the sealed request carries the hash of the bytes that follow; what arrives is
hashed on the way in and committed only when it agrees. A node keeps at most its memory bound for others and says
``busy`` beyond it: the sender tries the next snapshot later (back-pressure), training never waits.
"""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import os
import secrets
import shutil
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from planner.auth import ForgedMessageError, seal, unseal
from planner.clock import Clock, SystemClock
from planner.errors import MissingServiceError, PlanariaError, one_line
from pretrain import snapshot
from pretrain.snapshot import Buffer, Description, Mapping, Shard, SnapshotError

FLAGS = "traffic"
"""Name of the traffic flags' file in a job's folder."""
HERE = ("", 0)
"""For a keeper's address: this node."""
OWN = ""
"""For a node's name: the serving node's own snapshots."""
_CHUNK = 1 << 20
_LONGEST_LINE = 64 << 20
_SECONDS = 30.0


class PeerBusyError(SnapshotError):
    """The peer has no memory left for another node's snapshot just now."""


def peer_dir(memory_dir: Path, job: str, node: str) -> Path:
    """Where a node keeps the copies of ``node``'s snapshots of a job."""
    return snapshot.job_dir(memory_dir, job) / f"peer-{node}"


class TrafficFlags:
    """A byte per rank in shared memory: set while the rank's collectives want the network."""

    def __init__(self, path: Path, ranks: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < ranks:
                os.ftruncate(fd, ranks)
            os.pwrite(fd, bytes(ranks), 0)  # whoever set a flag and died will not take it back
            self._map = mmap.mmap(fd, ranks)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def busy(self, rank: int) -> Iterator[None]:
        """Training traffic of ``rank`` runs inside."""
        self._map[rank] = 1
        try:
            yield
        finally:
            self._map[rank] = 0

    def any(self) -> bool:
        """Whether training traffic runs now."""
        return any(self._map[:])


# ---------------------------------------------------------------- lines and bytes


def _send_line(connection: socket.socket, value: Any) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _read_line(stream: Any) -> Any:
    line = stream.readline(_LONGEST_LINE)
    if not line.endswith(b"\n"):
        raise SnapshotError("the connection ended in the middle of a message")
    return json.loads(line)


def _receive_into(stream: Any, view: memoryview) -> str:
    """Fill ``view`` from the stream; the xxh3-128 of what arrived.

    Raises:
        SnapshotError: the stream ended early.
    """
    digest, at = xxhash.xxh3_128(), 0
    while at < len(view):
        count = stream.readinto(view[at : at + _CHUNK])
        if not count:
            raise SnapshotError(f"the connection ended after {at} of {len(view)} bytes")
        digest.update(view[at : at + count])
        at += count
    return str(digest.hexdigest())


def _store(folder: Path, said: Description, stream: Any) -> None:
    """Receive one shard into the older buffer of its place and commit it if the hash agrees.

    Raises:
        SnapshotError: it does not, the stream ended, or both buffers are being read.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    buffers = [Buffer(folder, said.coordinate.name, index) for index in range(snapshot.BUFFERS)]
    held = [(one.describe(), one) for one in buffers]
    for _, buffer in sorted(held, key=lambda item: (item[0] is not None, item[0].step if item[0] else 0)):
        with buffer.lock(exclusive=True) as free:
            if not free:
                continue
            buffer.invalidate()
            mapping = Mapping(buffer.data_path, said.nbytes, writable=True)
            found = _receive_into(stream, mapping.view())
            if found != said.xxh3:
                raise SnapshotError(f"step {said.step} arrived with hash {found}, sent with {said.xxh3}")
            buffer.commit(said)
            return
    raise PeerBusyError("both buffers of this shard are being read")


# ---------------------------------------------------------------- the keeping side


class PeerServer:
    """Keeps other nodes' snapshots in this node's memory and hands them back.

    Args:
        memory_dir: the node's folder in host memory.
        memory_bytes: most that all copies together may take.
        token_of: a job's token, or None for a job that this node does not serve.
        host: address to listen on; the port is chosen by the system.
    """

    def __init__(
        self, memory_dir: Path, memory_bytes: int, token_of: Callable[[str], str | None], host: str = "127.0.0.1"
    ) -> None:
        self.memory_dir, self.memory_bytes, self._token_of = memory_dir, memory_bytes, token_of
        self._accounting = threading.Lock()
        self._promised = 0
        keeper = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = _SECONDS

            def handle(self) -> None:
                with contextlib.suppress(OSError, SnapshotError, ValueError):
                    keeper._serve(self.connection, self.rfile)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            allow_reuse_address = True

        self._server = Server((host, 0), Handler)
        self.address: tuple[str, int] = (host, int(self._server.server_address[1]))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def start(self) -> None:
        """Serve in a thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving; the copies stay."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def held_bytes(self) -> int:
        """Memory that copies of other nodes' snapshots take here."""
        root = snapshot.job_dir(self.memory_dir, "any").parent
        return sum(path.stat().st_size for path in root.glob("*/peer-*/*.bin"))

    def _serve(self, connection: socket.socket, stream: Any) -> None:
        nonce = secrets.token_hex(16)
        _send_line(connection, {"nonce": nonce})
        outer = _read_line(stream)
        token = self._token_of(str(outer.get("job")))
        try:
            request = unseal(token, str(outer.get("request"))) if token is not None else None
        except ForgedMessageError:
            request = None
        if request is None or request.get("nonce") != nonce or request.get("job") != outer.get("job"):
            _send_line(connection, {"ok": False, "reason": "not allowed"})
            return
        try:
            if request["kind"] == "push":
                self._keep(connection, stream, request)
            elif request["kind"] == "fetch":
                self._hand_back(connection, request)
            elif request["kind"] == "list":
                _send_line(connection, {"ok": True, "offers": self._offers(str(request["job"]))})
        except (SnapshotError, KeyError, OSError) as error:
            busy = isinstance(error, PeerBusyError)
            _send_line(connection, {"ok": False, "busy": busy, "reason": one_line(error)})

    def _keep(self, connection: socket.socket, stream: Any, request: dict[str, Any]) -> None:
        said = Description.from_json(request["description"])
        node = _plain_name(request["node"])
        with self._accounting:
            new = self._new_bytes(peer_dir(self.memory_dir, said.job, node), said)
            if self.held_bytes() + self._promised + new > self.memory_bytes:
                raise PeerBusyError(f"{self.memory_bytes / 1e6:.0f} MB for peers are used up")
            self._promised += new
        try:
            _send_line(connection, {"ok": True})
            _store(peer_dir(self.memory_dir, said.job, node), said, stream)
        finally:
            with self._accounting:
                self._promised -= new
        _send_line(connection, {"ok": True, "xxh3": said.xxh3})

    @staticmethod
    def _new_bytes(folder: Path, said: Description) -> int:
        """Memory that keeping ``said`` adds: none where its buffers are there already."""
        here = [path for path in folder.glob(f"{said.coordinate.name}.*.bin") if path.stat().st_size == said.nbytes]
        return 0 if len(here) >= snapshot.BUFFERS else said.nbytes

    def _offers(self, job: str) -> list[dict[str, Any]]:
        """What is here of a job: this node's own snapshots and the copies of others'."""
        own = snapshot.job_dir(self.memory_dir, job)
        folders = [(OWN, own), *((path.name.removeprefix("peer-"), path) for path in own.glob("peer-*"))]
        return [
            {"node": node, "step": found.step, "incarnation": found.incarnation}
            for node, folder in folders
            for found in snapshot.find(folder)
        ]

    def _hand_back(self, connection: socket.socket, request: dict[str, Any]) -> None:
        job = str(request["job"])
        own = request["node"] == OWN
        folder = (
            snapshot.job_dir(self.memory_dir, job) if own
            else peer_dir(self.memory_dir, job, _plain_name(request["node"]))
        )  # fmt: skip
        shards = [shard for found in snapshot.find(folder) for shard in found.shards]
        if request.get("step") is not None:
            shards = [shard for shard in shards if shard.description.step == request["step"]]
        _send_line(connection, {"ok": True, "shards": len(shards)})
        for shard in shards:
            with snapshot.opened(shard) as mapping:
                _send_line(connection, shard.description.to_json())
                connection.sendall(mapping.view())


def _plain_name(value: Any) -> str:
    name = str(value)
    if not name or name.startswith(".") or not all(char.isalnum() or char in "-_." for char in name):
        raise SnapshotError(f"{name!r} is no node name")
    return name


# ---------------------------------------------------------------- the sending side


@contextlib.contextmanager
def _connected(address: tuple[str, int], job: str, token: str, request: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """An authenticated connection on which ``request`` has been made."""
    try:
        connection = socket.create_connection(address, timeout=_SECONDS)
    except OSError as error:
        raise MissingServiceError(f"peer {address[0]}:{address[1]}: {error}") from error
    with connection, connection.makefile("rb") as stream:
        nonce = _read_line(stream)["nonce"]
        _send_line(connection, {"job": job, "request": seal(token, request | {"nonce": nonce, "job": job})})
        yield connection, stream


def _accepted(answer: Any) -> Any:
    if not answer.get("ok"):
        kind = PeerBusyError if answer.get("busy") else SnapshotError
        raise kind(f"the peer refused: {answer.get('reason')}")
    return answer


def push(
    shard: Shard,
    address: tuple[str, int],
    *,
    node: str,
    token: str,
    flags: TrafficFlags | None = None,
    longest_pause: float = 1.0,
    clock: Clock | None = None,
) -> float:
    """Send one committed shard to a peer, in the gaps of training traffic; returns the seconds it took.

    Args:
        shard: what to send; held against being overwritten meanwhile.
        address: the peer's server.
        node: this node's name, under which the peer keeps it.
        token: the job's token.
        flags: while one is set, the next piece waits.
        longest_pause: seconds after which a piece goes out although training traffic runs, so that a job that
            always communicates still gets its copies.
        clock: time.

    Raises:
        PeerBusyError: the peer's memory is used up; later.
        SnapshotError: refused, damaged on the way, or overwritten before it was sent.
        MissingServiceError: the peer is not there.
    """
    clock = clock or SystemClock()
    began = clock.monotonic()
    said = shard.description
    request = {"kind": "push", "node": node, "description": said.to_json()}
    with (
        snapshot.opened(shard) as mapping,
        _connected(address, said.job, token, request) as (connection, stream),
    ):
        _accepted(_read_line(stream))
        view = mapping.view()
        for start in range(0, len(view), _CHUNK):
            _wait_for_gap(flags, longest_pause, clock)
            connection.sendall(view[start : start + _CHUNK])
        _accepted(_read_line(stream))
    return clock.monotonic() - began


def _wait_for_gap(flags: TrafficFlags | None, longest_pause: float, clock: Clock) -> None:
    if flags is None:
        return
    end = clock.monotonic() + longest_pause
    while flags.any() and clock.monotonic() < end:
        clock.sleep(0.0005)


def fetch(
    memory_dir: Path, address: tuple[str, int], *, job: str, node: str, token: str, step: int | None = None
) -> list[int]:
    """Bring the copies of ``node``'s snapshots from a peer into this node's memory; the steps that arrived whole.

    They stand where the node's own would, so that recovery finds them; each is compared with its hash on arrival
    and again before use.

    Raises:
        SnapshotError: refused, or damaged on the way.
        MissingServiceError: the peer is not there.
    """
    request = {"kind": "fetch", "node": node, "step": step}
    arrived = []
    with _connected(address, job, token, request) as (_, stream):
        count = int(_accepted(_read_line(stream))["shards"])
        for _ in range(count):
            said = Description.from_json(_read_line(stream))
            if said.job != job:
                raise SnapshotError(f"the peer sent a snapshot of job {said.job}")
            _store(snapshot.job_dir(memory_dir, job), said, stream)
            arrived.append(said.step)
    return arrived


@dataclass(frozen=True, order=True)
class Offer:
    """A snapshot that some keeper holds. The greatest is the newest."""

    step: int
    incarnation: int
    node: str
    """Whose it is; :data:`OWN` for the keeper's own."""
    address: tuple[str, int]


def offers(address: tuple[str, int], *, job: str, token: str) -> list[Offer]:
    """What one keeper holds of a job.

    Raises:
        SnapshotError: refused.
        MissingServiceError: the peer is not there.
    """
    with _connected(address, job, token, {"kind": "list"}) as (_, stream):
        said = _accepted(_read_line(stream))["offers"]
    return [Offer(int(one["step"]), int(one["incarnation"]), str(one["node"]), address) for one in said]


@dataclass(frozen=True)
class Brought:
    """What came from other nodes' memory. ``step`` is None where nothing did."""

    step: int | None
    sources: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()


def bring_newest(memory_dir: Path, addresses: Sequence[str], *, job: str, token: str, newer_than: int) -> Brought:
    """Bring the newest snapshot of a job that other nodes hold into this node's memory, from all that hold a part.

    Args:
        memory_dir: this node's.
        addresses: ``host:port`` of the keepers.
        job: the job.
        token: its token.
        newer_than: step of the newest state that can be had nearer; only what is newer is brought.

    A keeper that is gone or sends damaged bytes is passed over; the next newest step is tried where none is whole.
    """
    found = _kept_here(memory_dir, job)
    trouble: list[str] = []
    for where in addresses:
        host, _, port = where.rpartition(":")
        try:
            found += offers((host, int(port)), job=job, token=token)
        except (PlanariaError, OSError, ValueError) as error:
            trouble.append(f"{where}: {one_line(error)}")
    for step, incarnation in sorted({(one.step, one.incarnation) for one in found}, reverse=True):
        if step <= newer_than:
            break
        sources: list[str] = []
        for offer in [one for one in found if (one.step, one.incarnation) == (step, incarnation)]:
            try:
                if offer.address == HERE:
                    got = _take_kept(memory_dir, job, offer)
                else:
                    got = fetch(memory_dir, offer.address, job=job, node=offer.node, token=token, step=step)
            except (PlanariaError, OSError, ValueError) as error:
                trouble.append(f"{_name(offer)}, step {step}: {one_line(error)}")
            else:
                sources += [_name(offer)] if got else []
        if sources:
            return Brought(step, tuple(dict.fromkeys(sources)), tuple(trouble))
    return Brought(None, (), tuple(trouble))


def _name(offer: Offer) -> str:
    return f"this node (copy of {offer.node})" if offer.address == HERE else f"{offer.address[0]}:{offer.address[1]}"


def _kept_here(memory_dir: Path, job: str) -> list[Offer]:
    """What this node keeps for others: they may be gone, and their ranks now be here."""
    return [
        Offer(found.step, found.incarnation, folder.name.removeprefix("peer-"), HERE)
        for folder in snapshot.job_dir(memory_dir, job).glob("peer-*")
        for found in snapshot.find(folder)
    ]


def _take_kept(memory_dir: Path, job: str, offer: Offer) -> list[int]:
    """Copy what is kept here for ``offer.node`` to where this node's own snapshots stand."""
    taken = []
    for found in snapshot.find(peer_dir(memory_dir, job, offer.node)):
        for shard in found.shards:
            if (found.step, found.incarnation) == (offer.step, offer.incarnation):
                with snapshot.opened(shard) as mapping:
                    _store(snapshot.job_dir(memory_dir, job), shard.description, io.BytesIO(mapping.view()))
                taken.append(found.step)
    return taken


def drop(memory_dir: Path, job: str) -> None:
    """Give back the memory of all copies kept for a job."""
    for folder in snapshot.job_dir(memory_dir, job).glob("peer-*"):
        shutil.rmtree(folder, ignore_errors=True)
