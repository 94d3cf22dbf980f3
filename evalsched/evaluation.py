"""The pieces of an evaluation, in the order in which they are used; the scheduler and ``evaluate`` put them together.

record → open trials in the ledger → cut what is unanswered into shards → (run them anywhere) → keep the
responses → score → keep the scores. Every step can be repeated: nothing is run twice that is in the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evalsched.digests import FileHashes, model_digest, tokenizer_digest
from evalsched.ledger import Ledger
from evalsched.recording import Recording, RecordJob, record_in_subprocess
from evalsched.scoring import ScoreJob, ScoreOutcome, score_in_subprocess, write_answers
from evalsched.shards import MAX_REQUESTS, Cost, cut
from evalsched.types import EvalSettings, Request, RequestId, Response, Shard, Trial, TrialKey, digest_of
from planner.errors import BadInputError
from planner.events import TrialState


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint in Hugging Face layout, with the digests that name its content."""

    path: Path
    digest: str
    tokenizer: str
    job: str | None = None
    step: int | None = None


def describe_model(path: Path, *, job: str | None = None, step: int | None = None) -> Model:
    """A model directory with its digests (hashes are remembered, see :mod:`evalsched.digests`).

    Raises:
        BadInputError: no such directory, no weights or no tokenizer in it.
    """
    hashes = FileHashes()
    folder = path.expanduser().resolve()
    return Model(
        path=folder,
        digest=model_digest(folder, hashes),
        tokenizer=tokenizer_digest(folder, hashes),
        job=job,
        step=step,
    )


def record(settings: EvalSettings, model: Model, *, timeout: float = 3600.0) -> Recording:
    """The requests of ``settings`` for a model's tokenizer: from the cache, or by a subprocess without a GPU.

    Raises:
        BadInputError: see :func:`evalsched.recording.record_in_subprocess`.
    """
    return record_in_subprocess(RecordJob(settings=settings, tokenizer=str(model.path)), timeout=timeout)


def trial_key(
    recording: Recording, task: str, settings: EvalSettings, model: Model, engine: Mapping[str, str]
) -> TrialKey:
    """The key of one trial. ``engine``: name, versions and pins of what will answer."""
    recorded = recording.task(task)
    decides = {
        "config": recorded.config,
        "gen_kwargs": dict(settings.gen_kwargs or {}),
        "fewshot_seed": settings.fewshot_random_seed,
        "limit": settings.limit,
        "samples": list((settings.samples or {}).get(task, ())),
    }
    return TrialKey(
        model=model.digest,
        tokenizer=model.tokenizer,
        task=task,
        requests=recorded.digest,
        settings=digest_of(decides),
        engine=dict(engine),
    )


def open_trials(
    ledger: Ledger,
    recording: Recording,
    settings: EvalSettings,
    model: Model,
    engine: Mapping[str, str],
    requests: Sequence[Request] | None = None,
) -> dict[str, Trial]:
    """A trial per task, with its requests in the ledger; one that is there already keeps its answers.

    ``requests``: those of the recording, where they were read already.
    """
    by_task: dict[str, list[Request]] = {task.task: [] for task in recording.tasks}
    for request in requests if requests is not None else recording.requests():
        by_task[request.task].append(request)
    opened: dict[str, Trial] = {}
    for task in recording.tasks:
        set_id = ledger.put_requests(task.digest, task.task, by_task[task.task])
        key = trial_key(recording, task.task, settings, model, engine)
        opened[task.task] = ledger.put_trial(
            key=key.digest,
            key_parts=key.__dict__ | {"engine": dict(key.engine)},
            task=task.task,
            set_id=set_id,
            model_path=str(model.path),
            job=model.job,
            step=model.step,
        )
    return opened


def open_shards(
    ledger: Ledger,
    trials: Mapping[str, Trial],
    cost: Cost,
    target_seconds: float,
    *,
    max_requests: int = MAX_REQUESTS,
) -> list[Shard]:
    """Shards of everything that nobody has answered yet (a failed request counts as answered)."""
    waiting: list[Request] = []
    for trial in trials.values():
        if trial.responses < trial.requests and trial.state is not TrialState.FAILED:
            waiting.extend(ledger.open_requests(trial.id))
    scope = digest_of(sorted(trial.key for trial in trials.values()))
    return cut(waiting, cost, target_seconds, scope=scope, max_requests=max_requests)


def keep_responses(
    ledger: Ledger, trials: Mapping[str, Trial], responses: Sequence[Response], worker: str = ""
) -> None:
    """Put a shard's responses into the ledger, each to its task's trial, in one transaction.

    Raises:
        BadInputError: a response names a task that is none of ``trials``.
    """
    grouped: dict[int, list[Response]] = {}
    for response in responses:
        trial = trials.get(response.id.task)
        if trial is None:
            raise BadInputError(f"response {tuple(response.id)}: its task is not in this run")
        grouped.setdefault(trial.id, []).append(response)
    ledger.put_responses(grouped, worker)


def score_job(
    ledger: Ledger,
    trials: Mapping[str, Trial],
    recording: Recording,
    settings: EvalSettings,
    model: Model,
    output: Path,
    *,
    failed: Mapping[str, str] | None = None,
    max_length: int | None = None,
    block: Mapping[str, Any] | None = None,
) -> ScoreJob:
    """Write a run's answers beside its results-to-be and describe the scoring of it.

    The job is JSON: hand it to a metric worker (:func:`evalsched.scoring.score` there) or to
    :func:`evalsched.scoring.score_in_subprocess`.
    """
    output.mkdir(parents=True, exist_ok=True)
    answers = output / ".answers.jsonl"
    write_answers(answers, (r for trial in trials.values() for r in ledger.responses_of(trial.id)))
    return ScoreJob(
        settings=settings,
        model=str(model.path),
        tokenizer=str(model.path),
        recording=str(recording.folder),
        answers=str(answers),
        output=str(output),
        failed=dict(failed or {}),
        max_length=max_length,
        block={"model_digest": model.digest, "tokenizer_digest": model.tokenizer, "job": model.job, "step": model.step}
        | dict(block or {}),
    )


def score(job: ScoreJob, *, timeout: float = 3600.0) -> ScoreOutcome:
    """Score in a process of its own and remove the answers' file afterwards."""
    try:
        return score_in_subprocess(job, timeout=timeout)
    finally:
        Path(job.answers).unlink(missing_ok=True)


def keep_scores(ledger: Ledger, trials: Mapping[str, Trial], outcome: ScoreOutcome) -> None:
    """Put a scoring's numbers into the ledger and close its trials (done, or failed with the reason)."""
    for task, trial in trials.items():
        if task in outcome.failed:
            ledger.set_trial_state(trial.id, TrialState.FAILED, outcome.failed[task])
            continue
        ledger.put_scores(trial.id, scores_of_task(outcome, task))
        ledger.set_trial_state(trial.id, TrialState.DONE)


def scores_of_task(outcome: ScoreOutcome, task: str) -> dict[str, dict[str, Any]]:
    """A task's metrics as the ledger keeps them: ``acc,none`` to value, stderr, low, high, n."""
    metrics = outcome.metrics.get(task, {})
    intervals = outcome.intervals.get(task, {})
    found: dict[str, dict[str, Any]] = {}
    for key, value in metrics.items():
        name, comma, filter_name = key.partition(",")
        if not comma or name.endswith("_stderr") or isinstance(value, (str, bool)) or value is None:
            continue
        interval = intervals.get(key, {})
        stderr = metrics.get(f"{name}_stderr,{filter_name}")
        found[key] = {
            "value": float(value),
            "stderr": float(stderr) if isinstance(stderr, (int, float)) else interval.get("stderr"),
            "low": interval.get("low"),
            "high": interval.get("high"),
            "n": interval.get("n", metrics.get("sample_len")),
            "higher_is_better": outcome.higher_is_better.get(task, {}).get(name),
        }
    return found


def answers_of(ledger: Ledger, trials: Mapping[str, Trial]) -> dict[RequestId, Response]:
    """All responses of a run by identity."""
    return {r.id: r for trial in trials.values() for r in ledger.responses_of(trial.id)}


def renewed(ledger: Ledger, trials: Mapping[str, Trial]) -> dict[str, Trial]:
    """The same trials as the ledger has them now."""
    found = {task: ledger.trial(trial.id) for task, trial in trials.items()}
    return {task: trial if trial is not None else replace(trials[task]) for task, trial in found.items()}
