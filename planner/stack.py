"""The local stack: ``planaria up`` and ``planaria down``.

Redis, coordinator, agent and dashboard are detached processes of their own sessions. Each inherits one open file
description of ``<state-dir>/lock`` with an exclusive lock on it, so the state directory is busy exactly as long as any
of them lives. ``cluster.json`` is written before each start with what runs so far; the stack's id stands in every
process' environment, so that ``down`` finds also what nobody wrote down.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.auth import new_secret
from planner.cluster import (
    SECRET_FILE,
    STATE_FILE,
    default_state_dir,
    last_up,
    read_secret,
    read_state_file,
    remember_last_up,
)
from planner.errors import BadInputError, MissingServiceError, PlanariaError, WorkFailedError, one_line
from planner.files import write_atomic, write_json
from planner.processes import (
    SHM_VARIABLE,
    STACK_VARIABLE,
    ProcessId,
    detach,
    marked,
    remove_unheld,
    shared_memory_of,
    wait_gone,
)
from planner.redis_link import COMMAND_PATIENCE, public_url
from planner.redis_server import start_redis
from planner.scratch import remove_scratch
from planner.store import ClusterStore

COMPONENTS = ("coordinator", "agent", "dashboard")
"""What ``up`` starts besides Redis, in this order."""
NODE = "local"
"""Name of the node that ``up`` adds."""
READY_TIMEOUT = 60.0
"""Seconds until coordinator and agent must be ready."""
LEAVE_SECONDS = 15.0
"""Seconds that the agent gets to end its ranks and workers before everything is killed."""


@dataclass
class Stack:
    """A running local stack."""

    state_dir: Path
    id: str
    url: str
    secret: str
    node: str = NODE
    slots: int | None = None
    own_redis: bool = True
    dashboard: str | None = None
    """Address of the dashboard's page."""
    processes: dict[str, ProcessId] = field(default_factory=dict)

    @property
    def shm(self) -> Path:
        """Folder of its shared memory; below the state directory where the machine has none to write."""
        base = Path("/dev/shm")
        return (base if os.access(base, os.W_OK) else self.state_dir) / f"planaria-{self.id}"

    def save(self) -> None:
        """Write ``cluster.json``; it holds the password and the secret, so it is the owner's alone."""
        state = {
            "format": 1,
            "id": self.id,
            "url": self.url,
            "secret": self.secret,
            "node": self.node,
            "slots": self.slots,
            "own_redis": self.own_redis,
            "dashboard": self.dashboard,
            "boot": boot_id(),
            "processes": {name: {"pid": p.pid, "start": p.start} for name, p in self.processes.items()},
        }
        write_json(self.state_dir / STATE_FILE, state, mode=0o600)

    @classmethod
    def load(cls, state_dir: Path) -> Stack | None:
        """The stack that a state directory tells of; None where there is none."""
        state = read_state_file(state_dir)
        if state is None:
            return None
        # After a reboot start times mean nothing: no process of that life can be left.
        noted = state.get("processes", {}) if state.get("boot") == boot_id() else {}
        return cls(
            state_dir=state_dir,
            id=str(state.get("id", "")),
            url=str(state.get("url", "")),
            secret=str(state.get("secret", "")),
            node=str(state.get("node", NODE)),
            slots=state.get("slots"),
            own_redis=bool(state.get("own_redis", True)),
            dashboard=state.get("dashboard"),
            processes={name: ProcessId(int(p["pid"]), int(p["start"])) for name, p in noted.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """What ``up --json`` prints: no password, no secret."""
        return {
            "state_dir": str(self.state_dir),
            "node": self.node,
            "dashboard": self.dashboard,
            "processes": {name: process.pid for name, process in self.processes.items()},
        }


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


# ---------------------------------------------------------------- the state directory


def prepare_state_dir(state_dir: Path) -> bool:
    """Make the state directory and prove that files can be made in it; True when it was made here.

    Raises:
        BadInputError: not a directory, or not writable.
    """
    try:
        made = not state_dir.exists()
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = state_dir / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except (FileExistsError, NotADirectoryError):
        raise BadInputError(f"--state-dir {state_dir}: not a directory; name one that may be made or written") from None
    except OSError as error:
        raise BadInputError(f"--state-dir {state_dir}: not writable ({error.strerror}); name another") from None
    return made


@contextlib.contextmanager
def _one_at_a_time(state_dir: Path, wait: float) -> Iterator[None]:
    """Only one ``up`` or ``down`` works on a state directory at a time."""
    fd = os.open(state_dir / ".command.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BadInputError(
                        f"--state-dir {state_dir}: another planaria up or down is working on it"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def _stack_lock(state_dir: Path) -> int:
    """Take the lock that the stack's processes inherit; returns its descriptor.

    Raises:
        BadInputError: a process of a stack lives.
    """
    fd = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + 2.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            # A process that was killed holds its files for a moment longer than its environment can be read.
            if time.monotonic() < deadline and not _recorded_alive(state_dir):
                time.sleep(0.05)
                continue
            os.close(fd)
            raise BadInputError(
                f"--state-dir {state_dir}: a stack is up there already; "
                f"end it with planaria down --state-dir {state_dir}"
            ) from None


def _recorded_alive(state_dir: Path) -> bool:
    try:
        stack = Stack.load(state_dir)
    except BadInputError:
        return False
    return stack is not None and bool(_living(stack))


# ---------------------------------------------------------------- up


def start_stack(
    state_dir: Path | None = None,
    *,
    slots: int | None = None,
    url: str | None = None,
    components: Sequence[str] = COMPONENTS,
    remember: bool = True,
) -> Stack:
    """Start a stack and wait until it is ready; whatever fails, nothing of it is left.

    Args:
        state_dir: where everything goes; the user's default when left out.
        slots: of the agent; its own default when left out.
        url: a Redis to use instead of starting one; no other cluster may be active in it.
        components: which of :data:`COMPONENTS` to start.
        remember: let later commands find this stack without an option.

    Raises:
        BadInputError: the state directory or the Redis is busy or unusable.
        MissingServiceError: Redis is missing, unreachable, or refuses us.
        WorkFailedError: a process did not come up.
    """
    folder = (state_dir or default_state_dir()).expanduser().absolute()
    if url is not None:  # before anything is made: a wrong URL leaves nothing behind
        _check_url(url)
    made = prepare_state_dir(folder)
    try:
        with _one_at_a_time(folder, wait=0.0):
            lock = _stack_lock(folder)
            try:
                _sweep(folder)
                stack = _start_all(folder, lock, slots, url, components)
            finally:
                os.close(lock)
    except PlanariaError:
        if made and not (folder / "logs").exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise BadInputError(f"--state-dir {folder}: cannot be used ({what}); make room there or name another") from None
    if remember:
        with contextlib.suppress(OSError):
            remember_last_up(folder)
    return stack


def _check_url(url: str) -> None:
    store = ClusterStore(url, patience=COMMAND_PATIENCE)
    try:
        store.ping()
        lock = store.coordinator()
        if lock is not None and lock.expires > store.server_time():
            raise BadInputError(
                f"--url {public_url(url)}: a cluster is active there already (coordinator {lock.owner}); "
                "add this host to it with planaria agent, or name another Redis"
            )
    finally:
        store.close()


def _sweep(folder: Path) -> None:
    """End what an earlier stack left (all its locked processes are gone, or we would not be here)."""
    try:
        old = Stack.load(folder)
    except BadInputError:
        old = None
    if old is not None:
        _end_processes(old, polite=False)
        (folder / STATE_FILE).unlink(missing_ok=True)


def _secret(folder: Path) -> str:
    """The state directory's secret, made at its first ``up``."""
    path = folder / SECRET_FILE
    if path.exists():
        return read_secret(path)
    secret = new_secret()
    write_atomic(path, secret + "\n", mode=0o600)
    return secret


def _start_all(folder: Path, lock: int, slots: int | None, url: str | None, components: Sequence[str]) -> Stack:
    stack = Stack(folder, secrets.token_hex(8), url or "", _secret(folder), slots=slots, own_redis=url is None)
    stack.save()
    try:
        (folder / "logs").mkdir(exist_ok=True)
        stack.shm.mkdir(mode=0o700)
        if url is None:
            server = start_redis(folder / "redis", environment=_environment(stack), pass_fds=(lock,))
            stack.url = server.url
            _note(stack, "redis", server.pid)
        for name in components:
            process = subprocess.Popen(
                _command_line(stack, name),
                stdin=subprocess.DEVNULL,
                stdout=(log := (folder / "logs" / f"{name}.log").open("ab")),
                stderr=log,
                env=_environment(stack),
                cwd=folder,
                pass_fds=(lock,),
                start_new_session=True,
            )
            log.close()
            _note(stack, name, detach(process))
        _wait_ready(stack, components)
        stack.save()
    except BaseException:
        _end_processes(stack, polite=False)
        (folder / STATE_FILE).unlink(missing_ok=True)
        raise
    return stack


def _note(stack: Stack, name: str, pid: int) -> None:
    process = ProcessId.of(pid)
    if process is None:
        raise WorkFailedError(f"the {name} ended at once: {_last_line(stack, name)}")
    stack.processes[name] = process
    stack.save()


def _environment(stack: Stack) -> dict[str, str]:
    own = {
        STACK_VARIABLE: stack.id,
        SHM_VARIABLE: str(stack.shm),
        "PLANARIA_STATE_DIR": str(stack.state_dir),
        "PLANARIA_SECRET_FILE": str(stack.state_dir / SECRET_FILE),
        "PYTHONUNBUFFERED": "1",
    }
    if stack.url:  # by environment, never on a command line: it holds the password
        own["PLANARIA_URL"] = stack.url
    return {**os.environ, **own}


def _command_line(stack: Stack, name: str) -> list[str]:
    command = [sys.executable, "-m", "planner.cli", name, "--state-dir", str(stack.state_dir)]
    if name == "agent":
        command += ["--node", stack.node]
        if stack.slots is not None:
            command += ["--slots", str(stack.slots)]
    return command


def _last_line(stack: Stack, name: str) -> str:
    log = stack.state_dir / "logs" / f"{name}.log"
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return f"{one_line(lines[-1])[:300] if lines else 'it said nothing'} (log: {log})"


def _wait_ready(stack: Stack, components: Sequence[str]) -> None:
    """Wait until the lock is the coordinator's, the agent's slots may be granted and the page is served."""
    store = ClusterStore(stack.url, stack.secret, patience=COMMAND_PATIENCE)
    deadline = time.monotonic() + READY_TIMEOUT
    waiting = list(components)
    try:
        while waiting:
            for name in list(waiting):
                if not stack.processes[name].alive():
                    raise WorkFailedError(f"the {name} ended while it came up: {_last_line(stack, name)}")
                if _ready(stack, store, name):
                    waiting.remove(name)
            if waiting and time.monotonic() >= deadline:
                raise WorkFailedError(
                    f"the {waiting[0]} is not ready after {READY_TIMEOUT:.0f} s: {_last_line(stack, waiting[0])}"
                )
            time.sleep(0.05)
    finally:
        store.close()


def _ready(stack: Stack, store: ClusterStore, name: str) -> bool:
    if name == "coordinator":
        lock = store.coordinator()
        return lock is not None and lock.pid == stack.processes[name].pid
    if name == "agent":
        found = [facts for facts in store.nodes() if facts.name == stack.node]
        if not found or found[0].pid not in (0, stack.processes[name].pid) or store.quarantine(stack.node):
            return False
        stack.slots = found[0].slots
        return True
    try:
        page = json.loads((stack.state_dir / "dashboard.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if page.get("pid") != stack.processes[name].pid:
        return False
    stack.dashboard = str(page["url"])
    return True


# ---------------------------------------------------------------- down


def stop_stack(state_dir: Path) -> bool:
    """End a stack: no process, no port, no file in shared memory is left. False when nothing was up.

    Raises:
        BadInputError: another ``up`` or ``down`` works on the state directory.
        WorkFailedError: a process could not be ended.
    """
    if not state_dir.is_dir():
        return False
    with _one_at_a_time(state_dir, wait=LEAVE_SECONDS * 2):
        stack = Stack.load(state_dir)
        if stack is None:
            return False
        _end_processes(stack, polite=True)
        for name in (STATE_FILE, "dashboard.json"):
            (state_dir / name).unlink(missing_ok=True)
    return True


def _end_processes(stack: Stack, *, polite: bool) -> None:
    """Agent first (it ends its ranks and workers while Redis still answers), Redis last."""
    left = _living(stack)
    segments = shared_memory_of(left)
    if polite:
        order = [("agent", LEAVE_SECONDS), ("dashboard", 0.0), ("coordinator", 5.0)]
        for name, seconds in order:
            if (process := stack.processes.get(name)) is not None:
                process.kill(signal.SIGTERM)
                wait_gone([process], seconds)
        _forget_node(stack)
    if (server := stack.processes.get("redis")) is not None:
        others = [process for process in _living(stack) if process != server]
        segments |= _kill(others)
        if polite:
            server.kill(signal.SIGTERM)  # it writes its append-only file out
            wait_gone([server], 5.0)
    segments |= _kill(_living(stack))
    stubborn = wait_gone(_living(stack), 5.0)
    if stack.id:
        shutil.rmtree(stack.shm, ignore_errors=True)
    remove_unheld(segments)
    for run_dir in (stack.state_dir / "nodes").glob("*"):
        remove_scratch(run_dir)  # an agent that was killed could not
    if stubborn:
        raise WorkFailedError(f"the processes {[process.pid for process in stubborn]} could not be ended")


def _living(stack: Stack) -> list[ProcessId]:
    noted = [process for process in stack.processes.values() if process.alive()]
    return list(dict.fromkeys(noted + (marked(stack.id) if stack.id else [])))


def _kill(processes: Sequence[ProcessId]) -> set[Path]:
    """SIGKILL; returns the shared memory that they held. Freezes them first, so that none starts another meanwhile."""
    for process in processes:
        process.kill(signal.SIGSTOP)
    segments = shared_memory_of(processes)
    for process in processes:
        process.kill(signal.SIGKILL)
    wait_gone(processes, 5.0)
    return segments


def _forget_node(stack: Stack) -> None:
    """Take our node out of a Redis that stays (or comes back with its data)."""
    if not stack.url:
        return
    store = ClusterStore(stack.url, patience=0.5)
    with contextlib.suppress(PlanariaError):
        for lease in store.leases(node=stack.node):
            store.release(lease, reason="the stack went down")
        store.remove_node(stack.node)
    store.close()


# ---------------------------------------------------------------- commands


def up_command(
    *, slots: int | None, state_dir: Path | None, url: str | None, dashboard: bool, json_output: bool
) -> int:
    """``planaria up``."""
    components = COMPONENTS if dashboard else tuple(name for name in COMPONENTS if name != "dashboard")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # half a stack is torn down, as after Ctrl-C
    stack = start_stack(state_dir, slots=slots, url=url, components=components)
    if json_output:
        print(json.dumps(stack.to_json()))
        return 0
    print(f"up: {stack.slots} slots on node {stack.node}, state in {stack.state_dir}")
    if stack.dashboard:
        print(f"dashboard: {stack.dashboard}")
    print("next: planaria submit CONFIG, planaria status, planaria down")
    return 0


def down_command(*, state_dir: Path | None) -> int:
    """``planaria down``."""
    folder = state_dir or last_up() or default_state_dir()
    folder = folder.expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise BadInputError(f"--state-dir {folder}: not a directory")
    try:
        ended = stop_stack(folder)
    except PermissionError as error:
        raise BadInputError(f"--state-dir {folder}: {error.strerror}; it is another user's stack") from None
    print(f"down: {folder}" if ended else f"nothing was up in {folder}")
    return 0


__all__ = ["COMPONENTS", "MissingServiceError", "Stack", "down_command", "start_stack", "stop_stack", "up_command"]
