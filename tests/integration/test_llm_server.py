"""The failure agent and judge metrics against vLLM's own OpenAI-compatible server with a real small model.

What a 135 M model says of a failure is worth nothing; that questions arrive, answers have their shape, time-outs end
and votes are counted is what a scripted server cannot show.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evalsched.judge import JudgeTask, judging
from planner.errors import MissingServiceError
from pretrain.diagnosis.agent import AgentSettings, ask
from pretrain.diagnosis.compression import compress
from pretrain.diagnosis.rules import classes
from tests.support.fork_server import ForkServer
from tests.support.llm_server import MODEL, llm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def url(engines: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llm_server(tmp_path_factory.mktemp("llm"), engines) as found:
        yield found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log that no rule and no incident knows."""
    path = tmp_path / "job.log"
    path.write_text("error: fabric trunk 14 degraded beyond repair\n  exitcode  : 1 (pid: 77)\n")
    return path


def test_a_real_model_is_asked_and_its_votes_are_counted(url: str, log: Path) -> None:
    settings = AgentSettings(base_url=url, model=MODEL, votes=2, max_tokens=100, timeout_seconds=120)
    compressed = compress(log)
    opinion = ask(settings, compressed)
    assert opinion.asked == 2
    # Every answer has the shape that was asked for. What is thrown away is thrown away for what it says.
    said = [why for why in opinion.thrown_away if not why.startswith(("cites", "no JSON object", "wrong shape: ()"))]
    assert said == [], "only lines that are not there, and answers that were cut at their length"
    if opinion.root is not None:
        assert opinion.root in classes()
        assert set(opinion.evidence) <= {item.first.number for item in compressed.templates}
        assert opinion.confidence > 0.5


def test_an_answer_that_takes_too_long_ends_the_asking(url: str, log: Path) -> None:
    settings = AgentSettings(base_url=url, model=MODEL, votes=2, max_tokens=1000, timeout_seconds=0.05)
    started = time.monotonic()
    with pytest.raises(MissingServiceError, match="no answer from the model endpoint"):
        ask(settings, compress(log))
    assert time.monotonic() - started < 30


def test_a_model_that_is_not_served_there_is_said(url: str, log: Path) -> None:
    with pytest.raises(MissingServiceError, match="NotFoundError"):
        ask(AgentSettings(base_url=url, model="another", votes=1), compress(log))


def test_a_real_model_judges_and_nobody_is_asked_twice(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANARIA_JUDGE_URL", url)
    monkeypatch.setenv("PLANARIA_JUDGE_MODEL", MODEL)
    task = JudgeTask("kindness", "Rate how kind this is, from [[1]] to [[10]]: {question} {answer}", low=1, high=10)
    docs = [{"question": f"Question {number}?"} for number in range(2)]
    scores = []
    for _ in range(2):
        with judging(tmp_path, None) as session:
            scores.append(task.filter([["Have a nice day."]] * len(docs), docs))
        assert session.judge is not None
        scores.append(session.judge.asked)
    first, asked, again, asked_again = scores
    assert (asked, asked_again) == (2, 0)
    assert again == first
    assert all(score is None or 0 <= score <= 1 for (score,) in first)
