"""A hunt for double grants: eight processes race for slots while everything around them is killed.

The witness is not Redis: whoever was granted a slot takes an exclusive ``flock`` on that slot's file, as a process
takes a device, and writes its fencing token into it. A lock that is taken, or a token that is not above the one that
stands there, is a violation. Around the racing clients:

* two coordinators (the real one's lock, epoch and stand-by, with a loop that sweeps and revokes at random), killed;
* one agent per node that confirms a slot only if its file is not locked;
* Redis itself, killed and started again *without the last second* of its append-only file;
* clients that stall for longer than their lease, and clients that are killed.

The processes are forked, so that a killed one is back at once; each makes its own connections.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import planner.coordinator
from planner.auth import new_secret
from planner.coordinator import Coordinator
from planner.errors import FencedError, PlanariaError
from planner.leases import GrantRequest, Lease, RedisRestartedError, RenewStatus, Revocation, SlotsTakenError
from planner.redis_server import RedisServer, start_redis
from planner.store import ClusterStore, NodeFacts
from tests.support.redis import await_that

NODES = {"n0": 4, "n1": 4}
TTL = 0.5
CLIENTS = 8


# ---------------------------------------------------------------- the witness


class SlotFiles:
    """One file per slot, locked by whoever uses it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, lease: Lease) -> list[int]:
        """Lock a lease's slots and leave its token there. Raises AssertionError on a double grant."""
        taken: list[int] = []
        for index in lease.slots:
            fd = os.open(self.folder / f"{lease.node}-{index}", os.O_RDWR | os.O_CREAT, 0o600)
            taken.append(fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AssertionError(f"{lease.node}/{index} is in use, yet granted as {lease}") from None
            before = int(os.pread(fd, 40, 0) or b"0")
            if before >= lease.token:
                raise AssertionError(f"token {lease.token} of {lease.node}/{index} is not above {before}")
            os.pwrite(fd, f"{lease.token:020d}".encode(), 0)
        return taken

    def free(self, slot: str) -> bool:
        """Whether nobody uses a slot now."""
        fd = os.open(self.folder / slot.replace("/", "-"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            return True
        finally:
            os.close(fd)


# ---------------------------------------------------------------- roles


def client(store: ClusterStore, folder: Path, seed: int) -> None:
    """Grant, use, renew, stall, release, for ever."""
    dice = random.Random(seed)
    files = SlotFiles(folder / "slots")
    counts: Counter[str] = Counter()
    told = time.monotonic()
    while True:
        with contextlib.suppress(PlanariaError):
            _one_lease(store, files, dice, counts, sleepy=0.4 if seed < 2 else 0.02)
        if time.monotonic() - told > 0.5:
            told = time.monotonic()
            (folder / f"counts-{os.getpid()}").write_text(json.dumps(counts))


def _one_lease(
    store: ClusterStore, files: SlotFiles, dice: random.Random, counts: Counter[str], *, sleepy: float
) -> None:
    node = dice.choice(sorted(NODES))
    slots = tuple(sorted(dice.sample(range(NODES[node]), dice.randint(1, 2))))
    lock = store.coordinator()
    if lock is None:
        time.sleep(0.01)
        return
    try:
        (lease,) = store.table.grant(
            [GrantRequest(holder=f"job:{os.getpid()}", node=node, slots=slots, ttl=TTL)], fence=lock.token
        )
    except (SlotsTakenError, FencedError, RedisRestartedError) as error:
        counts[type(error).__name__] += 1
        time.sleep(dice.random() * 0.01)
        return
    counts["granted"] += 1
    held = files.take(lease)
    try:
        if dice.random() < sleepy:  # stalls for longer than its lease lives, and finds out afterwards
            time.sleep(TTL * (1 + dice.random() * 6))
        for _ in range(dice.randint(0, 4)):
            time.sleep(dice.random() * 0.02)
            (answer,) = store.table.renew([(lease.id, lease.token)])
            if answer.status is RenewStatus.LOST:
                counts["lost"] += 1
                return
            if answer.status is RenewStatus.REVOKED:
                counts["revoked"] += 1
                break
    finally:
        for fd in held:
            os.close(fd)
    if dice.random() < 0.9:  # else it forgets to give it back
        store.table.release(lease.id, lease.token)


def agent(store: ClusterStore, folder: Path, node: str) -> None:
    """Confirm the slots that nobody uses, for ever."""
    files = SlotFiles(folder / "slots")
    facts = NodeFacts(name=node, address="127.0.0.1", slots=NODES[node], boot=f"{node}-{os.getpid()}")
    store.register_node(facts)
    while True:
        with contextlib.suppress(PlanariaError):
            if not store.heartbeat(node):
                store.register_node(facts)
            marks = store.quarantine(node)
            store.confirm_free(node, {slot: mark for slot, mark in marks.items() if files.free(slot)})
        time.sleep(0.02)


class Sweeper:
    """The coordinators' loop: sweeps, and takes leases back at random."""

    def __init__(self, store: ClusterStore, state_dir: Path) -> None:
        self._store = store
        self._counts: Counter[str] = Counter()
        self._file = state_dir / f"counts-{os.getpid()}"

    def tick(self, now: float) -> None:
        """One round."""
        fence = self._store.fence()
        self._counts["expired"] += len(self._store.table.expire(fence=fence, guard=1.0))
        leases = self._store.leases()
        if leases and random.random() < 0.7:
            victim = random.choice(leases)
            self._store.table.revoke([Revocation(lease=victim.id, grace_seconds=random.random() * 0.2)], fence=fence)
            self._counts["revocations"] += 1
        self._file.write_text(json.dumps(self._counts))


def _role(name: str, url: str, secret: str, folder: Path, argument: str) -> None:
    log = os.open(folder / f"{name}-{argument}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    random.seed()
    store = ClusterStore(url, secret, patience=30.0)
    if name == "client":
        client(store, folder, int(argument))
    elif name == "agent":
        agent(store, folder, argument)
    else:
        planner.coordinator.LOCK_TTL = 1.0  # in this process alone: take-overs are what is hunted
        Coordinator(store, folder, [("sweeper", lambda: Sweeper)]).run()


# ---------------------------------------------------------------- the hunt


@dataclass
class Result:
    """What a hunt saw."""

    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


class Hunt:
    """All processes of a hunt, and their killer."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        (folder / "slots").mkdir(parents=True)
        self.dice = random.Random(seed)
        self.secret = new_secret()
        self.server: RedisServer = start_redis(folder / "redis")
        self.processes: dict[tuple[str, str], BaseProcess] = {}
        self.sizes: list[tuple[float, dict[Path, int]]] = []
        self.result = Result(0.0)
        roles = [("coordinator", "0"), ("coordinator", "1"), *(("agent", node) for node in NODES)]
        for role in [*roles, *(("client", str(k)) for k in range(CLIENTS))]:
            self.start(*role)

    def start(self, role: str, argument: str) -> None:
        """Start a process of a role in place of the former one."""
        process = multiprocessing.get_context("fork").Process(
            target=_role, args=(role, self.server.url, self.secret, self.folder, argument), daemon=True
        )
        process.start()
        self.processes[role, argument] = process

    def kill(self, role: str, argument: str) -> None:
        """SIGKILL a process, as a machine's end does."""
        process = self.processes[role, argument]
        process.kill()
        process.join()
        self.result.counts[f"{role}s killed"] += 1

    def note_sizes(self) -> None:
        """How long the append-only file was at this moment."""
        base = self.folder / "redis"
        paths = [*base.glob("appendonlydir/*.incr.aof"), *base.glob("appendonly.aof")]
        self.sizes.append((time.monotonic(), {path: path.stat().st_size for path in paths}))
        del self.sizes[:-100]

    def restart_redis(self) -> None:
        """Kill Redis, cut the last second off its file, start it again on the same port."""
        os.kill(self.server.pid, signal.SIGKILL)
        os.waitpid(self.server.pid, 0)
        before = [sizes for noted, sizes in self.sizes if noted < time.monotonic() - 1.0]
        for path, size in (before[-1] if before else {}).items():
            if path.exists():
                self.result.counts["bytes forgotten"] += path.stat().st_size - size
                os.truncate(path, size)
        time.sleep(self.dice.random() * 0.5)
        self.server = start_redis(self.folder / "redis", password=self.server.password, port=self.server.port)
        self.result.counts["redis restarts"] += 1
        self.sizes.clear()

    def run(self, seconds: float) -> Result:
        """Kill at random for so long; returns what was seen."""
        await_that(lambda: len(list(self.folder.glob("counts-*"))) > CLIENTS, 60.0, "all clients are racing")
        begun = time.monotonic()
        next_kill, next_restart = begun + 2.0, begun + 3.0
        while time.monotonic() < begun + seconds and not self.violations():
            time.sleep(0.1)
            self.note_sizes()
            now = time.monotonic()
            if now > next_kill:
                role = self.dice.choice([("coordinator", "0"), ("coordinator", "1"), ("client", "3"), ("agent", "n0")])
                self.kill(*role)
                self.start(*role)
                next_kill = now + 0.5 + self.dice.random() * 2.0
            if now > next_restart:
                self.restart_redis()
                next_restart = time.monotonic() + 3.0 + self.dice.random() * 4.0
        self.result.seconds = time.monotonic() - begun
        self.close()
        self.result.violations = self.violations()
        for path in self.folder.glob("counts-*"):
            with contextlib.suppress(ValueError):
                self.result.counts.update(json.loads(path.read_text()))
        return self.result

    def violations(self) -> list[str]:
        """Clients that ended by themselves: they only do on a violation."""
        return [
            (self.folder / f"{role}-{argument}.log").read_text(errors="replace")[-2000:]
            for (role, argument), process in self.processes.items()
            if process.exitcode not in (None, -signal.SIGKILL)
        ]

    def close(self) -> None:
        """End all."""
        for process in self.processes.values():
            process.kill()
            process.join()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.server.pid, signal.SIGKILL)
            os.waitpid(self.server.pid, 0)


@contextlib.contextmanager
def hunting(folder: Path, seed: int) -> Iterator[Hunt]:
    """A hunt that is ended whatever happens."""
    hunt = Hunt(folder, seed)
    try:
        yield hunt
    finally:
        hunt.close()


def as_json(result: Result) -> dict[str, Any]:
    """A result as plain data."""
    return {"seconds": round(result.seconds, 1), **result.counts, "violations": len(result.violations)}
