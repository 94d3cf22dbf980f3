"""Judge metrics against a scripted endpoint: retries, rate, budget, cache, what the report shows."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evalsched.judge import Judge, JudgeSettings, JudgeTask, Pace, Verdict, judging, new_verdicts, read_verdicts
from evalsched.ledger import Ledger, sqlite_url
from evalsched.recording import RecordJob, record_in_subprocess
from evalsched.scoring import ScoreJob, score_in_subprocess, write_answers
from evalsched.types import EvalSettings
from planner.errors import BadInputError, WorkFailedError
from tests.support.hash_lm import respond
from tests.support.judge_server import judge_server
from tests.support.lm_tasks import write_tasks
from tests.support.tiny_model import write_model

TASK = JudgeTask("kindness", "Q: {question} A: {answer} {left alone}. Rate it [[1]] to [[10]].", low=1, high=10)


def settings(url: str, **more: Any) -> JudgeSettings:
    return JudgeSettings(url=url, model="judge", **{"requests_per_minute": 60_000.0, **more})


def test_refusals_for_the_moment_and_broken_connections_are_tried_again() -> None:
    trouble = {1: (429, '{"error": {"message": "slow down"}}'), 2: (503, "{}"), 3: None}
    kept: list[Verdict] = []
    with judge_server(lambda prompt, number: trouble.get(number, "fine [[7]]")) as server:
        judge = Judge(settings(server.url, key="secret", concurrent=1), keep=kept.append)
        found = judge.ask("kindness", ["one", "two", "one"])
        assert server.keys == {"Bearer secret"}
    assert [one.reply for one in found] == ["fine [[7]]"] * 3
    assert [one.prompt for one in kept] == ["one", "two"], "equal prompts are asked once"
    assert judge.spent == 200
    assert "secret" not in repr(judge.settings)


def test_a_refusal_for_good_and_garbage_fail_with_the_reason_and_keep_what_was_judged() -> None:
    kept: list[Verdict] = []
    wrong = {"bad": (401, '{"error": {"message": "who are you"}}'), "odd": (200, '{"choices": []}')}
    with judge_server(lambda prompt, number: wrong.get(prompt, "[[3]]")) as server:
        for prompt, reason in (("bad", "who are you"), ("odd", "no choices")):
            judge = Judge(settings(server.url, retries=0, concurrent=1), keep=kept.append)
            with pytest.raises(WorkFailedError, match=reason):
                judge.ask("kindness", [f"before {prompt}", prompt])
    assert [one.prompt for one in kept] == ["before bad", "before odd"]


def test_the_budget_ends_the_asking_and_the_cache_goes_on_where_it_ended() -> None:
    kept: list[Verdict] = []
    prompts = [f"p{number}" for number in range(10)]
    with judge_server(lambda prompt, number: "[[5]]") as server:
        judge = Judge(settings(server.url, budget_tokens=400, concurrent=1), keep=kept.append)
        with pytest.raises(WorkFailedError, match="budget of 400 tokens"):
            judge.ask("kindness", prompts)
        assert len(kept) == 4
        again = Judge(settings(server.url), {one.key: one for one in kept}, kept.append)
        assert len(again.ask("kindness", prompts)) == 10
        assert (again.asked, again.from_cache) == (6, 4)
        assert sorted(server.prompts) == sorted(prompts), "nobody was asked twice"


def test_requests_keep_the_rate() -> None:
    now = [0.0]
    waited: list[float] = []
    pace = Pace(60.0, clock=lambda: now[0], sleep=waited.append)
    for _ in range(4):
        pace.wait()
    assert waited == [1.0, 2.0, 3.0]
    now[0] = 100.0
    pace.wait()
    assert len(waited) == 3, "after a pause nothing has to be waited for"


def test_only_so_many_are_out_at_a_time() -> None:
    out, most, lock = [0], [0], threading.Lock()

    def answer(prompt: str, number: int) -> str:
        with lock:
            out[0] += 1
            most[0] = max(most[0], out[0])
        time.sleep(0.02)
        with lock:
            out[0] -= 1
        return "[[1]]"

    with judge_server(answer) as server:
        Judge(settings(server.url, concurrent=3)).ask("kindness", [f"p{number}" for number in range(12)])
    assert 1 < most[0] <= 3


def test_replies_are_read_on_the_scale_or_not_at_all() -> None:
    assert TASK.read("first [[2]], but [[ 10 ]]") == 1.0
    assert TASK.read("[[1]]") == 0.0
    assert TASK.read("[[11]]") is None
    assert TASK.read("ten out of ten") is None
    assert TASK.score({}, [[0.5, None, 1.0]]) == {"judge": 0.75}
    assert TASK.score({}, [[None]]) == {}
    prompt = TASK.prompt({"question": "{answer}?"}, "a{b}")
    assert prompt == "Q: {answer}? A: a{b} {left alone}. Rate it [[1]] to [[10]].", "nothing is filled in twice"


def test_a_scoring_keeps_prompts_and_the_ledger_keeps_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = [{"question": f"q{number}"} for number in range(3)]
    replies = {"q0": "[[10]]", "q1": "no idea", "q2": "[[1]]"}
    with (
        judge_server(lambda prompt, number: replies[prompt[3:5]]) as server,
        Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger,
    ):
        monkeypatch.setenv("PLANARIA_JUDGE_URL", server.url)
        monkeypatch.setenv("PLANARIA_JUDGE_MODEL", "judge")
        with judging(tmp_path, None):
            assert TASK.filter([["a"], ["b"], ["c"]], docs) == [[1.0], [None], [0.0]]
        ledger.put_verdicts(read_verdicts(new_verdicts(tmp_path)))
        new_verdicts(tmp_path).unlink()
        (tmp_path / "known").write_text("".join(json.dumps(v.to_json()) + "\n" for v in ledger.verdicts(["kindness"])))
        with judging(tmp_path, tmp_path / "known"):
            assert TASK.filter([["a"], ["b"], ["c"]], docs) == [[1.0], [None], [0.0]]
        assert len(server.prompts) == 3, "the second scoring asked nobody"
    rows = [json.loads(line) for line in (tmp_path / "judge_kindness.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [1.0, None, 0.0]
    assert rows[0]["prompt"].startswith("Q: q0 A: a")
    summary = json.loads((tmp_path / "judge.json").read_text())
    assert (summary["asked"], summary["from_cache"], summary["tasks"]["kindness"]["unreadable"]) == (0, 3, 1)


def test_without_an_endpoint_the_error_names_what_to_set() -> None:
    with pytest.raises(BadInputError, match="PLANARIA_JUDGE_URL"):
        JudgeSettings.from_environment({})
    one = {"PLANARIA_JUDGE_URL": "http://x", "PLANARIA_JUDGE_MODEL": "m"}
    with pytest.raises(BadInputError, match="PLANARIA_JUDGE_RPM: 'many' is no number"):
        JudgeSettings.from_environment(one | {"PLANARIA_JUDGE_RPM": "many"})
    with pytest.raises(BadInputError, match="not above 0"):
        JudgeSettings.from_environment(one | {"PLANARIA_JUDGE_BUDGET": "0"})
    assert JudgeSettings.from_environment(one | {"OPENAI_API_KEY": "k"}).key == "k"


UTILS = """
from evalsched.judge import JudgeTask

kindness = JudgeTask("kindness", "Q: {question} A: {answer} Rate it [[1]] to [[10]].", low=1, high=10)
judge, judge_score = kindness.filter, kindness.score
"""
YAML = """
task: kindness
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: ""
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
filter_list:
  - {name: judge, filter: [{function: custom, filter_fn: !function utils.judge}]}
process_results: !function utils.judge_score
metric_list: [{metric: judge, aggregation: mean, higher_is_better: true}]
metadata: {judge: true}
"""


@pytest.mark.timeout(300)
def test_lm_eval_scores_a_judged_task_and_a_budget_fails_that_task_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    write_tasks(folder, documents=4)
    (folder / "judged").mkdir()
    (folder / "judged" / "utils.py").write_text(UTILS)
    data = folder / "judged" / "data.jsonl"
    data.write_text("".join(json.dumps({"question": f"q{number}?"}) + "\n" for number in range(4)))
    (folder / "judged" / "kindness.yaml").write_text(YAML.replace("DATA", str(data)))
    model = write_model(tmp_path / "model")
    chosen = EvalSettings(tasks=("kindness", "choice_plain"), include_path=(str(folder),), bootstrap_iters=0)
    recording = record_in_subprocess(RecordJob(settings=chosen, tokenizer=str(model)))
    assert [task.task for task in recording.tasks if task.judged] == ["kindness"]
    write_answers(tmp_path / "answers", map(respond, recording.requests()))
    with judge_server(lambda prompt, number: "[[10]]" if "q1" in prompt else "[[1]]") as server:
        monkeypatch.setenv("PLANARIA_JUDGE_URL", server.url)
        monkeypatch.setenv("PLANARIA_JUDGE_MODEL", "judge")
        job = ScoreJob(
            settings=chosen, model=str(model), tokenizer=str(model), recording=str(recording.folder),
            answers=str(tmp_path / "answers"), output=str(tmp_path / "out"),
        )  # fmt: skip
        first = score_in_subprocess(job)
        assert first.metrics["kindness"]["judge,judge"] == 0.25
        assert first.failed == {}
        monkeypatch.setenv("PLANARIA_JUDGE_BUDGET", "150")
        monkeypatch.setenv("PLANARIA_JUDGE_CONCURRENT", "1")
        poor = score_in_subprocess(replace(job, output=str(tmp_path / "poor")))
    assert "budget" in poor.failed["kindness"]
    assert set(poor.metrics) == {"choice_plain"}
    assert len(read_verdicts(new_verdicts(tmp_path / "poor"))) == 2
