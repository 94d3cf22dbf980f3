"""Running programs that a model wrote: no network, no secrets, an empty directory, limits on everything.

Two ways to the same walls: bubblewrap where it is installed, else user namespaces through ``unshare``,
``mount`` and ``setpriv``. Inside, a program sees the system's libraries and the Python installation, both
read-only, a private ``/tmp`` in memory, and nothing else; it is a user of its own (an unused uid where we
are root, the caller in a namespace of its own otherwise) without any capability, alone in its process
namespace, which ends with it.

The verdict is written by a harness in the same interpreter, with a word that only it was told, so that a
program that exits early with code 0 has not passed. A program that searches the interpreter for the
harness can forge its own verdict, as with the reference executor; it cannot leave the sandbox.

A verdict is about the program, not about the machine: its time begins when it begins, after the walls are up, and
what it waits for a core is not counted. Walls that do not come up are an error, never a verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from planner.errors import MissingServiceError

Outcome = Literal["passed", "failed", "timed out", "out of bounds"]

_OUTPUT_BYTES = 64 << 10
_POLL_SECONDS = 0.02
_BUILD_SECONDS = 60.0
"""How long walls and interpreter may take to come up."""
_BUILDS = 3
"""How often that is tried."""
_WAIT_FACTOR = 10.0
"""At most this many times the wall time, however long a program waited for a core."""
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/alternatives")

_HARNESS = r"""
import json, os, sys
job = json.loads(sys.stdin.buffer.read())
out = os.dup(1)
null = os.open("/dev/null", os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
def say(text, out=out, word=job.pop("word")):
    os.write(out, (word + text[:400]).encode("utf-8", "replace"))
say("")
try:
    exec(job["program"], {})
except BaseException as error:
    say("failed: " + type(error).__name__ + ": " + str(error))
else:
    say("passed")
os._exit(0)
"""

_UNSHARE_SCRIPT = r"""
set -e
root="$1"; shift
mount -t tmpfs -o size="$1",mode=755 none "$root"; shift
cd "$root"
mkdir -p proc dev tmp
chmod 1777 tmp
while [ "$1" != "--" ]; do
  if [ -L "$1" ]; then ln -s "$(readlink "$1")" ".$1"
  elif [ -d "$1" ]; then mkdir -p ".$1"; mount --rbind "$1" ".$1"; mount -o remount,bind,ro,nosuid,nodev ".$1"
  elif [ -e "$1" ]; then mkdir -p ".$(dirname "$1")"; touch ".$1"; mount --bind "$1" ".$1"
    mount -o remount,bind,ro,nosuid,nodev ".$1"
  fi
  shift
done
shift
for node in null zero full random urandom; do touch "dev/$node"; mount --bind "/dev/$node" "dev/$node"; done
mount -t proc -o nosuid,nodev,noexec proc proc
mkdir -p old
pivot_root . old
cd /
umount -l old
mount -o remount,ro,nosuid,nodev / 2>/dev/null || true
mount -t tmpfs -o size=16m,mode=1777,nosuid,nodev none /tmp
cd /tmp
"$@" || exit $?
exit 0
"""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_seconds: float = 10.0
    """From its first line to its end, less what it waited for a core."""
    cpu_seconds: int = 10
    """Of all its processes together."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and resident memory of all of them together."""
    processes: int = 16
    """Processes and threads at one time."""
    file_bytes: int = 8 << 20
    """Largest file; all files together are bounded by twice this."""
    open_files: int = 64


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a program ended. ``passed`` only where it ran to its end without an exception."""

    outcome: Outcome
    detail: str
    seconds: float
    """From its first line to its end."""

    @property
    def passed(self) -> bool:
        """Whether it ran to its end."""
        return self.outcome == "passed"


# ---------------------------------------------------------------- which walls there are


@cache
def available() -> str:
    """``bubblewrap`` or ``unshare``: the first that works here, tried once with a program that passes.

    ``PLANARIA_SANDBOX`` names one of them to use no other.

    Raises:
        MissingServiceError: neither works; the message says why.
    """
    reasons = []
    wanted = os.environ.get("PLANARIA_SANDBOX")
    for kind in (wanted,) if wanted else ("bubblewrap", "unshare"):
        verdict = _trial(kind)
        if verdict is None:
            return kind
        reasons.append(f"{kind}: {verdict}")
    raise MissingServiceError(
        f"no sandbox for code that a model wrote ({'; '.join(reasons)}); install bubblewrap or allow user namespaces"
    )


def _trial(kind: str) -> str | None:
    """Why a kind does not work; None where it does."""
    needed = {"bubblewrap": ("bwrap", "prlimit"), "unshare": ("unshare", "mount", "pivot_root", "prlimit", "setpriv")}
    if kind not in needed:
        return "not known (bubblewrap and unshare are)"
    missing = [name for name in needed[kind] if _which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    try:
        verdict = run_program("assert 1 + 1 == 2", kind=kind)
    except MissingServiceError as error:
        return str(error)
    return None if verdict.passed else verdict.detail


def _which(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin")


# ---------------------------------------------------------------- running


def run_programs(
    programs: Sequence[str],
    limits: Limits | None = None,
    *,
    threads: int | None = None,
    kind: str | None = None,
    readable: Sequence[str] = (),
) -> list[Verdict]:
    """Run programs side by side, in order of the list. ``kind`` as in :func:`run_program`.

    Raises:
        MissingServiceError: there is no sandbox here, or its walls do not come up.
    """
    kind = kind or available()
    width = threads or max(1, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max_workers=width) as pool:
        return list(pool.map(lambda program: run_program(program, limits, kind=kind, readable=readable), programs))


def run_program(
    program: str, limits: Limits | None = None, *, kind: str | None = None, readable: Sequence[str] = ()
) -> Verdict:
    """Run one Python program and say how it ended. ``readable``: further paths that it may read.

    ``kind``: ``bubblewrap`` or ``unshare`` instead of the first that works; ``none`` for limits without walls,
    which is for a user who accepted the risk.

    Raises:
        MissingServiceError: there is no sandbox here, or its walls do not come up.
    """
    bounds = limits or Limits()
    chosen = kind or available()
    why = ""
    for _ in range(_BUILDS):
        run = _Run(program, bounds)
        with tempfile.TemporaryDirectory(prefix="planaria-sandbox-") as scratch:
            process = subprocess.Popen(
                _command(chosen, bounds, scratch, readable), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, cwd=scratch, env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
                start_new_session=True,
            )  # fmt: skip
            try:
                ended = run.follow(process)
            finally:
                _end(process)
        if run.began is not None:
            return run.verdict(ended, process.returncode)
        why = ended[1] if ended else run.last_words(process.returncode)
    raise MissingServiceError(f"a sandbox ({chosen}) did not come up, tried {_BUILDS} times: {why}")


class _Run:
    """One program on its way: fed, listened to, and watched until it ends or crosses a bound."""

    def __init__(self, program: str, limits: Limits) -> None:
        self._word = secrets.token_hex(16).encode()
        self._waiting = memoryview(json.dumps({"program": program, "word": self._word.decode()}).encode())
        self._limits = limits
        self._started = time.monotonic()
        self._waited_before = self._waited = 0.0
        self._said = self._errors = b""
        self.began: float | None = None
        """When its first line was run, on the monotonic clock; None: not yet."""

    def follow(self, process: subprocess.Popen[bytes]) -> tuple[Outcome, str] | None:
        """Feed the job, take what is said (bounded), until the end: None, or the bound that was crossed."""
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            for stream in (process.stdin, process.stdout, process.stderr):
                os.set_blocking(stream.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while selector.get_map():
                ended = process.poll() is not None
                events = selector.select(0 if ended else _POLL_SECONDS)
                if ended and not events:  # what still holds the pipes open is ended with the sandbox
                    return None
                for key, _ in events:
                    if key.fileobj is process.stdin:
                        self._waiting = _feed(process, self._waiting)
                        if not self._waiting:
                            selector.unregister(process.stdin)
                            process.stdin.close()
                        continue
                    piece = os.read(key.fd, 65536)
                    if not piece:
                        selector.unregister(key.fileobj)
                    self._take(piece, said=key.fileobj is process.stdout)
                    if self.began is None and self._said.startswith(self._word):
                        self.began, self._waited_before = time.monotonic(), _used(process.pid).waited_seconds
                if self._answered:  # heard before any bound is looked at: we may have been late ourselves
                    return None
                if not ended and (crossed := self._crossed(process.pid)):
                    return crossed
        while process.poll() is None:  # it closed its outputs and lives
            if crossed := self._crossed(process.pid):
                return crossed
            time.sleep(_POLL_SECONDS)
        return None

    @property
    def _answered(self) -> bool:
        return self._said.startswith(self._word * 2)

    def _take(self, piece: bytes, *, said: bool) -> None:
        if said:
            self._said = (self._said + piece)[:_OUTPUT_BYTES]
        else:
            self._errors = (self._errors + piece)[:_OUTPUT_BYTES]

    def _crossed(self, pid: int) -> tuple[Outcome, str] | None:
        """The bound that the processes below ``pid`` are beyond now."""
        now = time.monotonic()
        if self.began is None:
            late = now - self._started > _BUILD_SECONDS
            return ("timed out", f"not up after {_BUILD_SECONDS:g} s") if late else None
        used, limits = _used(pid), self._limits
        if used.memory_bytes > limits.memory_bytes:
            return "out of bounds", f"{used.memory_bytes >> 20} MiB of memory, {limits.memory_bytes >> 20} allowed"
        if used.cpu_seconds > limits.cpu_seconds:
            return "timed out", "its CPU time was used up"
        self._waited = max(self._waited, used.waited_seconds - self._waited_before)  # who waited may be gone
        if is_late(now - self.began, self._waited, limits.wall_seconds):
            return "timed out", f"not finished after {limits.wall_seconds:g} s"
        return None

    def verdict(self, crossed: tuple[Outcome, str] | None, code: int) -> Verdict:
        """How it ended, from the bound that it crossed, what was said, or its exit code."""
        assert self.began is not None
        seconds = time.monotonic() - self.began
        if crossed is not None:
            return Verdict(outcome=crossed[0], detail=crossed[1], seconds=seconds)
        if self._answered:
            detail = self._said.removeprefix(self._word * 2).decode("utf-8", "replace")
            return Verdict(outcome="passed" if detail == "passed" else "failed", detail=detail, seconds=seconds)
        if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
            return Verdict(outcome="timed out", detail="its CPU time was used up", seconds=seconds)
        return Verdict(outcome="failed", detail=f"ended before its end ({self.last_words(code)})", seconds=seconds)

    def last_words(self, code: int) -> str:
        """The last line of its standard error, or its exit code."""
        lines = self._errors.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:200] if lines else f"exit code {code}"


def is_late(seconds: float, waited_seconds: float, wall_seconds: float) -> bool:
    """Whether a program that began ``seconds`` ago, and waited for a core for a part of it, is out of time."""
    return seconds > wall_seconds * _WAIT_FACTOR or seconds - waited_seconds > wall_seconds


def _feed(process: subprocess.Popen[bytes], waiting: memoryview) -> memoryview:
    assert process.stdin is not None
    try:
        return waiting[os.write(process.stdin.fileno(), waiting[:65536]) :]
    except BlockingIOError:
        return waiting
    except BrokenPipeError:
        return waiting[:0]


@dataclass(frozen=True, kw_only=True)
class _Used:
    """What processes use together; ``waited_seconds``: how long one of them was ready without a core, at most."""

    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    waited_seconds: float = 0.0


def _used(pid: int) -> _Used:
    """What a process and all below it use, reaped children included (proc(5): statm, stat, schedstat)."""
    page, ticks = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
    memory, cpu, waited, todo = 0, 0, 0, [pid]
    while todo:
        one = Path(f"/proc/{todo.pop()}")
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            for task in os.listdir(one / "task"):
                todo += map(int, (one / "task" / task / "children").read_text().split())
            memory += int((one / "statm").read_text().split()[1]) * page
            cpu += sum(map(int, (one / "stat").read_bytes().rpartition(b")")[2].split()[11:15]))
            waited = max(waited, int((one / "schedstat").read_text().split()[1]))
    return _Used(memory_bytes=memory, cpu_seconds=cpu / ticks, waited_seconds=waited / 1e9)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left: the first process of the namespace takes all others with it."""
    for child in _children(process.pid):
        _kill(child)
    _kill(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # without walls there is no namespace that ends with it
    process.wait(10)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


# ---------------------------------------------------------------- the walls


def _command(kind: str, limits: Limits, scratch: str, readable: Sequence[str]) -> list[str]:
    if kind == "none":
        return [*_prlimit(limits), _python(), "-I", "-S", "-B", "-c", _HARNESS]
    paths = [*_SYSTEM, *_FILES, *_python_paths(), *readable]
    inner = [*_prlimit(limits), *_drop(kind), _python(), "-I", "-S", "-B", "-c", _HARNESS]
    size = str(2 * limits.file_bytes)
    if kind == "bubblewrap":
        return [*_bubblewrap(paths, size), *inner]
    return [*_unshare(), "sh", "-c", _UNSHARE_SCRIPT, "sh", scratch, size, *paths, "--", *inner]


def _python() -> str:
    """The real interpreter behind a virtual environment: programs get the standard library alone."""
    return os.path.realpath(sys.executable)


def _python_paths() -> list[str]:
    found = [os.path.realpath(sys.base_prefix), os.path.dirname(os.path.dirname(_python()))]
    return [path for path in dict.fromkeys(found) if not any(Path(path).is_relative_to(s) for s in _SYSTEM[:1])]


def _as_root() -> bool:
    return os.geteuid() == 0


def _bubblewrap(paths: Sequence[str], size: str) -> list[str]:
    command = [
        _which("bwrap") or "bwrap",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    if _as_root():  # the mounts need no user namespace; the uid is changed by setpriv, the last thing inside
        command += [
            "--cap-drop",
            "ALL",
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "--cap-add",
            "CAP_SETPCAP",
        ]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
    above = sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})
    for parent in above:  # open to all: the program is another user than the one who made them
        if parent not in paths:
            command += ["--perms", "0755", "--dir", parent]
    for path in paths:
        if os.path.islink(path):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind-try", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/tmp", "--chmod", "1777", "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _unshare() -> list[str]:
    command = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    return command if _as_root() else [*command, "--user", "--map-root-user"]


def _prlimit(limits: Limits) -> list[str]:
    return [
        "prlimit", f"--as={limits.memory_bytes}", f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}",
        f"--nproc={limits.processes}", f"--fsize={limits.file_bytes}", f"--nofile={limits.open_files}", "--core=0",
    ]  # fmt: skip


def _drop(kind: str) -> list[str]:
    """Away with uid (where we are root) and capabilities, for good."""
    rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if _as_root():
        uid = str(random.SystemRandom().randrange(1 << 20, 1 << 21))  # nobody's: its processes are counted alone
        return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *rights]
    return ["setpriv", *rights] if kind == "unshare" else []
