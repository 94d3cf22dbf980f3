"""An agent and a supervisor in small: real ranks over a real channel, healed in place by the shortest rules.

Used to test what ranks do when they re-form, apart from the supervisor's own decisions: a rank that ends is told to
its peers at once; when all others have left, the survivors are ordered into the next incarnation; replacements are
started beforehand and taken in at a step's end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from planner.messages import LeaveCollective, RankSpec, Reform
from planner.pretrain_config import PretrainConfig
from planner.rank_map import Grid, enlarged, grid, without
from tests.support.fork_server import Forked, ForkServer
from tests.support.ranks import RANK

DECLARE_SECONDS = 0.3
"""After this a rank that stopped or hangs is declared hung (detection itself is tested elsewhere)."""


def kill(process: Forked) -> None:
    """SIGKILL a rank that may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


@dataclass(eq=False)
class Member:
    """One rank process."""

    number: int
    process: Forked
    log: Path
    origin: int
    connection: socket.socket | None = None
    pending: bytes = b""
    left: bool = False
    waiting: bool = False
    """It was started to join and has not been taken in."""
    ready: bool = False
    holds: bool = True
    """Whether it holds the job's state: all but those that are on their way in."""
    gone: bool = False


@dataclass
class ReformCluster:
    """Ranks of one job, their messages, and the rules that heal them."""

    config: PretrainConfig
    world: int
    folder: Path
    server: ForkServer
    replace: bool = False
    """Start a replacement for each replica that is lost, and take it in."""
    hung_seconds: float = 8.0
    """A rank that has not left this long after the others is ended."""
    incarnation: int = 1
    members: list[Member] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    fired: list[int] = field(default_factory=list)
    left_since: float | None = None
    next_name: int = 1000
    silent: list[tuple[float, Member]] = field(default_factory=list)
    """Ranks that make no progress, and when that is noticed."""

    def __post_init__(self) -> None:
        from torch.distributed import TCPStore

        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.run_dir = Path(tempfile.mkdtemp(prefix="reform-"))
        self.path = self.run_dir / "agent.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(self.path))
        self.listener.listen(64)
        self.nobody: list[tuple[socket.socket, bytes]] = []
        self.grid: Grid = grid(self.world, self.config.parallel.tensor, self.config.parallel.pipeline)
        for rank in range(self.world):
            self._start(rank, rank, joining=False)

    # ------------------------------------------------------------ processes

    def _start(self, number: int, origin: int, *, joining: bool) -> None:
        spec = RankSpec(
            job="job",
            incarnation=self.incarnation,
            rank=number,
            origin_rank=origin,
            world_size=self.grid.world,
            store_host="127.0.0.1",
            store_port=self.store.port,
            token="token",
            agent_socket=str(self.path),
            job_folder=str(self.folder),
            config=self.config,
            fired_faults=self.fired,
            joining=joining,
        )
        path = self.run_dir / f"spec-{self.incarnation}-{number}.json"
        path.write_text(spec.model_dump_json(by_alias=True))
        log = self.folder / f"rank-{self.incarnation}-{number}.log"
        log.touch()
        process = self.server.start(RANK, str(path), out=log)
        self.members.append(Member(number, process, log, origin, waiting=joining, holds=not joining))

    def alive(self, *, waiting: bool = False) -> list[Member]:
        """Members that run: those of the incarnation, or those that wait to join it."""
        return [member for member in self.members if not member.gone and member.waiting == waiting]

    def run(self, seconds: float = 120.0) -> None:
        """Serve until every rank has ended.

        Raises:
            AssertionError: they did not end in time; with the logs' ends.
        """
        deadline = time.monotonic() + seconds
        try:
            while self.alive() or self.alive(waiting=True):
                assert time.monotonic() < deadline, f"the ranks did not end in time:\n{self.logs()}"
                self.turn()
                if not any(member.holds for member in self.alive()):
                    for member in self.alive() + self.alive(waiting=True):
                        kill(member.process)  # the job ended without them
        finally:
            self.close()

    def run_until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Serve until ``condition()`` holds.

        Raises:
            AssertionError: it did not in time; with the logs' ends.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in time:\n{self.logs()}"
            self.turn()

    def close(self) -> None:
        """End what is left."""
        for member in self.members:
            if member.process.poll() is None:
                kill(member.process)
                member.process.wait(30)
            if member.connection is not None:
                member.connection.close()
        for connection, _ in self.nobody:
            connection.close()
        self.listener.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def logs(self) -> str:
        """The end of each rank's output."""
        said = "\n".join(str(message)[:200] for message in self.messages[-12:])
        return said + "".join(
            f"\n--- rank {member.number} gone={member.gone} left={member.left} waiting={member.waiting}\n"
            f"{member.log.read_text()[-2500:]}"
            for member in self.members
        )

    # ------------------------------------------------------------ one turn

    def turn(self) -> None:
        """Take in what ranks said and which ended, and act."""
        connections = [member.connection for member in self.members if member.connection is not None]
        waiting = [self.listener, *connections, *(connection for connection, _ in self.nobody)]
        for ready in select.select(waiting, [], [], 0.01)[0]:
            if ready is self.listener:
                self.nobody.append((self.listener.accept()[0], b""))
            else:
                self._read(ready)
        for member in self.members:
            if not member.gone and member.process.poll() is not None:
                member.gone = True
                if not member.waiting and member.process.returncode != 0:
                    self._tell_peers(member)
        for due, member in [item for item in self.silent if time.monotonic() > item[0]]:
            self.silent.remove((due, member))
            if not member.gone:
                self._tell_peers(member)
                kill(member.process)
        self._heal()
        self._grow()

    def _read(self, connection: socket.socket) -> None:
        owner = next((member for member in self.members if member.connection is connection), None)
        pending = owner.pending if owner else dict(self.nobody)[connection]
        try:
            chunk = connection.recv(1 << 16)
        except OSError:
            chunk = b""
        *lines, rest = (pending + chunk).split(b"\n")
        if owner is None:
            self.nobody = [item for item in self.nobody if item[0] is not connection]
            if not lines and chunk:
                self.nobody.append((connection, rest))
                return
            owner = self._hello(connection, json.loads(lines[0])) if lines else None
            if owner is None:
                connection.close()
                return
        owner.pending = rest
        for line in lines:
            self._said(owner, json.loads(line))
        if not chunk:
            connection.close()
            owner.connection = None

    def _hello(self, connection: socket.socket, hello: dict[str, Any]) -> Member | None:
        for member in self.members:
            if member.process.pid == hello["pid"]:
                member.connection = connection
                return member
        return None

    def _said(self, member: Member, message: dict[str, Any]) -> None:
        self.messages.append(message | {"who": member.number, "origin": member.origin, "at": time.monotonic()})
        if message["kind"] == "fault":
            self.fired.append(message["index"])
            if self.config.faults[message["index"]].kind.value in ("sigstop", "hang"):
                self.silent.append((time.monotonic() + DECLARE_SECONDS, member))
        elif message["kind"] == "left" and message["incarnation"] == self.incarnation:
            member.left = True
            self.left_since = self.left_since or time.monotonic()
        elif message["kind"] == "reformed":
            member.holds = True
        elif message["kind"] == "phase" and message["phase"] == "ready":
            member.ready = True

    def send(self, member: Member, message: Any) -> None:
        """Hand a message to one rank."""
        if member.connection is not None:
            try:
                member.connection.sendall(message.model_dump_json().encode() + b"\n")
            except OSError:
                member.connection.close()
                member.connection = None

    def _tell_peers(self, gone: Member) -> None:
        self.left_since = self.left_since or time.monotonic()
        for peer in self.alive():
            leave = LeaveCollective(incarnation=self.incarnation, reason="a rank is gone", ranks=[gone.number])
            self.send(peer, leave)

    def declare_hung(self, number: int) -> None:
        """End a rank that makes no progress, after telling its peers."""
        member = next(member for member in self.alive() if member.number == number)
        self._tell_peers(member)
        kill(member.process)

    # ------------------------------------------------------------ healing and growing

    def _heal(self) -> None:
        if self.left_since is None:
            return
        rest = [member for member in self.alive() if not member.left]
        if rest:
            if time.monotonic() - self.left_since > self.hung_seconds:
                for member in rest:
                    self.declare_hung(member.number)
            return
        numbers = {member.number for member in self.alive()}
        dead = set(range(self.grid.world)) - numbers
        result = without(self.grid, dead)
        assert result is not None, f"nobody is left to heal:\n{self.logs()}"
        after, names = result
        lost = self.grid.data - after.data
        origins = [member.origin for member in self.members if member.number in dead | (numbers - names.keys())][-lost:]
        self._order(after, names, at_boundary=False)
        if self.replace:
            for replica in range(lost):
                for _ in range(after.group):
                    self._start(self.next_name, origins[replica % len(origins)], joining=True)
                    self.next_name += 1

    def _order(self, after: Grid, names: dict[int, int], *, at_boundary: bool) -> None:
        self.incarnation += 1
        pending = {member.number: member.number for member in self.alive(waiting=True)}
        waiting = {member.number for member in self.alive(waiting=True)}
        joined = {new for old, new in names.items() if old in waiting}
        order = Reform(
            incarnation=self.incarnation,
            ranks=pending | names,
            world_size=after.world,
            joining=[number for number in range(after.world) if number in joined],
            store_host="127.0.0.1",
            store_port=self.store.port,
            reason="test",
            at_boundary=at_boundary,
            fired_faults=self.fired,
            told_step=max(self.steps(), default=0),
        )
        self.grid, self.left_since = after, None
        for member in self.alive() + self.alive(waiting=True):
            self.send(member, order)
        for member in self.members:
            member.left = False
            if not member.gone and member.number in names:
                member.number, member.waiting = names[member.number], False
            elif not member.gone and not member.waiting:
                member.gone = True
            elif member.gone:
                member.number = -1

    def _grow(self) -> None:
        ready = [member for member in self.alive(waiting=True) if member.ready]
        replicas = len(ready) // self.grid.group
        running = any(m["kind"] == "step" and m["incarnation"] == self.incarnation for m in self.messages[-50:])
        if not replicas or self.left_since is not None or not running:
            return
        after, names, new = enlarged(self.grid, replicas)
        joining = {member.number: number for member, number in zip(ready, new, strict=False)}
        self._order(after, names | joining, at_boundary=True)

    # ------------------------------------------------------------ results

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Messages of one kind."""
        return [message for message in self.messages if message["kind"] == kind]

    def steps(self) -> dict[int, dict[str, Any]]:
        """What rank 0 said of each step, the last word counting."""
        return {message["step"]: message for message in self.of("step") if message["batch"]}

    @property
    def losses(self) -> list[float]:
        """Loss of each step, in order."""
        return [message["loss"] for _, message in sorted(self.steps().items())]

    @property
    def batches(self) -> list[list[int]]:
        """Sample ids of each step's global batch, in order."""
        return [sorted(message["batch"]) for _, message in sorted(self.steps().items())]
