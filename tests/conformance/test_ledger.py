"""One suite for every database that the ledger runs on: SQLite and PostgreSQL."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evalsched.ledger import Ledger, sqlite_url
from evalsched.types import Request, RequestId, Response
from planner.clock import ManualClock
from planner.errors import BadInputError, FencedError, MissingServiceError
from planner.events import TrialState
from tests.support import postgres

MakeUrl = Callable[[], str]


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if postgres.programs() is None:
        pytest.skip("no PostgreSQL programs (initdb, postgres) on this machine")
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:  # a short path: it holds a socket
        Path(folder).chmod(0o755)
        with postgres.server(Path(folder)) as url:
            yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path / "ledger.db")
        return
    import psycopg

    base = request.getfixturevalue("postgres_url")
    name = f"ledger_{os.getpid()}_{time.monotonic_ns()}"
    with psycopg.connect(base, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[call-overload]
    yield base.replace("/postgres?", f"/{name}?")


def requests(count: int, task: str = "t") -> list[Request]:
    """Requests of a task with unusual texts in them."""
    odd = ["plain", "nul \x00 byte", "half \ud800 surrogate", "quote ' \" \\", "ü 漢 🙂", ""]
    return [
        Request(
            request_type="loglikelihood", task=task, doc_id=n // 2, idx=n % 2, occurrence=0,
            arguments=(odd[n % len(odd)], " yes"), context_tokens=n, continuation_tokens=1, digest=f"{n:032x}",
        )
        for n in range(count)
    ]  # fmt: skip


def trial_of(ledger: Ledger, found: list[Request], key: str = "k", task: str = "t") -> int:
    set_id = ledger.put_requests(f"digest-{task}-{len(found)}", task, found)
    return ledger.put_trial(key=key, key_parts={"a": 1}, task=task, set_id=set_id, model_path="/m", step=5).id


def answer(request: Request, value: float = -1.5) -> Response:
    return Response(id=request.id, value=(value, True), prompt_tokens=3, flags=("context_truncated",), seconds=0.25)


def test_requests_come_back_as_they_went_in(url: str) -> None:
    with Ledger(url, token=1) as ledger:
        found = requests(20)
        set_id = ledger.put_requests("d", "t", found)
        assert ledger.requests_of(set_id) == found
        assert ledger.put_requests("d", "t", iter(())) == set_id  # once per digest


def test_a_second_trial_with_the_same_key_is_the_first(url: str) -> None:
    with Ledger(url, token=1, clock=ManualClock(7.0)) as ledger:
        found = requests(4)
        first = trial_of(ledger, found)
        ledger.put_responses({first: [answer(found[0])]})
        ledger.set_trial_state(first, TrialState.RUNNING, "why")
        assert trial_of(ledger, found) == first
        trial = ledger.trial(first)
        assert trial is not None
        assert (trial.state, trial.reason, trial.requests, trial.responses) == (TrialState.RUNNING, "why", 4, 1)
        assert (trial.step, trial.created) == (5, 7.0)
        assert trial_of(ledger, found, key="other") != first


def test_responses_by_identity_and_the_first_answer_stands(url: str) -> None:
    with Ledger(url, token=1) as ledger:
        found = requests(6)
        trial = trial_of(ledger, found)
        broken = Response(id=found[1].id, value=None, error="out of memory \x00 here")
        ledger.put_responses({trial: [answer(found[0]), broken, answer(found[0], -9.0)]})
        assert ledger.open_requests(trial) == found[2:]
        ledger.put_responses({trial: [answer(found[0], -7.0), answer(found[1], -8.0)]}, "worker-2")
        kept = {response.id: response for response in ledger.responses_of(trial)}
        assert kept[found[0].id].value == (-1.5, True)  # delivered twice: counts once
        assert kept[found[1].id].value == (-8.0, True)  # an error gives way to an answer
        assert kept[found[0].id] == answer(found[0])
        ledger.forget_responses(trial, [found[0].id])
        assert found[0] in ledger.open_requests(trial)
        ledger.forget_responses(trial)
        assert ledger.open_requests(trial) == found


@pytest.mark.parametrize(
    ("kind", "value"),
    [("loglikelihood", (-math.inf, False)), ("loglikelihood", (-0.1 - 0.2, True)), ("loglikelihood_rolling", -1e-300),
     ("generate_until", "nul \x00 and \ud800 and 漢"), ("generate_until", "")],
)  # fmt: skip
def test_values_keep_their_last_bit(url: str, kind: str, value: object) -> None:
    with Ledger(url, token=1) as ledger:
        trial = trial_of(ledger, requests(1))
        response = Response(id=RequestId(kind, "t", 0, 0, 2), value=value)  # type: ignore[arg-type]
        ledger.put_responses({trial: [response]})
        assert ledger.responses_of(trial) == [response]


def test_a_shard_over_two_tasks_is_one_transaction(url: str) -> None:
    with Ledger(url, token=1) as ledger:
        one, two = requests(2, "one"), requests(2, "two")
        first, second = trial_of(ledger, one, "a", "one"), trial_of(ledger, two, "b", "two")
        with pytest.raises(Exception, match=r"(?i)foreign|constraint"):
            ledger.put_responses({first: [answer(one[0])], 999: [answer(two[0])]})
        assert ledger.responses_of(first) == []
        ledger.put_responses({first: [answer(one[0])], second: [answer(two[0])]})
        assert [len(ledger.responses_of(trial)) for trial in (first, second)] == [1, 1]


def test_an_older_writer_is_refused_from_the_newer_ones_first_write_on(url: str) -> None:
    found = requests(2)
    with Ledger(url, token=5) as old, Ledger(url, token=6) as new, Ledger(url) as reader:
        trial = trial_of(old, found)
        old.put_responses({trial: [answer(found[0])]})
        new.set_trial_state(trial, TrialState.RUNNING)
        with pytest.raises(FencedError, match="token 5 is older than 6"):
            old.put_responses({trial: [answer(found[1])]})
        with pytest.raises(FencedError):
            old.put_requests("another", "t", found)
        with pytest.raises(FencedError, match="for reading"):
            reader.set_trial_state(trial, TrialState.DONE)
        assert reader.open_requests(trial) == found[1:]
        assert reader.newest_token() == 6


def test_epochs_only_grow(url: str) -> None:
    with Ledger(url) as one, Ledger(url) as two:
        assert [one.next_epoch(), two.next_epoch(), one.next_epoch()] == [1, 2, 3]


def test_scores_replace_those_of_before(url: str) -> None:
    with Ledger(url, token=1) as ledger:
        trial = trial_of(ledger, requests(1))
        ledger.put_scores(trial, {"acc,none": {"value": 0.5, "stderr": None, "n": 10, "higher_is_better": True}})
        ledger.put_scores(trial, {"bpb,none": {"value": 1.25, "stderr": 0.1, "low": 1.0, "high": 1.5, "n": 9}})
        assert ledger.scores_of(trial) == {
            "bpb,none": {"value": 1.25, "stderr": 0.1, "low": 1.0, "high": 1.5, "n": 9, "higher_is_better": None}
        }


def test_attempts_count_up_and_quarantine_stays(url: str) -> None:
    with Ledger(url, token=1) as ledger:
        assert [ledger.count_attempt("s", f"reason {n}", {"tasks": ["t"]}) for n in (1, 2, 3)] == [1, 2, 3]
        assert ledger.failed_shards(quarantined=True) == []
        ledger.quarantine("s")
        assert ledger.count_attempt("s", "again", {"tasks": ["t"]}) == 4
        (row,) = ledger.failed_shards(quarantined=True)
        assert (row["attempts"], row["reason"], row["payload"]) == (4, "again", {"tasks": ["t"]})
        ledger.forgive(["s"])
        assert ledger.failed_shards() == []


def test_trials_by_job_and_state(url: str) -> None:
    with Ledger(url, token=1) as ledger:
        found = requests(2)
        set_id = ledger.put_requests("d", "t", found)
        for key, job in (("a", "j1"), ("b", "j2"), ("c", "j1")):
            ledger.put_trial(key=key, key_parts={}, task="t", set_id=set_id, model_path="/m", job=job)
        ledger.set_trial_state(ledger.trials(job="j2")[0].id, TrialState.DONE)
        assert [trial.key for trial in ledger.trials(job="j1")] == ["a", "c"]
        assert [trial.key for trial in ledger.trials(state=TrialState.QUEUED)] == ["a", "c"]
        assert [trial.key for trial in ledger.trials()] == ["a", "b", "c"]


def test_a_million_requests_take_well_under_a_minute(url: str) -> None:
    """Measured on 100,000, which must take less than a tenth of that."""
    found = requests(100_000)
    with Ledger(url, token=1) as ledger:
        started = time.monotonic()
        trial = trial_of(ledger, found)
        assert time.monotonic() - started < 5.0
        assert ledger.trial(trial).requests == 100_000  # type: ignore[union-attr]


def _write_for_ever(url: str, token: int, count: int, ready: object) -> None:
    with Ledger(url, token=token) as ledger:
        found = requests(count)
        trial = trial_of(ledger, found)
        ready.set()  # type: ignore[attr-defined]
        for request in found:
            ledger.put_responses({trial: [answer(request)]})


def test_a_writer_killed_in_the_middle_leaves_whole_transactions(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    writer = context.Process(target=_write_for_ever, args=(url, 1, 5000, ready))
    writer.start()
    assert ready.wait(60)
    with Ledger(url, token=2) as ledger:
        deadline = time.monotonic() + 30
        while ledger.trial(1).responses < 20 and time.monotonic() < deadline:  # type: ignore[union-attr]
            time.sleep(0.01)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(20)
        assert writer.exitcode == -signal.SIGKILL
        trial = ledger.trial(1)
        assert trial is not None
        assert 20 <= trial.responses < 5000
        left = ledger.open_requests(1)
        assert len(left) == 5000 - trial.responses
        ledger.put_responses({1: [answer(request) for request in left]})
        assert ledger.open_requests(1) == []


def test_two_processes_may_make_the_schema_at_once(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        assert sorted(pool.map(_epoch, [url] * 3)) == [1, 2, 3]


def _epoch(url: str) -> int:
    with Ledger(url) as ledger:
        return ledger.next_epoch()


def test_a_database_that_is_away_is_a_missing_service() -> None:
    with pytest.raises(MissingServiceError, match="cannot be used now"):
        Ledger("postgresql://nobody@127.0.0.1:9/none", token=1)
    with pytest.raises(MissingServiceError):
        Ledger("sqlite:////nowhere/at/all/ledger.db", token=1)


def test_a_password_never_shows_and_other_databases_are_refused() -> None:
    with pytest.raises(BadInputError, match="SQLite") as refused:
        Ledger("mysql://user:secret@host/db", token=1)
    assert "secret" not in str(refused.value)
    with pytest.raises(BadInputError):
        Ledger("not a url", token=1)


def test_another_versions_schema_is_refused(tmp_path: Path) -> None:
    Ledger(sqlite_url(tmp_path / "l.db")).close()
    with sqlite3.connect(tmp_path / "l.db") as connection:
        connection.execute("UPDATE planaria_meta SET value = 99 WHERE name = 'schema'")
    connection.close()
    with pytest.raises(BadInputError, match="schema 99"):
        Ledger(sqlite_url(tmp_path / "l.db"))
