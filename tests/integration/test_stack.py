"""``planaria up`` and ``down``: nothing is left, whatever was killed, and a busy or unusable directory is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.processes import ProcessId, marked
from planner.scratch import scratch_of
from planner.stack import Stack, stop_stack
from tests.support.redis import await_that, end_server

PLANARIA = [sys.executable, "-m", "planner.cli"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment without any cluster."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PLANARIA_")}
    return {**clean, "XDG_STATE_HOME": str(tmp_path / "xdg"), "COLUMNS": "200"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "state"
    yield place
    if place.is_dir():
        stop_stack(place)


def planaria(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PLANARIA, *arguments], env=environment, capture_output=True, text=True, timeout=90)


def up(folder: Path, environment: dict[str, str], *more: str) -> dict[str, Any]:
    done = planaria("up", "--state-dir", str(folder), "--json", *more, environment=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def stack_of(folder: Path) -> Stack:
    stack = Stack.load(folder)
    assert stack is not None
    return stack


def port_of(stack: Stack) -> int:
    return int(stack.url.rpartition(":")[2].partition("/")[0])


def assert_nothing_left(stack: Stack, port: int) -> None:
    assert marked(stack.id) == []
    assert not any(process.alive() for process in stack.processes.values())
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the Redis port still answers"
    assert not stack.shm.exists()
    assert not [path for path in Path("/dev/shm").iterdir() if stack.id in path.name]
    assert not (stack.state_dir / "cluster.json").exists()


def test_up_status_down_and_nothing_is_left(folder: Path, environment: dict[str, str]) -> None:
    shown = up(folder, environment, "--slots", "2")
    assert set(shown["processes"]) == {"redis", "coordinator", "agent", "dashboard"}
    stack = stack_of(folder)
    port = port_of(stack)
    assert (folder / "cluster.json").stat().st_mode & 0o777 == 0o600
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    for process in stack.processes.values():
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        assert stack.secret not in line
        assert stack.url.split("@")[0].rpartition(":")[2] not in line, "the password is on a command line"

    status = planaria("status", "--json", environment=environment)  # found through the last `up`
    assert status.returncode == 0, status.stderr
    document = json.loads(status.stdout)
    assert document["jobs"] == []
    assert [(row["node"], row["slot"], row["holder"]) for row in document["slots"]] == [
        ("local", 0, None),
        ("local", 1, None),
    ]
    assert {"queued", "running", "done", "workers"} <= document["evaluation"].keys()
    done = planaria("drain", "locl", environment=environment)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "did you mean local" in done.stderr

    again = planaria("up", "--state-dir", str(folder), environment=environment)
    assert again.returncode == 2
    assert len(again.stderr.strip().splitlines()) == 1
    assert "a stack is up there already" in again.stderr
    assert all(process.alive() for process in stack.processes.values()), "the refused one did harm"

    done = planaria("down", environment=environment)
    assert done.returncode == 0, done.stderr
    assert_nothing_left(stack, port)
    assert planaria("down", "--state-dir", str(folder), environment=environment).returncode == 0
    gone = planaria("status", environment=environment)
    assert gone.returncode == 3
    assert len(gone.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("victim", ["redis", "coordinator", "agent", "all"])
def test_down_leaves_nothing_after_a_kill(folder: Path, environment: dict[str, str], victim: str) -> None:
    up(folder, environment, "--slots", "1", "--no-dashboard")
    stack = stack_of(folder)
    port = port_of(stack)
    scratch = scratch_of(folder / "nodes" / stack.node)
    assert scratch is not None
    assert scratch.is_dir()
    orphan = subprocess.Popen(  # what a killed agent leaves behind: in its own session, with shared memory
        [sys.executable, "-c", "import mmap,sys,time; f=open(sys.argv[1],'w+b'); f.truncate(4096);"
         "m=mmap.mmap(f.fileno(),4096); f.close(); print('ready',flush=True); time.sleep(600)",
         f"/dev/shm/psm_{stack.id}"],
        env={**environment, "PLANARIA_STACK": stack.id}, start_new_session=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert orphan.stdout is not None
    assert orphan.stdout.readline() == b"ready\n"
    for name, process in stack.processes.items():
        if victim in (name, "all"):
            os.kill(process.pid, signal.SIGKILL)
            await_that(lambda p=process: not p.alive(), 5.0)
    begun = time.monotonic()
    done = planaria("down", "--state-dir", str(folder), environment=environment)
    assert done.returncode == 0, done.stderr
    assert not scratch.exists()
    assert time.monotonic() - begun < 40
    orphan.wait(timeout=5)
    orphan.stdout.close()
    assert_nothing_left(stack, port)


def test_up_after_everything_was_killed_starts_anew_with_the_old_data(
    folder: Path, environment: dict[str, str]
) -> None:
    from planner.store import ClusterStore

    up(folder, environment, "--slots", "1", "--no-dashboard")
    old = stack_of(folder)
    store = ClusterStore(old.url, old.secret, patience=5.0)
    store.put_job("j", {"state": "running"})
    store.close()
    time.sleep(1.2)
    for process in marked(old.id):
        process.kill(signal.SIGKILL)
    await_that(lambda: not marked(old.id), 10.0)
    up(folder, environment, "--slots", "1", "--no-dashboard")
    new = stack_of(folder)
    assert new.id != old.id
    assert new.secret == old.secret, "tokens of the jobs must stay valid"
    assert not old.shm.exists()
    status = json.loads(planaria("status", "--state-dir", str(folder), "--json", environment=environment).stdout)
    assert [job["id"] for job in status["jobs"]] == ["j"]


def test_a_pid_that_was_given_to_another_process_is_not_signalled(folder: Path, environment: dict[str, str]) -> None:
    up(folder, environment, "--slots", "1", "--no-dashboard")
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        stack = stack_of(folder)
        old = stack.processes["coordinator"]
        stack.processes["coordinator"] = ProcessId(stranger.pid, old.start)
        stack.save()
        assert planaria("down", "--state-dir", str(folder), environment=environment).returncode == 0
        assert stranger.poll() is None
        assert not old.alive(), "it was found by its mark"
    finally:
        stranger.kill()
        stranger.wait()


def test_a_failing_start_tears_all_down(folder: Path, environment: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\nif 'agent' in sys.orig_argv:\n    sys.exit('no agent today')\n"
    )
    done = planaria("up", "--state-dir", str(folder), environment={**environment, "PYTHONPATH": str(broken)})
    assert done.returncode == 1, done.stdout
    (line,) = done.stderr.strip().splitlines()
    assert "agent" in line
    assert "no agent today" in line
    assert not (folder / "cluster.json").exists()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            assert f"PLANARIA_STATE_DIR={folder}".encode() not in path.read_bytes().split(b"\0")
        except OSError:
            continue
    assert planaria("status", "--state-dir", str(folder), environment=environment).returncode == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_up_that_is_ended_half_way_leaves_nothing_or_what_down_ends(
    folder: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    starting = subprocess.Popen(
        [*PLANARIA, "up", "--state-dir", str(folder)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip

    def half_way() -> bool:
        return (folder / "cluster.json").exists() and "coordinator" in stack_of(folder).processes

    await_that(half_way, 30.0, "the coordinator was started")
    stack = stack_of(folder)
    starting.send_signal(number)
    starting.communicate(timeout=30)
    if number is signal.SIGKILL:
        refused = planaria("up", "--state-dir", str(folder), environment=environment)
        assert refused.returncode == 2, refused.stderr
        assert planaria("down", "--state-dir", str(folder), environment=environment).returncode == 0
    elif starting.returncode == 0:  # on a busy machine everything was up before the signal came
        assert planaria("down", "--state-dir", str(folder), environment=environment).returncode == 0
    else:
        assert starting.returncode == 130
    assert_nothing_left(stack, port_of(stack))


def test_a_redis_in_which_a_cluster_is_active_is_not_taken_by_a_second_one(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    up(folder, environment, "--slots", "1", "--no-dashboard")
    second = tmp_path / "second"
    done = planaria("up", "--state-dir", str(second), "--url", stack_of(folder).url, environment=environment)
    assert done.returncode == 2
    assert "a cluster is active there already" in done.stderr
    assert not second.exists()


def test_redis_unreachable_or_refusing_is_exit_3_and_nothing_is_made(
    folder: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    from planner.redis_server import free_port, start_redis

    server = start_redis(tmp_path / "redis")
    try:
        wrong = f"redis://:hunter2@127.0.0.1:{server.port}/0"
        away = f"redis://127.0.0.1:{free_port()}/0"
        start = ("up", "--state-dir", str(folder))
        for arguments, url, word in (
            (start, wrong, "password"),
            (("status",), wrong, "password"),
            (start, away, "not reachable"),
        ):
            done = planaria(*arguments, "--url", url, environment=environment)
            assert done.returncode == 3, (arguments, done.stderr)
            (line,) = done.stderr.strip().splitlines()
            assert word in line
            assert "hunter2" not in line
            assert not folder.exists()
    finally:
        end_server(server)


def test_a_state_directory_that_is_none_is_exit_2(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for place in (file, file / "below"):
        done = planaria("up", "--state-dir", str(place), environment=environment)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.strip().splitlines()
        assert str(place) in line
        assert "not a directory" in line


AS_NOBODY = """
import difflib, sys
import planner.cli, planner.stack, planner.status  # the interpreter's own files may be closed to others
from pathlib import Path
from tests.support.redis import drop_to_nobody
drop_to_nobody(Path("/"))
sys.argv = ["planaria", *sys.argv[1:]]
from planner.cli import main
main()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_directory_is_exit_2_and_their_secrets_are_unreadable(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    import shutil
    import tempfile

    base = Path(tempfile.mkdtemp(prefix="planaria-permissions-", dir="/tmp"))
    try:
        base.chmod(0o755)
        (base / "theirs").mkdir(mode=0o755)
        (base / "theirs" / "cluster.json").write_text("{}")
        (base / "theirs" / "cluster.json").chmod(0o600)
        (base / "theirs" / "secret").write_text("ab" * 32)
        (base / "theirs" / "secret").chmod(0o600)
        mine = {**environment, "XDG_STATE_HOME": str(base / "none")}
        for command in ("up", "status", "down"):
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, command, "--state-dir", str(base / "theirs")],
                env=mine, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert done.returncode == 2, (command, done.stderr)
            (line,) = done.stderr.strip().splitlines()
            assert str(base / "theirs") in line
        made = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, "up", "--state-dir", str(base / "theirs" / "below")],
            env=mine, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert made.returncode == 2
        assert "not writable" in made.stderr
        assert sorted(path.name for path in (base / "theirs").iterdir()) == ["cluster.json", "secret"]
    finally:
        shutil.rmtree(base)
