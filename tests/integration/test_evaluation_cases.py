"""Cases of evaluation in public use (E1 to E19 where no engine is needed), through lm-eval's own code."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evalsched import recording as recording_module
from evalsched.evaluation import (
    Model,
    keep_responses,
    keep_scores,
    open_shards,
    open_trials,
    renewed,
    score_job,
    trial_key,
)
from evalsched.ledger import Ledger, sqlite_url
from evalsched.recording import Recording, RecordJob, check_settings, find_recording, record, record_in_subprocess
from evalsched.scoring import ScoreJob, ScoreOutcome, iter_samples, score
from evalsched.types import EvalSettings, RequestId, Response
from planner.errors import BadInputError, WorkFailedError
from planner.events import TrialState
from tests.support.hash_lm import respond
from tests.support.lm_tasks import write_tasks
from tests.support.tiny_model import write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*divide:RuntimeWarning")  # lm-eval's own, at E1

Answers = dict[RequestId, Response]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cases")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANARIA_CACHE", str(folder / "cache"))
        patch.setenv("TQDM_DISABLE", "1")
        tasks = write_tasks(folder / "tasks", documents=12)
        _odd_task(tasks, "odd_choices", [["yes", "no"], ["", "no"], ["a", "b"], ["c", ""]])
        yield tasks, write_tokenizer(folder / "tokenizer")


def _odd_task(folder: Path, name: str, choices: list[list[str]], questions: list[str] | None = None) -> None:
    """A multiple-choice task without a delimiter, so that an empty choice is an empty continuation."""
    asked = questions or [f"question {n}:" for n in range(len(choices))]
    rows = [{"q": q, "choices": c, "label": 0} for q, c in zip(asked, choices, strict=True)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "choices",
        "doc_to_target": "label", "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def _record(world: Any, *tasks: str, **more: Any) -> tuple[EvalSettings, Recording]:
    folder, tokenizer = world
    settings = EvalSettings(tasks=tasks, include_path=(str(folder),), bootstrap_iters=50, **more)
    return settings, _recorded(RecordJob(settings=settings, tokenizer=str(tokenizer)))


def _recorded(job: RecordJob) -> Recording:
    """As :func:`record_in_subprocess`, in this process, which has lm-eval loaded."""
    check_settings(job.settings)
    return find_recording(job) or record(job)


def _answers(recording: Recording) -> Answers:
    return {request.id: respond(request) for request in recording.requests()}


def _score(
    world: Any, settings: EvalSettings, recording: Recording, answers: Answers, output: Path, **more: Any
) -> ScoreOutcome:
    job = ScoreJob(
        settings=settings, model="/models/one", tokenizer=str(world[1]), recording=str(recording.folder), answers="",
        output=str(output), **more,
    )  # fmt: skip
    return score(job, answers)


# ---------------------------------------------------------------- E1 to E3: wrong in silence


def _winning_emptiness(answers: Answers, recording: Recording) -> Answers:
    """What an engine gives for a continuation without tokens: (0, True), which beats everything."""
    found = dict(answers)
    for request in recording.requests():
        if request.arguments[1] == "":
            found[request.id] = Response(id=request.id, value=(0.0, True), flags=("empty_continuation",))
        else:
            found[request.id] = Response(id=request.id, value=(-1.0 - request.idx, False))
    return found


def test_e1_strict_keeps_documents_with_an_empty_choice_apart(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "odd_choices")
    answers = _winning_emptiness(_answers(recording), recording)
    strict = _score(world, settings, recording, answers, tmp_path / "strict")
    assert strict.exit_code == 1
    assert strict.untrusted == {"odd_choices": (1, 3)}
    named = {(flag["task"], flag["doc_id"], flag["choice"]) for flag in strict.flags}
    assert named == {("odd_choices", 1, 0), ("odd_choices", 3, 1)}
    assert strict.metrics["odd_choices"]["acc,none"] == 1.0  # the two others are right
    assert [s["doc_id"] for s in iter_samples(tmp_path / "strict", "odd_choices")] == [0, 2]
    apart = (tmp_path / "strict" / "untrusted_odd_choices.jsonl").read_text().splitlines()
    assert [json.loads(line)["doc_id"] for line in apart] == [1, 3]
    data = json.loads((tmp_path / "strict" / "results.json").read_text())
    assert data["n-samples"]["odd_choices"] == {"original": 4, "effective": 2}
    assert data["planaria"]["lm_eval"]["results"]["odd_choices"]["acc,none"] == 0.75


def test_e1_compat_gives_lm_evals_number_and_a_warning(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "odd_choices")
    answers = _winning_emptiness(_answers(recording), recording)
    compat = _score(world, replace(settings, strict=False), recording, answers, tmp_path)
    assert compat.exit_code == 0
    assert compat.metrics["odd_choices"]["acc,none"] == 0.75  # document 3's empty choice won
    assert {flag["kind"] for flag in compat.flags} == {"empty_continuation"}
    assert len(list(iter_samples(tmp_path, "odd_choices"))) == 4
    assert not (tmp_path / "untrusted_odd_choices.jsonl").exists()


def test_a_task_of_which_nothing_can_be_trusted_has_no_number(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "choice_plain", "rolling")
    answers = {
        i: replace(a, flags=("double_bos",)) if i.task == "choice_plain" else a for i, a in _answers(recording).items()
    }
    outcome = _score(world, settings, recording, answers, tmp_path)
    assert outcome.exit_code == 1
    assert outcome.failed == {"choice_plain": "no document is left whose verdict can be trusted"}
    assert "choice_plain" not in outcome.metrics
    assert math.isfinite(outcome.metrics["rolling"]["bits_per_byte,none"])


def test_e2_what_the_engine_flags_is_kept_apart_too(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "choice_plain")
    answers = _answers(recording)
    cut = next(r for r in recording.requests() if (r.doc_id, r.idx) == (4, 2))
    answers[cut.id] = replace(answers[cut.id], flags=("continuation_truncated",))
    outcome = _score(world, settings, recording, answers, tmp_path)
    assert outcome.untrusted == {"choice_plain": (4,)}
    assert outcome.exit_code == 1


def test_e3_a_request_without_an_answer_is_named_in_both_modes(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "choice_plain", "generate_filters")
    answers = _answers(recording)
    for request in recording.requests():
        if request.doc_id == 2:
            answers[request.id] = Response(id=request.id, value=None, error="context and continuation are empty")
    for strict in (True, False):
        chosen = replace(settings, strict=strict)
        outcome = _score(world, chosen, recording, answers, tmp_path / str(strict))
        assert {flag["kind"] for flag in outcome.flags} == {"no_answer"}
        assert all("are empty" in flag["detail"] and flag["doc_id"] == 2 for flag in outcome.flags)
        data = json.loads((tmp_path / str(strict) / "results.json").read_text())
        assert data["n-samples"]["choice_plain"]["effective"] == 11
        assert math.isfinite(outcome.metrics["generate_filters"]["exact_match,first"])


def test_e3_a_lost_answer_is_an_error_and_no_number(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "choice_plain")
    answers = _answers(recording)
    lost = answers.popitem()[0]
    with pytest.raises(WorkFailedError, match=r"1 requests have no answer.*choice_plain") as failed:
        _score(world, settings, recording, answers, tmp_path)
    assert str(lost.doc_id) in str(failed.value)
    assert not (tmp_path / "results.json").exists()


def test_document_numbers_are_the_users_with_chosen_samples(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "odd_choices", samples={"odd_choices": (0, 3)})
    outcome = _score(world, settings, recording, _answers(recording), tmp_path)
    assert outcome.untrusted == {"odd_choices": (3,)}
    assert [s["doc_id"] for s in iter_samples(tmp_path, "odd_choices")] == [0]


# ---------------------------------------------------------------- E4 to E9: keys, resuming, order


def test_e4_e5_all_that_decides_answers_is_in_the_key(world: Any) -> None:
    settings, recording = _record(world, "choice_fewshot")
    model = Model(path=Path("/m"), digest="a", tokenizer="t")
    engine = {"name": "vllm", "dtype": "float32"}

    def key(**more: Any) -> str:
        chosen = {"settings": settings, "model": model, "engine": engine, "recording": recording} | more
        return trial_key(
            chosen["recording"], "choice_fewshot", chosen["settings"], chosen["model"], chosen["engine"]
        ).digest

    others = [
        key(model=replace(model, digest="b")),
        key(model=replace(model, tokenizer="u")),
        key(engine={**engine, "dtype": "bfloat16"}),
        key(settings=replace(settings, gen_kwargs={"temperature": 1.0})),
        key(settings=replace(settings, fewshot_random_seed=2)),
        key(settings=replace(settings, limit=3)),
    ]
    for changed in ({"fewshot_random_seed": 5}, {"num_fewshot": 1}, {"limit": 5}):
        others.append(key(recording=_record(world, "choice_fewshot", **changed)[1]))
    assert len({key(), *others}) == 1 + len(others)
    assert key() == key(model=replace(model, path=Path("/elsewhere")), settings=replace(settings, strict=False))


def test_e6_e7_a_second_run_has_nothing_to_run_and_a_cut_one_what_is_left(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "choice_plain", "rolling", "generate_repeats")
    model = Model(path=tmp_path / "model", digest="a", tokenizer="t", step=7)
    with Ledger(sqlite_url(tmp_path / "l.db"), token=1) as ledger:
        trials = open_trials(ledger, recording, settings, model, {"name": "hash"})
        shards = open_shards(ledger, trials, lambda r: 1.0, 10)
        for shard in shards[: len(shards) // 2]:
            keep_responses(ledger, trials, [respond(r) for r in shard.requests], "worker")
    with Ledger(sqlite_url(tmp_path / "l.db"), token=2) as ledger:  # killed, started again
        trials = open_trials(ledger, recording, settings, model, {"name": "hash"})
        rest = open_shards(ledger, trials, lambda r: 1.0, 10)
        left = {r.id for s in rest for r in s.requests}
        done = {r.id for s in shards[: len(shards) // 2] for r in s.requests}
        assert left == {r.id for r in recording.requests()} - done
        for shard in rest:
            keep_responses(ledger, trials, [respond(r) for r in shard.requests], "worker")
        assert open_shards(ledger, renewed(ledger, trials), lambda r: 1.0, 10) == []
        job = replace(score_job(ledger, trials, recording, settings, model, tmp_path / "out"), tokenizer=str(world[1]))
        outcome = score(job)
        keep_scores(ledger, trials, outcome)
        assert {trial.state for trial in renewed(ledger, trials).values()} == {TrialState.DONE}
        kept = ledger.scores_of(trials["rolling"].id)["bits_per_byte,none"]
        assert kept["value"] == outcome.metrics["rolling"]["bits_per_byte,none"]
        assert kept["higher_is_better"] is False
        assert kept["low"] < kept["value"] < kept["high"]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["planaria"]["step"] == 7


def test_e9_order_and_repeats_change_no_byte(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "choice_fewshot", "generate_repeats", "last_word", "rolling")
    answers = list(_answers(recording).values())
    texts = []
    for seed in (1, 2):
        shuffled = answers + answers[: seed * 20]
        random.Random(seed).shuffle(shuffled)
        _score(world, settings, recording, {a.id: a for a in shuffled}, tmp_path / "same")
        data = json.loads((tmp_path / "same" / "results.json").read_text())
        for stamp in ("date", "start_time", "end_time", "total_evaluation_time_seconds"):
            data.pop(stamp, None)
        lines = [path.read_text() for path in sorted((tmp_path / "same").glob("samples_*"))]
        texts.append((json.dumps(data), lines))
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- E15, E16, E20: groups, intervals, failed tasks


def test_e15_a_groups_weighting_is_shown(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "whole", "outer")
    _score(world, settings, recording, _answers(recording), tmp_path)
    block = json.loads((tmp_path / "results.json").read_text())["planaria"]
    assert block["groups"]["whole"] == {"acc": "mean over tasks, weighted by size"}
    assert block["groups"]["outer::inner"] == {"acc": "mean over tasks, unweighted"}


def test_e16_zero_of_n_has_an_interval(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "generate_filters")
    answers = {i: replace(a, value="nothing of it") for i, a in _answers(recording).items()}
    outcome = _score(world, settings, recording, answers, tmp_path)
    assert outcome.metrics["generate_filters"]["exact_match,lower"] == 0.0
    interval = outcome.intervals["generate_filters"]["exact_match,lower"]
    assert interval["method"] == "wilson"
    assert interval["low"] == 0.0 < 0.2 < interval["high"] < 0.3


def test_e20_a_failed_task_costs_only_its_own_number_and_its_groups(world: Any, tmp_path: Path) -> None:
    settings, recording = _record(world, "outer", "whole", "functions")
    whole = _score(world, settings, recording, _answers(recording), tmp_path / "whole")
    answers = {i: a for i, a in _answers(recording).items() if i.task != "last_word"}
    outcome = _score(
        world, settings, recording, answers, tmp_path / "part", failed={"last_word": "three workers died of it"}
    )
    assert outcome.exit_code == 1
    assert set(whole.metrics) - set(outcome.metrics) == {"last_word", "outer", "outer::inner"}
    assert all(outcome.metrics[task] == whole.metrics[task] for task in outcome.metrics)
    block = json.loads((tmp_path / "part" / "results.json").read_text())["planaria"]
    assert block["failed"] == {"last_word": "three workers died of it"}


@pytest.mark.parametrize("place", ["process_results", "filter"])
def test_a_task_whose_own_code_breaks_costs_only_itself(world: Any, tmp_path: Path, place: str) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    _odd_task(folder, "fine", [["yes", "no"], ["a", "b"]])
    _odd_task(folder, "breaks", [["yes", "no"], ["a", "b"]])
    (folder / "utils.py").write_text(
        "def process_results(doc, results):\n    return {'acc': 1 / (results[0][0] * 0)}\n"
        "def filter(resps, docs):\n    raise KeyError('gone')\n"
    )
    more = {
        "process_results": "process_results: !function utils.process_results\n",
        "filter": "filter_list: [{name: f, filter: [{function: custom, filter_fn: !function utils.filter}]}]\n",
    }
    with (folder / "breaks.yaml").open("a") as stream:
        stream.write(more[place])
    settings = EvalSettings(tasks=("breaks", "fine"), include_path=(str(folder),), bootstrap_iters=0)
    recording = _recorded(RecordJob(settings=settings, tokenizer=str(world[1])))
    outcome = _score(world, settings, recording, _answers(recording), tmp_path / "out")
    assert set(outcome.metrics) == {"fine"}
    assert "its own code failed on the answers" in outcome.failed["breaks"]
    assert outcome.exit_code == 1


# ---------------------------------------------------------------- E18, E19: what is asked for


def test_e18_twice_is_once(world: Any) -> None:
    _, recording = _record(world, "rolling", "rolling")
    assert [task.task for task in recording.tasks] == ["rolling"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rolliing", "did you mean rolling"),
        ("no such thing at all", "planaria tasks list"),
        ("remote", r"task remote: its data is not on this machine.*planaria tasks prepare"),
        ("needs_module", r"task needs_module.*'not_installed_anywhere'"),
        ("pictures", r"task.* pictures|pictures.*multimodal|pictures.*image"),
        ("broken_yaml_values", "task broken_yaml_values"),
    ],
)
def test_e18_unknown_and_unusable_tasks_are_one_clear_line(world: Any, name: str, said: str) -> None:
    folder = world[0] / "unusable"
    if not folder.exists():
        folder.mkdir()
        (folder / "remote.yaml").write_text(
            "task: remote\ndataset_path: nobody/nothing_here\ntest_split: test\noutput_type: generate_until\n"
            "doc_to_text: '{{x}}'\ndoc_to_target: '{{x}}'\n"
        )
        (folder / "needs_module.yaml").write_text(
            "task: needs_module\nclass: !function needs.Task\n"
        )  # fmt: skip
        (folder / "needs.py").write_text("import not_installed_anywhere\n")
        data = world[0] / "test.jsonl"
        (folder / "pictures.yaml").write_text(
            f"task: pictures\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
            "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
            "doc_to_image: [question]\n"
        )
        (folder / "broken_yaml_values.yaml").write_text(
            f"task: broken_yaml_values\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
            "test_split: nope\noutput_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{answer}}'\n"
        )
    with pytest.raises(BadInputError, match=said) as refused:
        _record(world, name)
    assert "\n" not in str(refused.value)


def test_e18_the_light_index_has_every_name_of_lm_evals_own(world: Any) -> None:
    from evalsched.lm_tasks import default_tasks
    from evalsched.task_names import lm_eval_names

    theirs, ours = set(default_tasks()), lm_eval_names()
    assert ours is not None
    assert len(theirs) > 10_000
    assert theirs - ours == set()
    assert len(ours - theirs) < 0.02 * len(theirs)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"limit": 0}, "--limit 0"),
        ({"limit": -3}, "--limit -3"),
        ({"limit": 2.5}, "whole number"),
        ({"limit": math.nan}, "--limit nan"),
        ({"limit": 5, "samples": {"rolling": (1,)}}, "exclude each other"),
        ({"samples": {"rolling": ()}}, "--samples rolling"),
        ({"samples": {"rolling": (-1,)}}, "--samples rolling"),
        ({"samples": {"rolling": (999,)}}, "--samples"),
        ({"num_fewshot": -1}, "--num-fewshot -1"),
        ({"fewshot_as_multiturn": True}, "--apply-chat-template"),
    ],
)
def test_e19_wrong_limits_are_refused(world: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        _record(world, "rolling", **more)


@pytest.mark.parametrize(("limit", "documents"), [(3, 3), (0.25, 3), (0.01, 1), (1, 1), (5000, 12)])
def test_e19_limits_as_lm_eval_does(world: Any, limit: float, documents: int) -> None:
    _, recording = _record(world, "rolling", limit=limit)
    assert recording.tasks[0].documents == documents


# ---------------------------------------------------------------- the recording's cache


def test_a_recording_is_made_once_for_all_checkpoints(
    world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings, first = _record(world, "choice_plain")
    other = write_tokenizer(tmp_path / "the-next-checkpoint")
    monkeypatch.setattr(recording_module, "run_module", lambda *_: pytest.fail("lm-eval was started again"))
    again = record_in_subprocess(RecordJob(settings=replace(settings, strict=False), tokenizer=str(other)))
    assert again == first


def test_a_changed_input_makes_a_recording_stale_and_scoring_refuse(world: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    _odd_task(folder, "mine", [["yes", "no"], ["a", "b"]])
    settings = EvalSettings(tasks=("mine",), include_path=(str(folder),), bootstrap_iters=0)
    job = RecordJob(settings=settings, tokenizer=str(world[1]))
    first = _recorded(job)
    assert find_recording(job) is not None
    _odd_task(folder, "mine", [["yes", "no"], ["a", "b"]], questions=["other 1:", "other 2:"])
    assert find_recording(job) is None
    with pytest.raises(WorkFailedError, match="task mine: document 0 asks for something else"):
        _score(world, settings, first, _answers(first), tmp_path / "out")
    assert not (tmp_path / "out" / "results.json").exists()
    second = _recorded(job)
    assert second.key == first.key  # the same question, another answer: it replaced the first
    assert second.tasks[0].digest != first.tasks[0].digest
    (folder / "mine.yaml").write_text((folder / "mine.yaml").read_text() + "description: 'Now: '\n")
    third = _recorded(job)
    assert third.requests()[0].context == "Now: other 1:"


def test_a_target_that_changed_after_recording_is_noticed(world: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    _odd_task(folder, "mine", [["yes", "no"], ["a", "b"]])
    settings = EvalSettings(tasks=("mine",), include_path=(str(folder),), bootstrap_iters=0)
    recording = _recorded(RecordJob(settings=settings, tokenizer=str(world[1])))
    data = folder / "mine.jsonl"
    data.write_text(data.read_text().replace('"label": 0', '"label": 1'))
    with pytest.raises(WorkFailedError, match="task mine: its configuration or documents changed"):
        _score(world, settings, recording, _answers(recording), tmp_path / "out")


def test_two_recordings_at_once_leave_one(world: Any, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    folder, tokenizer = world
    settings = EvalSettings(tasks=("choice_mutual",), include_path=(str(folder),), limit=4)
    job = RecordJob(settings=settings, tokenizer=str(tokenizer))
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: record_in_subprocess(job), range(2))
    assert one.requests() == two.requests()
    assert [path.name for path in one.folder.parent.iterdir() if path.name.startswith(".")] == []


def test_what_a_killed_recording_leaves_is_tidied_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "KEPT_RECORDINGS", 2)
    for age, name in enumerate((".key.left", ".key.running", "newest", "middle", "oldest")):
        (tmp_path / name).mkdir()
        seconds = 1e6 - (7200 if name == ".key.left" else age)
        os.utime(tmp_path / name, (seconds, seconds))
    recording_module.tidy(tmp_path, 1e6)
    assert {path.name for path in tmp_path.iterdir()} == {".key.running", "newest", "middle"}
