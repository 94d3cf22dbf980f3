"""Scoring: lm-eval runs once more, with a model object that answers from the record. No GPU, no engine.

``simple_evaluate`` gives the numbers, ``EvaluationTracker`` writes the files; what is ours stands in the
``planaria`` block. In a long-lived metric worker :func:`score` runs in process (lm-eval is imported at the
first call); ``python -m evalsched.scoring`` does one job in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evalsched.code_metrics import ALLOW, why_not
from evalsched.judge import judging
from evalsched.program_cache import remembering
from evalsched.recording import LM_EVAL, Recording, load_recording, run_module
from evalsched.types import EvalSettings, RequestId, Response
from planner.errors import BadInputError, ExitCode, PlanariaError, WorkFailedError, one_line


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """What to score and where to write it: JSON in, so that it crosses a process boundary."""

    settings: EvalSettings
    model: str
    """Path of the checkpoint, as the results name it."""
    tokenizer: str
    """Folder of the tokenizer (the chat template is needed once more)."""
    recording: str
    """Folder of the :class:`evalsched.recording.Recording`."""
    answers: str
    """JSON lines of :class:`evalsched.types.Response`, in any order; of an identity given twice the last counts."""
    output: str
    """Folder of ``results.json`` and ``samples_<task>.jsonl``; made where it is missing."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Tasks that could not be completed, with the reason: they get no number, their groups neither."""
    max_length: int | None = None
    """The engine's window in tokens, for the results file."""
    verdicts: str = ""
    """JSON lines of :class:`evalsched.judge.Verdict` that the ledger holds."""
    keep: str = ""
    """Folder where verdicts of judges and on programs are kept between scorings; the output's when left out."""
    block: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the results' ``planaria`` block (engine, versions, timings, exactness …)."""

    def to_json(self) -> dict[str, Any]:
        """The document that ``python -m evalsched.scoring`` reads."""
        return {
            **self.__dict__,
            "settings": self.settings.to_json(),
            "failed": dict(self.failed),
            "block": dict(self.block),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScoreJob:
        """The job that :meth:`to_json` wrote."""
        return cls(**{**data, "settings": EvalSettings.from_json(data["settings"])})


@dataclass(frozen=True, kw_only=True)
class ScoreOutcome:
    """What a scoring gave. ``exit_code`` follows DESIGN.md: 1 where something failed or is not to be trusted."""

    results: str
    """Path of ``results.json``."""
    metrics: Mapping[str, Mapping[str, Any]]
    """``results["results"]``: metric values per task (and group)."""
    intervals: Mapping[str, Mapping[str, Any]]
    higher_is_better: Mapping[str, Mapping[str, bool | None]]
    flags: tuple[Mapping[str, Any], ...]
    untrusted: Mapping[str, tuple[int, ...]]
    """Documents per task that strict mode keeps out of the results."""
    failed: Mapping[str, str]
    seconds: float
    strict: bool

    @property
    def exit_code(self) -> ExitCode:
        """0, or 1: a task failed, or strict mode found a verdict that must not be believed."""
        bad = bool(self.failed) or (self.strict and bool(self.untrusted))
        return ExitCode.FAILED if bad else ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        """The last line that ``python -m evalsched.scoring`` prints."""
        return {
            **self.__dict__,
            "metrics": {name: dict(values) for name, values in self.metrics.items()},
            "flags": list(self.flags),
            "untrusted": {task: list(ids) for task, ids in self.untrusted.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScoreOutcome:
        """The outcome that :meth:`to_json` wrote."""
        untrusted = {task: tuple(ids) for task, ids in data["untrusted"].items()}
        return cls(**{**data, "flags": tuple(data["flags"]), "untrusted": untrusted})


def read_answers(path: Path) -> dict[RequestId, Response]:
    """Responses by identity; of an identity given twice the last counts.

    Raises:
        BadInputError: the file is missing or a line is no response.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            found = (Response.from_json(json.loads(line)) for line in stream if line.strip())
            return {response.id: response for response in found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path}: not a file of responses ({one_line(error)[:200]})") from error


def write_answers(path: Path, responses: Iterable[Response]) -> int:
    """Write responses as :func:`read_answers` reads them; how many."""
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for response in responses:
            stream.write(json.dumps(response.to_json()) + "\n")
            count += 1
    return count


def missing_answers(
    recording: Recording, answers: Mapping[RequestId, Response], failed: Iterable[str]
) -> list[RequestId]:
    """Requests of tasks that have not failed and that nobody answered."""
    out = set(failed)
    return [r.id for r in recording.requests() if r.task not in out and r.id not in answers]


def score(job: ScoreJob, answers: Mapping[RequestId, Response] | None = None) -> ScoreOutcome:
    """Score in this process (imports lm-eval, no GPU) and write the files.

    Raises:
        WorkFailedError: answers are missing, or the tasks build other requests than were recorded.
        BadInputError: recording or answers cannot be read, or a task cannot be loaded any more.
    """
    from evalsched.lm_scoring import score_job

    recording = load_recording(Path(job.recording))
    job = _without_refused(job, recording)
    found = answers if answers is not None else read_answers(Path(job.answers))
    if missing := missing_answers(recording, found, job.failed):
        raise WorkFailedError(f"{job.model}: {len(missing)} requests have no answer, the first is {tuple(missing[0])}")
    known = Path(job.verdicts) if job.verdicts else None
    keep = Path(job.keep or job.output)
    keep.mkdir(parents=True, exist_ok=True)
    with (
        LM_EVAL,
        _allowing(job.settings.allow_unsafe_code),
        remembering(keep),
        judging(Path(job.output), known, keep),
    ):
        return score_job(job, recording, found)


@contextlib.contextmanager
def _allowing(allowed: bool) -> Iterator[None]:
    """Hand the user's acceptance to metrics that run code (they are called by lm-eval, not by us)."""
    before = os.environ.get(ALLOW)
    if allowed:
        os.environ[ALLOW] = "1"
    try:
        yield
    finally:
        if allowed and before is None:
            del os.environ[ALLOW]


def _without_refused(job: ScoreJob, recording: Recording) -> ScoreJob:
    """Tasks whose metric runs code that a model wrote, where it cannot run safely, fail with the reason."""
    refused = {
        task.task: reason
        for task in recording.tasks
        if task.unsafe_code
        and task.task not in job.failed
        and (reason := why_not(task.sandboxed, job.settings.allow_unsafe_code)) is not None
    }
    return replace(job, failed={**job.failed, **refused}) if refused else job


def score_in_subprocess(job: ScoreJob, *, timeout: float = 3600.0) -> ScoreOutcome:
    """The same as :func:`score` in a process of its own."""
    return ScoreOutcome.from_json(run_module("evalsched.scoring", job.to_json(), timeout))


def main() -> int:
    """Read a job as JSON on stdin, score it, print the outcome; errors are one line and an exit code."""
    from evalsched.recording import end_with_owner, stdout_to_stderr

    end_with_owner()
    job = ScoreJob.from_json(json.load(sys.stdin))
    with stdout_to_stderr():
        try:
            outcome = score(job)
        except PlanariaError as error:
            print(f"planaria: {one_line(error)}", file=sys.stderr)
            return int(error.exit_code)
    print(json.dumps(outcome.to_json()))
    return int(ExitCode.DONE)


def iter_samples(folder: Path, task: str) -> Iterator[dict[str, Any]]:
    """The samples that were written for a task."""
    with (folder / f"samples_{task}.jsonl").open(encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


if __name__ == "__main__":
    sys.exit(main())
