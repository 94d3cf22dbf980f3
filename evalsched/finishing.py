"""Both ends of a run: recording, a sample of its requests once more, one at a time, and lm-eval's own scoring."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from evalsched.engine_check import choice_lengths, compare_responses, sample_documents
from evalsched.evaluation import answers_of, keep_scores, score_job
from evalsched.judge import new_verdicts, read_verdicts
from evalsched.ledger import Ledger
from evalsched.metric_desk import MetricDesk, NoMetricWorkerError
from evalsched.program_cache import NAME as PROGRAMS
from evalsched.recording import (
    Recording,
    RecordJob,
    check_settings,
    find_recording,
    load_recording,
    record_in_subprocess,
)
from evalsched.reports import refresh_report
from evalsched.runs import MANY_REQUESTS, Run
from evalsched.scoring import ScoreJob, ScoreOutcome, score_in_subprocess
from evalsched.types import Request, RequestId, Response, Shard, digest_of
from planner.errors import PlanariaError, one_line
from planner.files import write_json

log = logging.getLogger("planaria.evaluation")

SKIPPED = "skipped.json"
"""Beside where a checkpoint's results would be: why there are none."""
CHECK_REQUESTS = 48
"""Requests that are re-run singly after a run, to say how far answers depend on their batch."""
CHECK_BOUNDS = {True: (0.01, 1.0), False: (0.05, 2.0)}
"""Bounds of that sample by ``exact``, in estimated seconds: a share of the run's work, and what is always allowed.
Under ``--exact`` it confirms what the engine's settings already see to; without, it is all that is known."""


def say_skipped(run: Run, reason: str) -> None:
    """Leave word of a checkpoint that is not evaluated, and renew the report that shows it."""
    output = Path(run.spec.output)
    output.mkdir(parents=True, exist_ok=True)
    tasks = list(run.spec.settings.tasks)
    write_json(output / SKIPPED, {"step": run.spec.step, "tasks": tasks, "reason": reason})
    refresh_report(output)


def check_shard(run: Run) -> Shard | None:
    """The sample that is run again, one request at a time; None where nothing was run.

    Whole documents, so that their verdicts can be compared; under ``--exact`` every answer must be the same bit for
    bit, and a document may be cut.
    """
    if run.prepared is None or run.pace.total <= 0:
        return None
    requests = [one for one in run.prepared.open if one.task not in run.failed]
    budget = _check_budget(run)
    sample: list[Request] = []
    seconds = 0.0
    for one in sample_documents(requests, CHECK_REQUESTS):
        new_document = not sample or (sample[-1].task, sample[-1].doc_id) != (one.task, one.doc_id)
        if sample and (new_document or run.spec.settings.exact) and seconds > budget:
            break
        sample.append(one)
        seconds += run.pace.cost.get(one.id, 0.01)
    if not sample:
        return None
    return Shard(id=digest_of([run.id, "check"]), requests=tuple(sample), seconds=max(1.0, seconds))


def _check_budget(run: Run) -> float:
    """Seconds that re-running a sample may take."""
    share, least = CHECK_BOUNDS[run.spec.settings.exact]
    return max(least, share * run.pace.total)


def expect_end(run: Run) -> None:
    """Estimate what comes after the last answer: the check, and scoring, which builds the requests once more."""
    if run.prepared is None or not run.pace.cost:
        return
    mean = run.pace.total / len(run.pace.cost)
    run.check_seconds = min(_check_budget(run), CHECK_REQUESTS * mean, run.pace.total)
    if len(run.prepared.open) <= MANY_REQUESTS and (sample := check_shard(run)) is not None:
        run.check_seconds = sum(run.cost(one) for one in sample.requests)  # one may cost more than the budget
    run.score_seconds = run.prepared.recording.seconds


def note_check(run: Run, responses: list[Response]) -> None:
    """Keep answers of the check's shard."""
    run.check = run.check if run.check is not None else {}
    run.check.setdefault("responses", []).extend(responses)


def _known_verdicts(ledger: Ledger, run: Run, folder: Path) -> Path | None:
    """What judges said before on these tasks, as a file in ``folder``; None where nobody did."""
    found = ledger.verdicts(run.prepared.trials if run.prepared else ())
    if not found:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".known_verdicts.jsonl"
    path.write_text("".join(json.dumps(one.to_json()) + "\n" for one in found), encoding="utf-8")
    return path


def _keep_verdicts(ledger: Ledger, output: Path, known: Path | None) -> None:
    """New verdicts into the ledger, also those of a scoring that failed: they were paid for."""
    fresh = new_verdicts(output)
    ledger.put_verdicts(read_verdicts(fresh))
    for path in (fresh, known, output / PROGRAMS):
        if path is not None:
            path.unlink(missing_ok=True)


def record_somewhere(desk: MetricDesk, job: RecordJob, run: str) -> Recording:
    """The recording of ``job``: from the cache, by a metric worker, or by a subprocess where there is none.

    Raises:
        BadInputError: a task is unknown or cannot be loaded, a limit is wrong.
        WorkFailedError: recording failed.
    """
    check_settings(job.settings)
    if found := find_recording(job):
        return found
    try:
        return load_recording(Path(desk.call("record", job.to_json(), run)["folder"]))
    except NoMetricWorkerError:
        return record_in_subprocess(job)


def score_somewhere(desk: MetricDesk, job: ScoreJob, run: str) -> ScoreOutcome:
    """Score on a metric worker, or in a subprocess where there is none.

    Raises:
        WorkFailedError: answers are missing, or scoring failed.
    """
    try:
        return ScoreOutcome.from_json(desk.call("score", job.to_json(), run))
    except NoMetricWorkerError:
        return score_in_subprocess(job)


def _compared(run: Run, answers: Mapping[RequestId, Response]) -> dict[str, Any]:
    assert run.check is not None
    assert run.prepared is not None
    return compare_responses(answers, run.check["responses"], choice_lengths(run.prepared.open)).to_json()


def score_early(run: Run, ledger: Ledger, scorer: Callable[[ScoreJob], ScoreOutcome], task: str) -> float | None:
    """Compute one task's metrics while others are being answered, for the verdicts that it leaves; its seconds.

    What goes wrong here goes wrong again, and is told, in the scoring at the end: None.
    """
    if run.prepared is None or run.model is None:
        return None
    output = Path(run.spec.output)
    scratch = output / f".early-{digest_of(task)[:8]}"
    started = time.monotonic()
    others = dict.fromkeys(set(run.prepared.trials) - {task}, "not answered yet")
    known = _known_verdicts(ledger, run, scratch)
    try:
        job = score_job(
            ledger, {task: run.prepared.trials[task]}, run.prepared.recording, run.spec.settings, run.model.model,
            scratch, failed=others, max_length=run.model.max_length,
        )  # fmt: skip
        scorer(replace(job, verdicts=str(known) if known else "", keep=str(output)))
    except PlanariaError as error:
        log.warning("action=score.early task=%s reason=%s", task, one_line(error))
        return None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return time.monotonic() - started


def score_run(
    run: Run,
    ledger: Ledger,
    scorer: Callable[[ScoreJob], ScoreOutcome],
    calibration: Mapping[str, Mapping[str, Any]] | None = None,
) -> ScoreOutcome:
    """Answers from the ledger into a file, lm-eval's scoring, scores into the ledger, the report renewed.

    Raises:
        WorkFailedError: answers are missing, or scoring failed.
        MissingServiceError: the ledger is away.
    """
    if run.prepared is None or run.model is None:
        raise ValueError(f"run {run.id} is not prepared")
    started = time.monotonic()
    answers = answers_of(ledger, run.prepared.trials)
    check: dict[str, Any] | None = None
    if run.check is not None:
        problem = run.check.get("problem")
        check = {"problem": problem} if problem else _compared(run, answers)
    job = score_job(
        ledger,
        run.prepared.trials,
        run.prepared.recording,
        run.spec.settings,
        run.model.model,
        Path(run.spec.output),
        failed=run.failed,
        max_length=run.model.max_length,
        block={
            "engine": dict(run.model.engine_key),
            "batch_check": check,
            "timings": dict(run.timings),
            "remark": run.spec.remark,
            "calibration": dict(calibration or {}),
        },
    )
    known = _known_verdicts(ledger, run, Path(run.spec.output))
    try:
        outcome = scorer(replace(job, verdicts=str(known) if known else ""))
    finally:
        Path(job.answers).unlink(missing_ok=True)
        _keep_verdicts(ledger, Path(run.spec.output), known)
    keep_scores(ledger, run.prepared.trials, outcome)
    refresh_report(Path(run.spec.output))
    run.timings["score_seconds"] = time.monotonic() - started
    return outcome
