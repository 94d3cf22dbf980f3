"""Workers killed, poisoned, hung and slow; schedulers killed: the results are those of the run without the fault."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalsched.app import make_app
from evalsched.conductor import Conductor
from evalsched.evaluate import run_to_end
from evalsched.ledger import Ledger, sqlite_url
from evalsched.local import LocalFleet
from evalsched.runs import Run, RunSpec
from evalsched.scoring import score
from evalsched.types import EvalSettings
from planner.errors import WorkFailedError
from planner.events import Action, TrialState
from tests.support.lm_tasks import write_tasks
from tests.support.redis import await_that
from tests.support.tiny_model import write_model

pytestmark = pytest.mark.timeout(600)
STUB = (sys.executable, "-m", "tests.support.stub_worker")
TASKS = ("choice_plain", "last_word", "rolling")


class World:
    """Tasks, a model and a recording cache that all tests of this module share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tasks = write_tasks(folder / "tasks", documents=12)
        self.model = write_model(folder / "model")
        self.settings = EvalSettings(tasks=TASKS, include_path=(str(self.tasks),), bootstrap_iters=0)
        self.expected: dict[str, Any] = {}

    def spec(self, output: Path, **more: Any) -> RunSpec:
        return RunSpec(
            model=str(self.model), settings=self.settings, output=str(output), created=time.time(), target_seconds=0.05,
            **more,
        )  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("conductor")
    old = os.environ.get("PLANARIA_CACHE")
    os.environ["PLANARIA_CACHE"] = str(folder / "cache")
    world = World(folder)
    with fleet(1) as one, Ledger(sqlite_url(folder / "first.sqlite"), 1) as ledger:
        (run,) = run_to_end([world.spec(folder / "first")], ledger, one, scorer=score)
    world.expected = results(run)
    yield world
    if old is None:
        del os.environ["PLANARIA_CACHE"]
    else:
        os.environ["PLANARIA_CACHE"] = old


@contextmanager
def fleet(workers: int, **environment: str) -> Iterator[LocalFleet]:
    old = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with LocalFleet(workers, 1, STUB, metric=False) as made:
            yield made
    finally:
        for name, value in old.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def results(run: Run) -> dict[str, Any]:
    assert run.outcome is not None
    return json.loads(json.dumps(run.outcome.metrics, default=str))


def events(fleet: LocalFleet, action: Action) -> list[Any]:
    return [one.payload for one in fleet.store.read_events("0-0") if one.payload and one.payload.action is action]


def while_running(fleet: LocalFleet, do: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=do)
    thread.start()
    return thread


def test_a_killed_worker_costs_only_what_it_had_in_hand(world: World, tmp_path: Path) -> None:
    with fleet(2, STUB_SECONDS="0.03") as two, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:

        def kill_one() -> None:
            await_that(lambda: len(events(two, Action.SHARD_COMPLETED)) >= 3)
            os.kill(next(iter(two.processes().values())), signal.SIGKILL)

        thread = while_running(two, kill_one)
        (run,) = run_to_end([world.spec(tmp_path / "out")], ledger, two, scorer=score)
        thread.join()
        died = [one for one in events(two, Action.WORKER_EXITED) if "signal 9" in one.reason]
        failed = events(two, Action.SHARD_FAILED)
    assert len(died) == 1
    assert len(failed) <= 1
    assert results(run) == world.expected
    assert run.failed == {}


def test_fewer_documents_than_workers(world: World, tmp_path: Path) -> None:
    """E8: one document for three workers."""
    one = world.spec(tmp_path / "out")
    one = replace(one, settings=replace(world.settings, tasks=("rolling",), limit=1))
    with fleet(3) as three, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        (run,) = run_to_end([one], ledger, three, scorer=score)
    assert run.state is TrialState.DONE
    assert run.prepared is not None
    assert len(run.prepared.open) == 1
    assert results(run)["rolling"]["bits_per_byte,none"] > 0


def test_a_poison_request_fails_its_task_after_three_attempts_and_the_others_finish(
    world: World, tmp_path: Path
) -> None:
    with fleet(2, STUB_POISON="7: what follows") as two, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        (run,) = run_to_end([world.spec(tmp_path / "out")], ledger, two, scorer=score)
        trials = {trial.task: trial for trial in ledger.trials()}
        quarantined = ledger.failed_shards(quarantined=True)
        died = [one for one in events(two, Action.WORKER_EXITED) if "signal 9" in one.reason]
    assert run.state is TrialState.DONE
    assert set(run.failed) == {"choice_plain"}
    assert "3 times" in run.failed["choice_plain"]
    assert trials["choice_plain"].state is TrialState.FAILED
    assert [row["attempts"] for row in quarantined] == [3]
    assert 3 <= len(died) <= 5
    for task in ("last_word", "rolling"):
        assert results(run)[task] == world.expected[task]
    assert run.outcome is not None
    assert run.outcome.exit_code == 1


def test_a_failing_engine_is_tried_elsewhere_and_the_worker_starts_anew(world: World, tmp_path: Path) -> None:
    with fleet(1, STUB_REFUSE="5: what follows") as one, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        (run,) = run_to_end([world.spec(tmp_path / "out")], ledger, one, scorer=score)
        reasons = [event.reason for event in events(one, Action.SHARD_FAILED)]
    assert set(run.failed) == {"choice_plain"}
    assert any("breaks the engine" in reason for reason in reasons)
    assert results(run)["rolling"] == world.expected["rolling"]


def test_a_run_that_is_killed_goes_on_where_it_was(world: World, tmp_path: Path) -> None:
    """The conductor is dropped without any farewell, as kill -9 does; the next one repeats only what was in flight."""
    url = sqlite_url(tmp_path / "l.sqlite")
    with fleet(1, STUB_SECONDS="0.02") as first, Ledger(url, 1) as ledger:
        conductor = Conductor(first.store, ledger, make_app(first.store.url), scorer=score)
        run = conductor.add(world.spec(tmp_path / "out"))
        first.start()
        await_that(lambda: conductor.tick(time.time()) or run.pace.share > 0.5, 60)
        conductor.close()
        before = sum(trial.responses for trial in ledger.trials())
    assert before > 0
    with fleet(1) as second, Ledger(url, 1) as ledger:
        (run,) = run_to_end([world.spec(tmp_path / "out")], ledger, second, scorer=score)
        assert run.prepared is not None
        assert len(run.prepared.open) == run.prepared.requests - before
        assert results(run) == world.expected
        (again,) = run_to_end([world.spec(tmp_path / "out")], ledger, second, scorer=score)
        assert again.prepared is not None
        assert again.prepared.open == ()
    assert results(again) == world.expected


def test_a_scheduler_that_restarts_takes_up_what_workers_have(world: World, tmp_path: Path) -> None:
    with fleet(2, STUB_SECONDS="0.03") as two, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        two.start()
        done = 0
        app = make_app(two.store.url)
        for _ in range(12):
            conductor = Conductor(two.store, ledger, app, scorer=score)
            conductor.restore()
            run = conductor.add(world.spec(tmp_path / "out", job="j"))
            until = time.monotonic() + 0.7
            while time.monotonic() < until and not conductor.idle:
                conductor.tick(time.time())
                time.sleep(0.02)
            conductor.close()
            done = len(events(two, Action.SHARD_COMPLETED))
            if run.state is TrialState.SCORING or run.over:
                break
        (run,) = run_to_end([world.spec(tmp_path / "out", job="j")], ledger, two, scorer=score)
        completed = events(two, Action.SHARD_COMPLETED)
        failed = events(two, Action.SHARD_FAILED)
    assert done > 0
    assert failed == []
    assert results(run) == world.expected
    assert sum(event.details["requests"] for event in completed) >= 12 * 6


def test_a_message_that_is_delivered_twice_is_run_once(world: World, tmp_path: Path) -> None:
    with fleet(1) as one, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        app = make_app(one.store.url)
        send = app.send_task

        def twice(*arguments: Any, **more: Any) -> Any:
            send(*arguments, **more)
            return send(*arguments, **more)

        app.send_task = twice
        conductor = Conductor(one.store, ledger, app, scorer=score)
        run = conductor.add(world.spec(tmp_path / "out"))
        one.start()
        await_that(lambda: conductor.tick(time.time()) or run.over, 60)
        conductor.close()
        refused = [event for event in events(one, Action.MESSAGE_REFUSED) if "begun before" in event.reason]
        shards = events(one, Action.SHARD_COMPLETED)
    assert len(refused) >= len(shards) > 1
    assert results(run) == world.expected


def test_messages_of_another_version_or_shape_are_kept_aside(world: World, tmp_path: Path) -> None:
    from evalsched.messages import RUN_SHARD, infer_queue

    with fleet(1) as one, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        one.start()
        conductor = Conductor(one.store, ledger, make_app(one.store.url), scorer=score)
        await_that(lambda: conductor.tick(time.time()) or conductor.live(), 30)
        (name,) = conductor.live()
        app = make_app(one.store.url)
        for message in ({"kind": "run_shard", "version": 2}, ["nonsense"], {"kind": "no_such"}):
            app.send_task(RUN_SHARD, args=[message], queue=infer_queue(name))
        one.store.send_response({"kind": "answers", "version": 7})
        run = conductor.add(world.spec(tmp_path / "out"))
        await_that(lambda: conductor.tick(time.time()) or run.over, 60)
        assert len(events(one, Action.MESSAGE_REFUSED)) == 4
        assert list(one.processes()) == [name]
        conductor.close()
    assert results(run) == world.expected


def test_workers_that_never_come_up_are_the_machines_fault(world: World, tmp_path: Path) -> None:
    from planner.errors import MissingServiceError

    program = (sys.executable, "-c", "import sys; sys.exit('no engine on this machine')")
    with (
        LocalFleet(1, 1, program, metric=False) as broken,
        Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger,
        pytest.raises(MissingServiceError, match="no engine on this machine"),
    ):
        run_to_end([world.spec(tmp_path / "out")], ledger, broken, scorer=score)


def test_an_unknown_task_is_told_with_its_nearest_names(world: World, tmp_path: Path) -> None:
    from dataclasses import replace

    from planner.errors import BadInputError

    spec = world.spec(tmp_path / "out")
    spec = replace(spec, settings=replace(spec.settings, tasks=("choice_plane",)))
    with (
        fleet(1) as one,
        Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger,
        pytest.raises(BadInputError, match="choice_plain"),
    ):
        run_to_end([spec], ledger, one, scorer=score)


def test_a_private_fleet_is_gone_with_its_owner(tmp_path: Path) -> None:
    """kill -9 of the owner ends its Redis and its workers and removes its folder."""
    import subprocess

    code = (
        "import sys, time; from evalsched.local import LocalFleet\n"
        "f = LocalFleet(1, 1, (sys.executable, '-m', 'tests.support.stub_worker'), metric=False); f.start()\n"
        "print(f.folder, *f.processes().values(), flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder, worker = owner.stdout.readline().split()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    await_that(lambda: not Path(folder).exists() and not Path(f"/proc/{worker}").exists(), 10)


def test_answers_of_a_dispatch_that_was_given_up_are_refused(world: World, tmp_path: Path) -> None:
    from evalsched.messages import Answers

    with fleet(1, STUB_SECONDS="0.05") as one, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        conductor = Conductor(one.store, ledger, make_app(one.store.url), scorer=score)
        run = conductor.add(world.spec(tmp_path / "out"))
        one.start()
        await_that(lambda: conductor.tick(time.time()) or conductor.out, 60)
        out = next(iter(conductor.out.values()))
        request = out.shard.requests[-1]
        conductor.worker_gone(out.worker, "for the test", time.time())
        late = Answers(
            worker=out.worker, lease_token=0, dispatch=out.dispatch, run=run.id,
            responses=[{"id": list(request.id), "value": None, "error": "a forged answer"}],
        )  # fmt: skip
        one.store.send_response(late.model_dump(mode="json"))
        conductor.tick(time.time())
        assert any("not out any more" in event.reason for event in events(one, Action.MESSAGE_REFUSED))
        assert run.prepared is not None
        known = [r for trial in run.prepared.trials.values() for r in ledger.responses_of(trial.id)]
        assert all(one.error is None for one in known)
        conductor.close()


def test_nothing_scored_is_a_failure_that_says_why(world: World, tmp_path: Path) -> None:
    from evalsched.evaluate import _result

    run = Run(world.spec(tmp_path / "out"), "x", state=TrialState.FAILED, reason="because")
    with pytest.raises(WorkFailedError, match="because"):
        _result(run, 1.0)


def test_a_long_metric_begins_while_other_tasks_are_answered(world: World, tmp_path: Path) -> None:
    seen: list[tuple[str, frozenset[str], bool]] = []

    def scorer(job: Any) -> Any:
        answered = all(not one.open for one in conductor.runs.values())
        seen.append((Path(job.output).name, frozenset(job.failed), answered))
        return score(job)

    with fleet(1, STUB_SECONDS="0.02") as one, Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        conductor = Conductor(one.store, ledger, make_app(one.store.url), scorer=scorer)
        conductor.estimates.tails = lambda recording: {"choice_plain": 60.0, "last_word": 1.0, "rolling": 1.0}  # type: ignore[method-assign]
        run = conductor.add(world.spec(tmp_path / "out"))
        one.start()

        def over() -> bool:
            run.keeping = frozenset({"choice_plain"})
            conductor.tick(time.time())
            one.watch(conductor, time.time())
            return run.over

        await_that(over, 120)
        conductor.close()
    early, late = seen
    assert early == (early[0], frozenset({"last_word", "rolling"}), False)
    assert early[0].startswith(".early-")
    assert late == ("out", frozenset(), True)
    assert results(run) == world.expected
    assert not list((tmp_path / "out").glob(".early-*"))
