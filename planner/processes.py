"""Processes of a stack: told apart from strangers by start time and by a mark in their environment.

A pid alone proves nothing, since the system reuses it. A process is taken for ours only if it started when we noted,
or if its environment carries the stack's id, which every descendant inherits, also after its parent was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
STACK_VARIABLE = "PLANARIA_STACK"
"""Environment variable with the id of the stack that a process belongs to."""
SHM_VARIABLE = "PLANARIA_SHM"
"""Environment variable with the folder for a stack's shared memory."""
_SHM = "/dev/shm"
_ANONYMOUS = ("psm_", "sem.", "torch_", "nccl-", "vllm_dist_")
"""How files in ``/dev/shm`` begin that libraries make for processes alone: CPython, glibc, torch, NCCL, vLLM on CPU."""


@dataclass(frozen=True)
class ProcessId:
    """A process for certain: ``start`` is its start in clock ticks since the machine's boot (``/proc/<pid>/stat``)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None for none or a zombie."""
        start = start_ticks(pid)
        return None if start is None else cls(pid, start)

    def alive(self) -> bool:
        """Whether it still runs (a zombie does not)."""
        return start_ticks(self.pid) == self.start

    def kill(self, number: signal.Signals) -> None:
        """Send a signal if it is still the same process."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def start_ticks(pid: int) -> int | None:
    """Start of a running process in ticks since boot; None when there is none or all of it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything, blanks too
    # A zombie with more than one thread is none yet: one in uninterruptible I/O still holds its files and ports.
    gone = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return None if gone else int(fields[19])


def marked(stack: str) -> list[ProcessId]:
    """All running processes whose environment carries the stack's id, without the caller's own process."""
    wanted = f"{STACK_VARIABLE}={stack}".encode()
    found: list[ProcessId] = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment and (process := ProcessId.of(int(entry))) is not None:
            found.append(process)
    return found


def group_of(leader: int) -> list[ProcessId]:
    """Running processes of the session or the process group that ``leader`` leads or led."""
    found: list[ProcessId] = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
            group, session = text[text.rindex(")") + 2 :].split()[2:4]
            if leader in (int(group), int(session)) and (process := ProcessId.of(int(entry))) is not None:
                found.append(process)
    return found


def end_groups(leaders: Sequence[int], seconds: float = 5.0) -> None:
    """SIGKILL the groups of these leaders, and remove the shared memory that they leave to nobody."""
    members = [process for leader in leaders for process in group_of(leader)]
    segments = shared_memory_of(members)
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while any(process.alive() for process in members) and time.monotonic() < deadline:
        time.sleep(0.02)  # whoever started them collects them
    remove_unheld(segments)


def remove_unheld(segments: Iterable[Path]) -> None:
    """Remove those of these files in ``/dev/shm`` that no running process has open or mapped."""
    if wanted := set(segments):
        running = (ProcessId.of(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal())
        for path in wanted - shared_memory_of(filter(None, running)):
            path.unlink(missing_ok=True)


def shared_memory_of(processes: Iterable[ProcessId]) -> set[Path]:
    """Files in ``/dev/shm`` that these processes have open or mapped and that were made for processes alone.

    A process that is killed cannot remove them. What a user keeps there (a corpus, a model) is none of them, nor is the
    state that a job keeps in a folder of its own.
    """
    found: set[Path] = set()
    for process in processes:
        names: list[str] = []
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            names += [line[line.index(f"{_SHM}/") :] for line in maps.splitlines() if f"{_SHM}/" in line]
        with contextlib.suppress(OSError):
            for link in os.listdir(f"/proc/{process.pid}/fd"):
                with contextlib.suppress(OSError):
                    names.append(os.readlink(f"/proc/{process.pid}/fd/{link}"))
        found |= {Path(name) for name in names if not name.endswith(" (deleted)")}
    return {path for path in found if str(path.parent) == _SHM and path.name.startswith(_ANONYMOUS)}


def die_with_parent(parent: int) -> None:
    """End this process when ``parent`` ends; at once if it is gone already (it died before we could ask)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def detach(process: subprocess.Popen[bytes]) -> int:
    """Give up the handle of a process that is to outlive us; returns its pid."""
    process.returncode = 0  # so that the handle's end neither warns nor waits: start times tell whether it lives
    return process.pid


def reap(pids: Iterable[int]) -> None:
    """Collect those of our own children that ended, so that no zombie stays."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def wait_gone(processes: Iterable[ProcessId], seconds: float) -> list[ProcessId]:
    """Wait until they are gone; returns those that still run after ``seconds``."""
    left = list(processes)
    deadline = time.monotonic() + seconds
    while True:
        reap(process.pid for process in left)
        left = [process for process in left if process.alive()]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)
