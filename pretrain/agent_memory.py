"""Snapshots in a node's memory, as its agent sees to them: who publishes them, who keeps copies, when they go.

Everything here follows from what is there, not from commands: a job with a folder in memory and its rank 0 (or a
snapshot that waits to be published) on this node gets a persister; a job that is over gives its memory back. So an
agent that was killed takes up where it was, and nothing stays behind for want of a message.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.errors import PlanariaError, one_line
from planner.files import write_json
from planner.loading import validate
from planner.messages import CheckpointSaid, Persisted, RankCheckpoint, RankSpec
from planner.peers import choose_peers
from planner.processes import SHM_VARIABLE
from planner.store import NodeFacts
from pretrain import peer, snapshot
from pretrain.agent_processes import ProcessTable, Watched
from pretrain.job_folder import published_at
from pretrain.persister import PersisterSpec
from pretrain.persister_keeper import PersisterKeeper

LEAVE_SECONDS = 60.0
"""Seconds that a persister gets to finish what is marked when its job is over."""
_SHARE_FOR_PEERS = 4
"""One part in so many of the memory may hold other nodes' snapshots."""
_WORDS = 4
"""Last words of a persister that are said again to ranks that (re-)connect."""
_PUSH_PAUSE = 0.5


def find_memory(node: str) -> Path | None:
    """This node's folder in host memory, made; None where there is nothing to write to.

    Two agents on one host have one each, as two hosts would.
    """
    named = os.environ.get(SHM_VARIABLE)
    folder = Path(named) / f"node-{node}" if named else Path("/dev/shm") / f"planaria-{node}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


@dataclass
class _Job:
    spec: PersisterSpec
    keeper: PersisterKeeper | None = None
    watched: int | None = None
    """Descriptor of the keeper that the selector knows."""
    words: list[Persisted] = field(default_factory=list)
    over: bool = False


class NodeMemory:
    """The jobs whose state lies in this node's memory. Used by the agent's main thread, but for what says otherwise.

    Args:
        folder: see :func:`find_memory`.
        run_dir: of the agent.
        selector: the main loop's.
        table: the agent's processes.
        say: tells a job's ranks on this node something.
        report: takes reports for the coordinator.
        python: interpreter of persisters.
    """

    def __init__(
        self,
        folder: Path | None,
        run_dir: Path,
        selector: selectors.BaseSelector,
        table: ProcessTable,
        say: Callable[[str, Persisted], None],
        report: Callable[[Any], None],
        python: str,
    ) -> None:
        self.folder = folder
        self._specs = run_dir / "persisters"
        self._selector, self._table, self._say, self._report, self._python = selector, table, say, report, python
        self._jobs: dict[str, _Job] = {}
        self._recall()
        table.tended = self.pids

    def _recall(self) -> None:
        """Jobs that an earlier life of this agent knew and whose memory is still there."""
        for job in self.held():
            path = self._specs / f"{job}.json"
            try:
                spec = validate(PersisterSpec, json.loads(path.read_text()), str(path))
            except (OSError, ValueError, PlanariaError):
                continue
            self._jobs[job] = _Job(spec.model_copy(update={"parent": os.getpid()}))

    def pids(self) -> set[int]:
        """Processes that are looked after here."""
        return {job.keeper.pid for job in self._jobs.values() if job.keeper is not None and job.keeper.pid is not None}

    def held(self) -> set[str]:
        """Jobs that have something in this memory, or a persister; safe in any thread."""
        if self.folder is None:
            return set()
        with_memory: set[str] = set()
        with contextlib.suppress(OSError):  # the last job's folder takes this one along
            with_memory = set(os.listdir(snapshot.job_dir(self.folder, "any").parent))
        return with_memory | set(self._jobs)

    def know(self, spec: RankSpec) -> None:
        """A rank of this job is to start here."""
        if self.folder is None:
            return
        keep = spec.config.checkpoint
        wanted = PersisterSpec(
            job=spec.job,
            memory_dir=str(self.folder),
            target=published_at(spec.config, Path(spec.job_folder)),
            keep=keep.keep,
            keep_every=keep.keep_every,
            parent=os.getpid(),
        )
        known = self._jobs.get(spec.job)
        if known is None or known.over:
            self._specs.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(self._specs / f"{spec.job}.json", wanted.model_dump(mode="json"), mode=0o600)
            self._jobs[spec.job] = _Job(wanted, keeper=known.keeper if known else None)

    # ------------------------------------------------------------------ persisters

    def sweep(self) -> None:
        """Start what is needed, take in what was said, take away what is over."""
        for name, job in list(self._jobs.items()):
            if job.keeper is not None and job.keeper.gone and not job.over:
                job.keeper = None  # of an earlier run of a job that was preempted and goes on
            if job.keeper is None and not job.over and self._needed(name):
                job.keeper = PersisterKeeper(
                    job.spec,
                    self._specs,
                    lambda message, name=name: self._said(name, message),  # type: ignore[misc]
                    settled=lambda word, name=name: self._settled(name, word),  # type: ignore[misc]
                    python=self._python,
                )
            if job.keeper is not None:
                self._poll(job)
            if job.over and (job.keeper is None or job.keeper.gone):
                self._forget(name)

    def _needed(self, name: str) -> bool:
        assert self.folder is not None
        folder = snapshot.job_dir(self.folder, name)
        if not folder.is_dir():
            return False
        if any(process.about["rank"] == 0 for process in self._ranks(name)):
            return True
        return self._awaits(name)

    def _awaits(self, name: str) -> bool:
        """Whether something of a job here waits to be published."""
        assert self.folder is not None
        folder = snapshot.job_dir(self.folder, name)
        shards = [shard for found in snapshot.find(folder) for shard in found.shards]
        return any(snapshot.awaited(folder, shard.description) for shard in shards)

    def _ranks(self, job: str) -> list[Watched]:
        return [one for one in self._table if one.about["kind"] == "rank" and one.about["job"] == job]

    def _poll(self, job: _Job) -> None:
        """Let the keeper act; its descriptor changes when its process does."""
        assert job.keeper is not None
        if job.watched is not None:
            self._selector.unregister(job.watched)
            job.watched = None
        job.keeper.poll()
        if (output := job.keeper.output) is not None:
            self._selector.register(output, selectors.EVENT_READ, lambda mask: self._poll(job))
            job.watched = output

    def _said(self, job: str, message: RankCheckpoint) -> None:
        self._report(CheckpointSaid(time=message.time, job=job, message=message))

    def _settled(self, name: str, word: Persisted) -> None:
        job = self._jobs.get(name)
        if job is not None:
            job.words = [*job.words[-_WORDS + 1 :], word]
        self._say(name, word)

    def words(self, job: str) -> list[Persisted]:
        """What a rank that (re-)connects has to be told (again)."""
        known = self._jobs.get(job)
        if known is None or known.keeper is None:
            return []
        up = [Persisted(step=0)] if known.keeper.ready else []
        return up + [word for word in known.words if word.step]

    # ------------------------------------------------------------------ the end of a job

    def drop(self, name: str) -> None:
        """A job is over: what is marked is still published, then its memory is given back."""
        job = self._jobs.get(name)
        if job is None:
            self._forget(name)
        elif not job.over:
            job.over = True
            if job.keeper is not None:
                job.keeper.leave(LEAVE_SECONDS if job.keeper.ready or self._awaits(name) else 0.0)

    def _forget(self, name: str) -> None:
        self._jobs.pop(name, None)
        (self._specs / f"{name}.json").unlink(missing_ok=True)
        (self._specs / f"persister-{name}.json").unlink(missing_ok=True)
        if self.folder is not None and name and "/" not in name:
            snapshot.remove_job(self.folder, name)

    def close(self, seconds: float) -> None:
        """The agent leaves: persisters finish; memory goes but for what could not be published."""
        for name in self.held():
            job = self._jobs.get(name)
            if job is not None and job.watched is not None:
                self._selector.unregister(job.watched)
                job.watched = None
            waits = self._awaits(name)
            keeper = job.keeper if job is not None else None
            finished = keeper is None or self._finish(keeper, seconds if keeper.ready or waits else 0.0)
            if finished or not waits:
                self._forget(name)
        if self.folder is not None and not self.held():
            shutil.rmtree(self.folder, ignore_errors=True)

    @staticmethod
    def _finish(keeper: PersisterKeeper, seconds: float) -> bool:
        end = time.monotonic() + seconds
        keeper.leave(seconds)
        while not keeper.gone and time.monotonic() < end + 2.0:
            keeper.poll(0.05)
        return keeper.finished


# ---------------------------------------------------------------- copies on other nodes


@dataclass(frozen=True)
class Peers:
    """The other nodes' keepers, as the cluster's table of nodes has them."""

    addresses: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Node → where its keeper listens; this node is not among them."""
    chosen: tuple[str, ...] = ()
    """The nodes that get this node's snapshots, nearest first."""

    def all(self) -> list[str]:
        """``host:port`` of every keeper."""
        return [f"{host}:{port}" for host, port in self.addresses.values()]


def find_peers(nodes: Iterable[NodeFacts], own: str) -> Peers:
    """The keepers among the cluster's nodes, and those that node and switch are safest with (:mod:`planner.peers`).

    Every agent computes the same assignment from the same table, and takes its own part.
    """
    keepers = {facts.name: facts for facts in nodes if facts.labels.get("peer")}
    addresses = {}
    for name, facts in keepers.items():
        host, _, port = facts.labels["peer"].rpartition(":")
        addresses[name] = (host, int(port))
    plan = choose_peers({name: facts.labels.get("switch", "") for name, facts in keepers.items()})
    return Peers({name: at for name, at in addresses.items() if name != own}, plan.peers.get(own, ()))


class PeerTier:
    """Serves other nodes' copies and sends this node's to the chosen peers, in threads of its own."""

    def __init__(self, folder: Path, node: str, host: str, token_of: Callable[[str], str]) -> None:
        self._folder, self._node, self._token_of = folder, node, token_of
        self.peers = Peers()
        self.server = peer.PeerServer(folder, shutil.disk_usage(folder).total // _SHARE_FOR_PEERS, token_of, host)
        self._sent: dict[tuple[str, str], tuple[str, int, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_for_ever, name="peer-sender", daemon=True)

    def start(self) -> None:
        """Serve and send from now on."""
        self.server.start()
        self._thread.start()

    def close(self) -> None:
        """Stop both."""
        self._stop.set()
        self.server.close()
        self._thread.join(timeout=2.0)

    def _send_for_ever(self) -> None:
        while not self._stop.wait(_PUSH_PAUSE):
            for name in self.peers.chosen:
                try:
                    self._send_to(name)
                except (PlanariaError, OSError, ValueError) as error:  # later: a copy may be late, training is not
                    _log("peer.waits", peer=name, reason=one_line(error)[:200])

    def _send_to(self, name: str) -> None:
        """What is newest of each shard and has not been sent there."""
        address = self.peers.addresses.get(name)
        root = snapshot.job_dir(self._folder, "any").parent
        if address is None or not root.is_dir():
            return
        for folder in sorted(root.iterdir()):
            for shard in _newest(folder):
                said = shard.description
                place, content = (name, str(shard.buffer.data_path.parent) + said.coordinate.name), said.xxh3
                if self._stop.is_set() or self._sent.get(place, ("", 0, ""))[1:] == (said.step, content):
                    continue
                flags = folder / peer.FLAGS
                busy = peer.TrafficFlags(flags, flags.stat().st_size) if flags.exists() else None
                peer.push(shard, address, node=self._node, token=self._token_of(said.job), flags=busy)
                self._sent[place] = (said.job, said.step, content)


def _newest(folder: Path) -> Iterable[snapshot.Shard]:
    """The newest committed snapshot of each of a job's own shards."""
    newest: dict[str, snapshot.Shard] = {}
    for found in snapshot.find(folder):
        for shard in found.shards:
            newest.setdefault(shard.description.coordinate.name, shard)
    return newest.values()


def _log(action: str, **details: object) -> None:
    shown = " ".join(f"{key}={value}" for key, value in details.items())
    print(f"{time.strftime('%H:%M:%S')} action={action} {shown}", flush=True)
