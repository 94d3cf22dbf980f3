"""Processes that an agent starts, watches and ends: exits seen through pidfds, whole families ended.

Every process runs in a session of its own, carries an unguessable marker in its environment and has a state
file in the agent's run directory, written *before* it exists. So a descendant is found by session, by process
group or by marker, and an agent that was killed and came back finds what it left running. The agent is the
sub-reaper of its descendants: an orphan that changed its session and dropped the marker still becomes its child.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.files import write_json
from planner.processes import ProcessId, remove_unheld, shared_memory_of
from planner.scratch import scratch_environment
from pretrain.nursery import ForkedChild, Nursery

MARKER = "PLANARIA_PROCESS"
_PR_SET_CHILD_SUBREAPER = 36
_TAIL_BYTES = 8192
_TAIL_LINES = 20
_REAP_SECONDS = 5.0

Child = subprocess.Popen[bytes] | ForkedChild
"""What tells how a process ended."""


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of ``/proc/<pid>/stat`` from the state on (index 0 is field 3 of proc(5)), or None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot: with the pid it names one process for good. None if gone."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def find_family(leader: int, marker: str) -> list[int]:
    """Live processes that belong to ``leader``: of its session, of its process group, or carrying ``marker``."""
    wanted = f"{MARKER}={marker}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        fields = _stat_fields(int(name))
        if fields is None or fields[0] in ("Z", "X"):
            continue
        if int(fields[2]) == leader or int(fields[3]) == leader or _carries(int(name), wanted):
            found.append(int(name))
    return found


def _carries(pid: int, wanted: bytes) -> bool:
    try:
        return wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def kill_family(leader: int, marker: str, deadline_seconds: float = _REAP_SECONDS) -> list[int]:
    """SIGKILL everything that belongs to ``leader`` until nothing is left; what would not die is returned.

    The family is looked for again after each round, since a dying parent may have forked in between. Shared memory that
    its libraries made and nobody else has goes with it.
    """
    limit = time.monotonic() + deadline_seconds
    segments: set[Path] = set()
    while family := find_family(leader, marker):
        segments |= shared_memory_of(filter(None, map(ProcessId.of, family)))
        for pid in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _await_exits(family, 0.2)
        if time.monotonic() > limit:
            return find_family(leader, marker)
    remove_unheld(segments)
    return []


def _await_exits(pids: Sequence[int], seconds: float) -> None:
    """Wait until the named processes are gone or zombies, by their pidfds, at most ``seconds``."""
    limit = time.monotonic() + seconds
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(fd, selectors.EVENT_READ)
                selector.select(max(0.0, limit - time.monotonic()))
        finally:
            os.close(fd)


def log_tail(path: Path) -> str:
    """The last lines of a log, decoded with replacement; empty if there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start. ``about`` is the owner's own description (JSON), kept in the state file for adoption."""

    key: str
    """Unique among live processes of the node, for example ``rank:<job>:<incarnation>:<rank>``."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    about: Mapping[str, Any]
    lease: str | None = None
    slots: tuple[int, ...] = ()
    cwd: Path | None = None
    pass_fds: tuple[int, ...] = ()


@dataclass(kw_only=True)
class Watched:
    """A live process of the table."""

    key: str
    pid: int
    pidfd: int
    marker: str
    log: Path
    about: dict[str, Any]
    lease: str | None
    slots: tuple[int, ...]
    child: Child | None
    """None where this agent adopted it and so cannot learn its exit code."""
    asked: bool = False
    """We told it to end."""
    kill_at: float | None = None
    """Monotonic time of the SIGKILL that follows a SIGTERM."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended, with its whole family ended too."""

    process: Watched
    exit_code: int | None
    signal: int | None
    tail: str
    leftovers: list[int] = field(default_factory=list)


class ProcessTable:
    """The live processes of one agent. Not thread-safe: one thread starts, ends and reaps.

    Args:
        folder: where state files are kept (made if missing, mode 0700).
        selector: each process's pidfd is registered here with its :class:`Watched` as data.
        scratch: where each process's temporary files are kept while it lives; beside ``folder`` when left out.
    """

    def __init__(self, folder: Path, selector: selectors.BaseSelector, scratch: Path | None = None) -> None:
        self._folder = folder
        self._scratch = scratch or folder.with_name("scratch")
        self._selector = selector
        self._table: dict[str, Watched] = {}
        self._strangers = set(self._children())
        """Children that this process had before: whoever started them ends them."""
        self.tended: Callable[[], set[int]] = set
        """Children that somebody else of this process looks after."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def __iter__(self) -> Iterator[Watched]:
        return iter(list(self._table.values()))

    def __len__(self) -> int:
        return len(self._table)

    def get(self, key: str) -> Watched | None:
        """The live process of that key."""
        return self._table.get(key)

    def leases(self) -> set[str]:
        """Leases under which something runs."""
        return {process.lease for process in self._table.values() if process.lease}

    def leave_alone(self, pid: int) -> None:
        """A child that is none of the table's: whoever started it ends it."""
        self._strangers.add(pid)

    def start(self, launch: Launch, nursery: Nursery | None = None) -> Watched:
        """Start a process in a session of its own, its output appended to its log.

        Args:
            nursery: forks it where it can, with the last of its arguments; else it is started as a program.

        Raises:
            ValueError: the key is taken by a live process.
            OSError: it cannot be started.
        """
        if launch.key in self._table:
            raise ValueError(f"{launch.key} runs already")
        marker = uuid.uuid4().hex
        scratch = self._scratch_of(marker)
        scratch.mkdir(parents=True, mode=0o700)
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        state = self._state_of(launch, marker)
        self._write_state(marker, state)
        try:
            child = self._child(launch, {**launch.env, **scratch_environment(scratch), MARKER: marker}, nursery)
        except OSError:
            self._forget(marker)
            raise
        state |= {"pid": child.pid, "started": start_time(child.pid)}
        self._write_state(marker, state)
        return self._enter(state, os.pidfd_open(child.pid), child)

    @staticmethod
    def _child(launch: Launch, environment: Mapping[str, str], nursery: Nursery | None) -> Child:
        forked = nursery.fork(launch.argv[-1:], environment, launch.log) if nursery is not None else None
        if forked is not None:
            return forked
        with launch.log.open("ab") as log:
            return subprocess.Popen(
                launch.argv, env=environment, cwd=launch.cwd, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, close_fds=True, pass_fds=launch.pass_fds,
            )  # fmt: skip

    @staticmethod
    def _state_of(launch: Launch, marker: str) -> dict[str, Any]:
        return {
            "key": launch.key, "marker": marker, "pid": None, "started": None, "log": str(launch.log),
            "about": dict(launch.about), "lease": launch.lease, "slots": list(launch.slots),
        }  # fmt: skip

    def _enter(self, state: dict[str, Any], pidfd: int, child: Child | None) -> Watched:
        process = Watched(
            key=state["key"], pid=state["pid"], pidfd=pidfd, marker=state["marker"], log=Path(state["log"]),
            about=state["about"], lease=state["lease"], slots=tuple(state["slots"]), child=child,
        )  # fmt: skip
        self._table[process.key] = process
        self._selector.register(pidfd, selectors.EVENT_READ, process)
        return process

    def adopt(self) -> tuple[list[Watched], list[Exit]]:
        """Take over what an earlier agent of this run directory left: (still running, ended meanwhile)."""
        alive: list[Watched] = []
        gone: list[Exit] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                state = json.loads(path.read_text())
            except (OSError, ValueError):
                path.unlink(missing_ok=True)
                continue
            if (pidfd := self._same_process(state)) is not None:
                alive.append(self._enter(state, pidfd, None))
            else:
                leftovers = kill_family(state["pid"] or -1, state["marker"])
                gone.append(self._ended(state, leftovers))
                self._forget(state["marker"])
        return alive, gone

    @staticmethod
    def _same_process(state: Mapping[str, Any]) -> int | None:
        """A pidfd of the process that the state file describes, or None if it is gone (or a zombie)."""
        pid = state["pid"]
        if pid is None:
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        fields = _stat_fields(pid)
        if fields is None or fields[0] in ("Z", "X") or int(fields[19]) != state["started"]:
            os.close(pidfd)
            return None
        return pidfd

    @staticmethod
    def _ended(state: Mapping[str, Any], leftovers: list[int]) -> Exit:
        process = Watched(
            key=state["key"], pid=state["pid"] or 0, pidfd=-1, marker=state["marker"], log=Path(state["log"]),
            about=dict(state["about"]), lease=state["lease"], slots=tuple(state["slots"]), child=None,
        )  # fmt: skip
        return Exit(process=process, exit_code=None, signal=None, tail=log_tail(process.log), leftovers=leftovers)

    def relabel(self, process: Watched, key: str, about: Mapping[str, Any]) -> None:
        """Give a live process another key and description (a rank that re-formed under a new incarnation)."""
        if key != process.key and key in self._table:
            raise ValueError(f"{key} runs already")
        del self._table[process.key]
        process.key, process.about = key, dict(about)
        self._table[key] = process
        self._write_state(process.marker, self._dump(process))

    def _dump(self, process: Watched) -> dict[str, Any]:
        return {
            "key": process.key, "marker": process.marker, "pid": process.pid, "started": start_time(process.pid),
            "log": str(process.log), "about": process.about, "lease": process.lease, "slots": list(process.slots),
        }  # fmt: skip

    def end(self, process: Watched, grace_seconds: float) -> None:
        """SIGTERM now and SIGKILL after the grace; without grace SIGKILL at once. Its exit is seen as any other."""
        process.asked = True
        if grace_seconds <= 0:
            self.kill(process)
            return
        self._signal(process, signal.SIGTERM)
        # A stopped process takes no SIGTERM until it goes on.
        self._signal(process, signal.SIGCONT)
        due = time.monotonic() + grace_seconds
        process.kill_at = due if process.kill_at is None else min(process.kill_at, due)

    def kill(self, process: Watched) -> None:
        """SIGKILL the process; its family follows when its exit is reaped."""
        process.asked = True
        process.kill_at = None
        self._signal(process, signal.SIGKILL)

    @staticmethod
    def _signal(process: Watched, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.pidfd, number)

    def next_deadline(self) -> float | None:
        """Monotonic time of the next SIGKILL that is due."""
        return min((p.kill_at for p in self._table.values() if p.kill_at is not None), default=None)

    def kill_overdue(self, now: float) -> None:
        """SIGKILL whatever is past its grace at monotonic time ``now``."""
        for process in self:
            if process.kill_at is not None and process.kill_at <= now:
                self.kill(process)

    def reap(self, process: Watched) -> Exit:
        """Collect a process whose pidfd is readable, end its family and forget it."""
        code = process.child.wait() if process.child is not None else None
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)
        del self._table[process.key]
        leftovers = kill_family(process.pid, process.marker)
        self.reap_orphans()
        if not leftovers:
            self._forget(process.marker)
        return Exit(
            process=process,
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            tail=log_tail(process.log),
            leftovers=leftovers,
        )

    def reap_orphans(self) -> None:
        """Collect descendants that became our children; end those that belong to no live process."""
        own = {process.pid for process in self._table.values() if process.child is not None} | self.tended()
        children = self._children()
        self._strangers &= set(children)  # a number that is used again is none of theirs
        for pid in children:
            if pid in own or pid in self._strangers:
                continue
            fields = _stat_fields(pid)
            if fields is not None and fields[0] not in ("Z", "X") and not self._belongs(pid, fields):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                _await_exits([pid], 0.2)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def tolerate(self, pid: int) -> None:
        """A child that somebody else in this process looks after (a node check's probe)."""
        self._strangers.add(pid)

    @staticmethod
    def _children() -> list[int]:
        found: list[int] = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/self/task/{task}/children").read_text().split())
        return found

    def _belongs(self, pid: int, fields: Sequence[str]) -> bool:
        leaders = {process.pid for process in self._table.values()}
        if int(fields[2]) in leaders or int(fields[3]) in leaders:
            return True
        return any(_carries(pid, f"{MARKER}={process.marker}".encode()) for process in self._table.values())

    def _scratch_of(self, marker: str) -> Path:
        return self._scratch / marker[:12]

    def _write_state(self, marker: str, state: Mapping[str, Any]) -> None:
        write_json(self._folder / f"{marker}.json", state, mode=0o600)

    def _forget(self, marker: str) -> None:
        shutil.rmtree(self._scratch_of(marker), ignore_errors=True)
        (self._folder / f"{marker}.json").unlink(missing_ok=True)
