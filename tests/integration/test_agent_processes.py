"""Processes of an agent: exits seen, families ended, adoption after the agent's own death."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.agent_processes import Exit, Launch, ProcessTable, Watched, find_family, kill_family, log_tail
from pretrain.nursery import ForkedChild, Nursery
from tests.support.redis import await_that

PY = sys.executable

FORKER = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def child(name, *, session, clear):
    if os.fork() == 0:
        if session:
            os.setsid()
        if clear:
            script = f"import os, time; open({str(folder / name)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
            os.execve(sys.executable, [sys.executable, "-c", script], {})
        (folder / name).write_text(str(os.getpid()))
        time.sleep(300)
        os._exit(0)
child("plain", session=False, clear=False)
child("own-session", session=True, clear=False)
child("no-marker", session=False, clear=True)
child("neither", session=True, clear=True)
while len(list(folder.iterdir())) < 4:
    time.sleep(0.01)
(folder / "ready").write_text("x")
time.sleep(300)
"""


class Shell:
    """A process table with its selector, served by hand."""

    def __init__(self, folder: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.table = ProcessTable(folder / "processes", self.selector)
        self.folder = folder

    def launch(self, key: str, *program: str, **more: object) -> Watched:
        return self.table.start(
            Launch(
                key=key, argv=program, env=dict(os.environ), log=self.folder / "logs" / f"{key}.log",
                about={"kind": "test"}, **more,  # type: ignore[arg-type]
            )
        )  # fmt: skip

    def serve(self, seconds: float = 10.0) -> Exit:
        """The next exit."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            due = self.table.next_deadline()
            wait = limit - time.monotonic() if due is None else max(0.0, due - time.monotonic())
            for key, _ in self.selector.select(wait):
                return self.table.reap(key.data)
            self.table.kill_overdue(time.monotonic())
        raise AssertionError("nothing exited")


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_an_exit_is_seen_with_its_code_or_signal_and_last_words(shell: Shell) -> None:
    shell.launch("a", PY, "-c", "print('last words'); raise SystemExit(7)")
    end = shell.serve()
    assert (end.exit_code, end.signal, end.tail) == (7, None, "last words")
    process = shell.launch("b", PY, "-c", "import time; time.sleep(60)")
    os.kill(process.pid, signal.SIGKILL)
    end = shell.serve()
    assert (end.exit_code, end.signal, end.process.asked) == (None, 9, False)
    assert len(shell.table) == 0
    assert not list((shell.folder / "processes").iterdir())


def test_temporary_files_go_with_their_process_however_it_ended(shell: Shell) -> None:
    code = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(60)"
    process = shell.launch("a", PY, "-c", code)
    await_that(lambda: log_tail(process.log) != "", 10)
    made = Path(log_tail(process.log))
    assert made.is_dir()
    assert made.parents[1] == shell.folder / "scratch"
    os.kill(process.pid, signal.SIGKILL)
    shell.serve()
    assert not list((shell.folder / "scratch").iterdir())


def test_a_key_runs_once(shell: Shell) -> None:
    first = shell.launch("a", PY, "-c", "import time; time.sleep(60)")
    with pytest.raises(ValueError, match="runs already"):
        shell.launch("a", PY, "-c", "pass")
    shell.table.end(first, 0)
    shell.serve()


def test_a_program_that_is_not_there_leaves_nothing(shell: Shell) -> None:
    with pytest.raises(OSError, match="No such file"):
        shell.launch("a", "/nowhere/program")
    assert len(shell.table) == 0
    assert not list((shell.folder / "processes").iterdir())


def test_who_ignores_sigterm_is_killed_after_the_grace_and_a_stopped_one_wakes_to_take_it(shell: Shell) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    process = shell.launch("a", PY, "-c", deaf)
    await_that(lambda: "deaf" in log_tail(process.log), 10)
    began = time.monotonic()
    shell.table.end(process, 0.3)
    end = shell.serve()
    assert end.signal == 9
    assert end.process.asked
    assert time.monotonic() - began >= 0.3
    process = shell.launch("b", PY, "-c", "import time; time.sleep(60)")
    os.kill(process.pid, signal.SIGSTOP)
    shell.table.end(process, 20.0)
    assert shell.serve().signal == 15


def test_the_whole_family_goes_with_its_leader(tmp_path: Path) -> None:
    """Also who left the session, dropped the marker, or both: the last kind is found as an orphan of ours."""
    folder = tmp_path / "pids"
    folder.mkdir()
    script = (
        "import os, sys, selectors, time\n"
        "from pathlib import Path\n"
        "from pretrain.agent_processes import *\n"
        "become_subreaper()\n"
        "selector = selectors.DefaultSelector()\n"
        "table = ProcessTable(Path(sys.argv[1]) / 'state', selector)\n"
        "pids = Path(sys.argv[1]) / 'pids'\n"
        f"launch = Launch(key='k', argv=(sys.executable, '-c', {FORKER!r}, str(pids)), env=dict(os.environ),\n"
        "                log=Path(sys.argv[1]) / 'log', about={'kind': 'test'})\n"
        "process = table.start(launch)\n"
        "while not (pids / 'ready').exists(): time.sleep(0.01)\n"
        "table.kill(process)\n"
        "selector.select()\n"
        "print(table.reap(process).leftovers)\n"
    )
    said = subprocess.run([PY, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == "[]"
    pids = {path.name: int(path.read_text()) for path in folder.iterdir() if path.name != "ready"}
    assert set(pids) == {"plain", "own-session", "no-marker", "neither"}
    await_that(lambda: all(gone(pid) for pid in pids.values()), 5, f"{pids} are gone")


def test_children_that_were_there_before_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen([PY, "-c", "import time; time.sleep(60)"])
    shell = Shell(tmp_path)
    shell.launch("quick", PY, "-c", "")
    shell.serve()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_a_successor_adopts_what_runs_and_ends_what_the_dead_left_behind(shell: Shell) -> None:
    living = shell.launch("living", PY, "-c", "import time; time.sleep(60)", lease="l1", slots=(1,))
    dead = shell.launch("dead", PY, "-c", "import os, time; os.fork() or time.sleep(60); time.sleep(60)")
    await_that(lambda: len(find_family(dead.pid, dead.marker)) == 2, 10)
    os.kill(dead.pid, signal.SIGKILL)
    assert dead.child is not None
    dead.child.wait()
    assert find_family(dead.pid, dead.marker), "a child is left"
    successor = Shell(shell.folder)
    (successor.folder / "processes" / "torn.json").write_text("{")
    alive, ended = successor.table.adopt()
    assert [(p.key, p.pid, p.lease, p.slots, p.child) for p in alive] == [("living", living.pid, "l1", (1,), None)]
    assert [(e.process.key, e.exit_code, e.leftovers) for e in ended] == [("dead", None, [])]
    assert not find_family(dead.pid, dead.marker)
    os.kill(living.pid, signal.SIGKILL)
    assert living.child is not None
    living.child.wait()
    end = successor.serve()
    assert (end.process.key, end.exit_code, end.signal) == ("living", None, None), "not its parent: no code to learn"
    assert not list((shell.folder / "processes").iterdir())


def test_another_process_that_got_the_pid_is_not_adopted(shell: Shell) -> None:
    process = shell.launch("a", PY, "-c", "import time; time.sleep(60)")
    path = next((shell.folder / "processes").glob("*.json"))
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"started": state["started"] - 1}))
    successor = Shell(shell.folder)
    alive, ended = successor.table.adopt()
    assert alive == []
    assert [e.process.key for e in ended] == ["a"]
    assert kill_family(process.pid, process.marker) == []
    shell.serve()


def test_the_tail_of_a_log_is_bounded_and_never_fails(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert log_tail(path) == ""
    path.write_bytes(b"x" * 100_000 + b"\n" + b"\n".join(b"line %d \xff" % n for n in range(50)))
    tail = log_tail(path).splitlines()
    assert len(tail) == 20
    assert tail[-1].startswith("line 49")


# ---------------------------------------------------------------- ranks by fork


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A nursery that is ready."""
    found = Nursery(PY, dict(os.environ), tmp_path_factory.mktemp("nursery") / "log")
    await_that(lambda: found.ready, 60, "the imports are done")
    yield found
    found.close()


def test_a_forked_rank_is_watched_as_any_other(shell: Shell, nursery: Nursery) -> None:
    """It reads its own arguments, writes its own log, has its own session, and its exit code is known."""
    launch = Launch(
        key="r", argv=(PY, "-m", "pretrain.rank", "/nowhere/spec.json"), env={**os.environ, "MINE": "1"},
        log=shell.folder / "logs" / "r.log", about={"kind": "test"},
    )  # fmt: skip
    rank = shell.table.start(launch, nursery)
    assert isinstance(rank.child, ForkedChild)
    ended = shell.serve()
    assert (ended.exit_code, ended.signal) == (2, None)
    assert "/nowhere/spec.json: cannot be read" in ended.tail


def test_a_forked_rank_that_is_killed_says_the_signal(shell: Shell, nursery: Nursery, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec")  # reading it waits for ever
    launch = Launch(
        key="r", argv=(PY, "-m", "pretrain.rank", str(tmp_path / "spec")), env=dict(os.environ),
        log=shell.folder / "logs" / "r.log", about={"kind": "test"},
    )  # fmt: skip
    rank = shell.table.start(launch, nursery)
    await_that(lambda: os.getsid(rank.pid) == rank.pid, 5, "it has a session of its own")
    shell.table.kill(rank)
    ended = shell.serve()
    assert (ended.exit_code, ended.signal, ended.leftovers) == (None, 9, [])


def test_a_nursery_that_dies_leaves_its_ranks_and_is_asked_no_more(nursery: Nursery, tmp_path: Path) -> None:
    """The last test of the nursery, which it ends."""
    os.mkfifo(tmp_path / "spec")
    child = nursery.fork([str(tmp_path / "spec")], dict(os.environ), tmp_path / "rank.log")
    assert child is not None
    os.kill(nursery.pid, signal.SIGKILL)
    await_that(lambda: not nursery.alive, 5, "it is gone")
    assert not gone(child.pid)
    assert nursery.fork(["x"], {}, tmp_path / "x.log") is None
    os.kill(child.pid, signal.SIGKILL)
    await_that(lambda: gone(child.pid), 5, "the rank is gone too")
