"""``planaria eval`` and ``planaria watch`` as commands: exit codes, one-line errors, files, second runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from planner.processes import STACK_VARIABLE, marked
from tests.support.lm_tasks import write_tasks
from tests.support.redis import await_that
from tests.support.tiny_model import write_model

pytestmark = pytest.mark.timeout(900)


class World:
    """A model, tasks, and the environment that commands run in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_model(folder / "model", seed=7)
        self.tasks = write_tasks(folder / "tasks", documents=10)
        self.environment = os.environ | {
            "PLANARIA_CACHE": str(folder / "cache"),
            "XDG_STATE_HOME": str(folder / "state"),
            "TMPDIR": str(folder / "tmp"),
            STACK_VARIABLE: folder.name,
        }
        (folder / "tmp").mkdir()

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "planner.cli", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=600, check=False, env=self.environment
        )

    def eval(self, *more: str, tasks: str = "choice_plain,rolling") -> subprocess.CompletedProcess[str]:
        return self.run("eval", str(self.model), "--tasks", tasks, "--include-path", str(self.tasks), *more)

    def leftovers(self) -> list[str]:
        """What a command would leave behind: folders of a private fleet, processes."""
        folders = sorted(path.name for path in (self.folder / "tmp").glob("planaria-eval-*"))
        return folders + [str(process) for process in marked(self.folder.name)]

    def await_nothing_left(self) -> None:
        """A process that was told to end may take a moment."""
        await_that(lambda: self.leftovers() == [], 5, f"the private fleet is gone with its owner: {self.leftovers()}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("eval-command"))


@pytest.fixture(scope="module")
def first(world: World) -> dict[str, Any]:
    """The one evaluation with a real engine that the tests of this module look at."""
    done = world.eval("--output", str(world.folder / "out"), "--json", "--limit", "6")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("\n") == 1, "exactly one JSON document"
    return json.loads(done.stdout)


def test_it_writes_lm_evals_files_and_says_what_it_did(world: World, first: dict[str, Any]) -> None:
    assert first["path"] == str(world.folder / "out" / "results.json")
    assert first["requests"] == first["requests_run"] == 6 * 4 + 6
    written = json.loads(Path(first["path"]).read_text())
    assert written["results"]["choice_plain"]["acc,none"] == first["results"]["choice_plain"]["acc,none"]
    assert written["planaria"]["batch_check"]["checked"] > 0
    assert len((world.folder / "out" / "samples_rolling.jsonl").read_text().splitlines()) == 6
    world.await_nothing_left()


def test_a_second_run_runs_nothing_and_says_the_same(world: World, first: dict[str, Any]) -> None:
    done = world.eval("--output", str(world.folder / "out"), "--json", "--limit", "6")
    second = json.loads(done.stdout)
    assert second["requests_run"] == 0
    assert second["results"] == first["results"]
    assert "0 of 30 requests run" in done.stderr
    world.await_nothing_left()


@pytest.mark.parametrize(
    ("arguments", "tasks", "words"),
    [
        ((), "choice_plane", ("unknown task 'choice_plane'", "choice_plain")),
        ((), " , ", ("--tasks", "no task is named")),
        (("--limit", "0"), "rolling", ("--limit 0",)),
        (("--limit", "-3"), "rolling", ("--limit -3",)),
        (("--samples", "{"), "rolling", ("--samples", "JSON")),
        (("--samples", '{"rolling": [0]}', "--limit", "2"), "rolling", ("--limit and --samples",)),
        (("--fewshot-as-multiturn",), "rolling", ("--fewshot-as-multiturn", "--apply-chat-template")),
        (("--gen-kwargs", "nonsense"), "rolling", ("--gen-kwargs nonsense",)),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    world: World, tmp_path: Path, arguments: tuple[str, ...], tasks: str, words: tuple[str, ...]
) -> None:
    done = world.eval("--output", str(tmp_path / "bad"), *arguments, tasks=tasks)
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("planaria: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in last
    assert not (tmp_path / "bad" / "results.json").exists()
    world.await_nothing_left()


def test_models_that_cannot_be_are_refused_before_anything_is_loaded(world: World, tmp_path: Path) -> None:
    import shutil

    assert "no such directory" in world.run("eval", str(tmp_path / "no"), "--tasks", "rolling").stderr
    (tmp_path / "empty").mkdir()
    done = world.run("eval", str(tmp_path / "empty"), "--tasks", "rolling")
    assert done.returncode == 2
    assert "config.json" in done.stderr
    odd = tmp_path / "odd"
    shutil.copytree(world.model, odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"head_dim": 24}))
    done = world.run("eval", str(odd), "--tasks", "rolling", "--include-path", str(world.tasks))
    assert done.returncode == 2
    assert "head size 24 cannot be served on CPU" in done.stderr
    (odd / "model.safetensors").unlink()
    done = world.run("eval", str(odd), "--tasks", "rolling")
    assert done.returncode == 2
    assert "model.safetensors is missing" in done.stderr


def test_two_evaluations_into_one_folder_are_refused(world: World, first: dict[str, Any]) -> None:
    import fcntl

    with (world.folder / "out" / ".planaria" / "lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        done = world.eval("--output", str(world.folder / "out"))
    assert done.returncode == 2
    assert "another evaluation writes there now" in done.stderr


def test_an_unwritable_folder_is_refused_for_an_ordinary_user(world: World, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    tmp_path.chmod(0o755)
    # Everything is imported before the privileges go: an ordinary user need not be able to read this interpreter.
    code = (
        "import email.parser; from pathlib import Path; from tests.support.redis import drop_to_nobody\n"
        "from evalsched.evaluate import busy_folder\n"
        f"drop_to_nobody(Path({str(tmp_path)!r}))\n"
        "try:\n"
        f"    with busy_folder(Path({str(locked / 'out')!r})): pass\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "BadInputError" in done.stdout, done.stderr
    assert "cannot be written (Permission denied)" in done.stdout


def test_kill_9_in_the_middle_and_again_repeats_only_what_was_in_flight(world: World, tmp_path: Path) -> None:
    """The command itself is killed; its private Redis and workers go with it; the ledger keeps what was answered."""
    import sqlite3

    output = tmp_path / "out"
    command = world.command(
        "eval", str(world.model), "--tasks", "choice_plain,choice_mutual,rolling,last_word,choice_inputs",
        "--include-path", str(world.tasks), "--output", str(output), "--json",
    )  # fmt: skip

    def answered() -> int:
        path = output / ".planaria" / "evaluation.sqlite"
        if not path.exists():
            return 0
        try:
            with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
                return int(connection.execute("select count(*) from responses").fetchone()[0])
        except sqlite3.Error:
            return 0

    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=world.environment, start_new_session=True
    )
    await_that(lambda: answered() > 0 or process.poll() is not None, 400)
    process.send_signal(signal.SIGKILL)
    process.wait()
    world.await_nothing_left()
    before = answered()
    assert before > 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=world.environment)
    assert done.returncode == 0, done.stderr[-2000:]
    again = json.loads(done.stdout)
    assert again["requests_run"] == again["requests"] - before


def test_sigterm_ends_in_order_and_says_run_me_again(world: World, tmp_path: Path) -> None:
    command = world.command(
        "eval", str(world.model), "--tasks", "rolling", "--include-path", str(world.tasks), "--output", str(tmp_path)
    )
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=world.environment
    )
    await_that(lambda: any(name.startswith("planaria-eval-") for name in world.leftovers()), 60)
    time.sleep(0.3)
    process.terminate()
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "run it again" in complaint
    world.await_nothing_left()  # be it in the middle of recording


def test_the_python_call_gives_the_same_numbers(world: World, first: dict[str, Any]) -> None:
    """Another list of tasks is recorded anew, but its requests are in the ledger."""
    code = (
        "import evalsched, json\n"
        f"result = evalsched.evaluate({str(world.model)!r}, 'rolling,rolling', limit=6,"
        f" include_path=({str(world.tasks)!r},), output={str(world.folder / 'out')!r})\n"
        "print(json.dumps([result.requests, result.requests_run, result.results], default=str))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=world.environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    requests, run, results = json.loads(done.stdout)
    assert (requests, run) == (6, 0)
    assert results == {"rolling": first["results"]["rolling"]}


def test_watch_refuses_what_it_cannot_do(world: World, tmp_path: Path) -> None:
    for arguments, word in (
        ((str(tmp_path / "no"),), "no such directory"),
        ((str(tmp_path), "--order", "random"), "--order random"),
    ):
        done = world.run("watch", *arguments, "--tasks", "rolling", "--once")
        assert done.returncode == 2
        assert word in done.stderr


def test_watch_evaluates_each_checkpoint_once(world: World, tmp_path: Path) -> None:
    import shutil

    for step in (100, 200):
        shutil.copytree(world.model, tmp_path / "in" / f"checkpoint-{step}")
    write_model(tmp_path / "in" / "checkpoint-200", seed=8)
    (tmp_path / "in" / "checkpoint-300").mkdir()
    shutil.copy(world.model / "config.json", tmp_path / "in" / "checkpoint-300")
    arguments = ("watch", str(tmp_path / "in"), "--tasks", "rolling", "--include-path", str(world.tasks), "--once")
    arguments += ("--output", str(tmp_path / "out"), "--limit", "6", "--order", "oldest")
    done = world.run(*arguments)
    assert done.returncode == 6, done.stderr[-2000:]
    assert "gate: step 200 regresses: rolling" in done.stderr
    assert done.stdout.index("checkpoint-100, step 100") < done.stdout.index("checkpoint-200, step 200")
    assert "checkpoint-300: not complete" in done.stderr
    one, two = (json.loads((tmp_path / "out" / f"checkpoint-{n}" / "results.json").read_text()) for n in (100, 200))
    assert one["results"]["rolling"] != two["results"]["rolling"]
    again = world.run(*arguments)
    assert again.returncode == 6
    assert again.stderr.count("evaluated before") == 2
    world.await_nothing_left()
