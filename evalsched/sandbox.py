"""Running programs that a model wrote: no network, no secrets, an empty directory, limits on everything.

Two ways to the same walls: bubblewrap where it is installed, else user namespaces through ``unshare``,
``mount`` and ``setpriv``. Inside, a program sees the system's libraries and the Python installation, both
read-only, a private ``/tmp`` in memory, and nothing else; it is a user of its own (an unused uid where we
are root, the caller in a namespace of its own otherwise) without any capability, alone in its process
namespace, which ends with it.

The verdict is written by a harness in the same interpreter, with a word that only it was told, so that a
program that exits early with code 0 has not passed. A program that searches the interpreter for the
harness can forge its own verdict, as with the reference executor; it cannot leave the sandbox.
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
    cpu_seconds: int = 10
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
    verdict = run_program("assert 1 + 1 == 2", Limits(wall_seconds=20), kind=kind)
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
        MissingServiceError: there is no sandbox here.
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
        MissingServiceError: there is no sandbox here.
    """
    bounds = limits or Limits()
    chosen = kind or available()
    word = secrets.token_hex(16)
    job = json.dumps({"program": program, "word": word}).encode()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planaria-sandbox-") as scratch:
        command = _command(chosen, bounds, scratch, readable)
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=scratch,
            env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}, start_new_session=True,
        )  # fmt: skip
        try:
            said, errors, why = _follow(process, job, bounds, started)
        finally:
            _end(process)
    seconds = time.monotonic() - started
    if why is not None:
        return Verdict(outcome=why[0], detail=why[1], seconds=seconds)
    text = said.decode("utf-8", "replace")
    if text.startswith(word):
        detail = text.removeprefix(word)
        return Verdict(outcome="passed" if detail == "passed" else "failed", detail=detail, seconds=seconds)
    code = process.returncode
    if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return Verdict(outcome="timed out", detail="its CPU time was used up", seconds=seconds)
    last = errors.decode("utf-8", "replace").strip().splitlines()[-1:] or [f"exit code {code}"]
    return Verdict(outcome="failed", detail=f"ended before its end ({last[0][:200]})", seconds=seconds)


def _follow(
    process: subprocess.Popen[bytes], job: bytes, limits: Limits, started: float
) -> tuple[bytes, bytes, tuple[Outcome, str] | None]:
    """Feed the job, take what is said (bounded), and watch time and memory until the end."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    taken = {process.stdout: b"", process.stderr: b""}
    waiting = memoryview(job)
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(stream.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.get_map():
            if time.monotonic() - started > limits.wall_seconds:
                return b"", b"", ("timed out", f"not finished after {limits.wall_seconds:g} s")
            if (used := _memory(process.pid)) > limits.memory_bytes:
                return b"", b"", ("out of bounds", f"{used >> 20} MiB of memory, {limits.memory_bytes >> 20} allowed")
            for key, _ in selector.select(_POLL_SECONDS):
                if key.fileobj is process.stdin:
                    waiting = _feed(process, waiting)
                    if not waiting:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                piece = os.read(key.fd, 65536)
                if not piece:
                    selector.unregister(key.fileobj)
                taken[key.fileobj] = (taken[key.fileobj] + piece)[:_OUTPUT_BYTES]  # type: ignore[index]
    try:
        process.wait(max(0.1, limits.wall_seconds - (time.monotonic() - started)))
    except subprocess.TimeoutExpired:
        return b"", b"", ("timed out", f"not finished after {limits.wall_seconds:g} s")
    return taken[process.stdout], taken[process.stderr], None


def _feed(process: subprocess.Popen[bytes], waiting: memoryview) -> memoryview:
    assert process.stdin is not None
    try:
        return waiting[os.write(process.stdin.fileno(), waiting[:65536]) :]
    except BlockingIOError:
        return waiting
    except BrokenPipeError:
        return waiting[:0]


def _memory(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, todo = 0, [pid]
    while todo:
        one = todo.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * page
            for task in os.listdir(f"/proc/{one}/task"):
                todo += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except (OSError, ValueError, IndexError):
            continue  # it ended meanwhile
    return total


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
