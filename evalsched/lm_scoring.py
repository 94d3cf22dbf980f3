"""Replay inside lm-eval. Imports lm-eval; runs in a metric worker or a subprocess, never in the scheduler."""

from __future__ import annotations

import functools
import json
import logging
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.evaluator_utils import _process_results
from lm_eval.filters import build_filter_ensemble
from lm_eval.loggers import EvaluationTracker
from lm_eval.utils import handle_non_serializable

from evalsched.intervals import of_metric
from evalsched.lm_recording import OfflineLM, task_config_digest
from evalsched.lm_tasks import LoadingManager, simple_evaluate_arguments, task_manager
from evalsched.strictness import Flag, collect, untrusted_documents
from evalsched.types import RequestId, Response, request_digest
from planner.errors import PlanariaError, WorkFailedError, one_line

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from evalsched.recording import Recording
    from evalsched.scoring import ScoreJob, ScoreOutcome

_PLACEHOLDERS: dict[str, Any] = {
    "loglikelihood": (-1e4, False),
    "loglikelihood_rolling": -1e4,
    "generate_until": "",
}
"""What stands in for an answer that does not exist; its document is kept out of every result."""


class ReplayLM(OfflineLM):
    """Answers from the record by (request type, task, doc_id, idx, occurrence), and only what was recorded."""

    def __init__(
        self, tokenizer: Path, recorded: Mapping[RequestId, str], answers: Mapping[RequestId, Response]
    ) -> None:
        super().__init__(tokenizer)
        self._recorded = recorded
        self._answers = answers
        self._seen: Counter[tuple[str, str, int, int]] = Counter()

    def _answer(self, request_type: str, requests: Sequence[Instance]) -> list[Any]:
        return [self._one(request_type, instance) for instance in requests]

    def _one(self, request_type: str, instance: Instance) -> Any:
        key = (request_type, str(instance.task_name), int(instance.doc_id or 0), instance.idx)
        identity = RequestId(*key, self._seen[key])
        self._seen[key] += 1
        if self._recorded.get(identity) != request_digest(request_type, instance.args):
            raise WorkFailedError(
                f"task {identity.task}: document {identity.doc_id} asks for something else than was recorded; "
                "its files changed meanwhile: evaluate again"
            )
        response = self._answers.get(identity)
        value = None if response is None else response.value
        return _PLACEHOLDERS[request_type] if value is None else value

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Recorded answers."""
        return self._answer("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Recorded answers."""
        return self._answer("loglikelihood_rolling", requests)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Recorded answers."""
        return self._answer("generate_until", requests)


class _TaskBrokeError(Exception):
    """A task could not be filtered or judged: its own code raised, or what runs its programs here did not come up."""

    def __init__(self, task: str, error: Exception) -> None:
        if isinstance(error, PlanariaError):
            super().__init__(one_line(error))
        else:
            super().__init__(f"its own code failed on the answers: {type(error).__name__}: {one_line(error)[:200]}")
        self.task = task


def _guarded(task: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:  # whatever a task's own code raises
            raise _TaskBrokeError(task, error) from error

    return call


class _ScoringManager(LoadingManager):
    """Gives failed tasks no metric and leaves out the groups above them, so that the others are scored."""

    failed: frozenset[str] = frozenset()

    def load(self, task_list: Any) -> Any:
        """Load as lm-eval does; what is done besides leaves the random generators as they were.

        Tasks may draw from them while requests are built, and even lm-eval's ``Task.task_name`` draws.
        """
        loaded = super().load(task_list)
        state = random.getstate()
        for name, task in loaded["tasks"].items():
            if name in self.failed:
                task.process_results = lambda _doc, _results: {}
                task._filters = [build_filter_ensemble("none", [["take_first", None]])]
            else:
                task.process_results = _guarded(name, task.process_results)
                task.apply_filters = _guarded(name, task.apply_filters)
        loaded["groups"] = _groups_without(loaded.get("groups", {}), self.failed)
        random.setstate(state)
        return loaded


def _groups_without(groups: Mapping[str, Any], failed: frozenset[str] | set[str]) -> dict[str, Any]:
    return {
        name: group
        for name, group in groups.items()
        if not failed.intersection(task.task_name for task in group.get_all_tasks())
    }


@functools.cache
def _environment() -> str:
    from torch.utils import collect_env

    return str(collect_env.get_pretty_env_info())  # type: ignore[no-untyped-call]


def _remember_environment() -> None:
    """lm-eval describes the machine at every run, which takes a second: once a process is enough."""
    from torch.utils import collect_env

    if collect_env.get_pretty_env_info is not _environment:
        text = _environment()
        collect_env.get_pretty_env_info = _environment
        assert text == collect_env.get_pretty_env_info()


def score_job(job: ScoreJob, recording: Recording, answers: Mapping[RequestId, Response]) -> ScoreOutcome:
    """Replay, judge, write. See :func:`evalsched.scoring.score`."""
    from evalsched.scoring import ScoreOutcome

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    started = time.monotonic()
    _remember_environment()
    requests = recording.requests()
    flags = _with_true_ids(collect(requests, answers), job)
    output = Path(job.output)
    output.mkdir(parents=True, exist_ok=True)
    for left in output.glob(".scoring.*"):  # of a scoring that was killed; one results folder has one scorer
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=output, prefix=".scoring."))
    try:
        tracker = EvaluationTracker(output_path=str(scratch / "results.json"))
        recorded = {r.id: r.digest for r in requests}
        results, manager, job = _replay_what_works(job, recording, recorded, answers, tracker)
        judged = _judge(job, results, manager, flags)
        samples = results.pop("samples")
        results["planaria"] = _block(job, recording, manager, judged, samples, flags)
        _write(tracker, results, samples, judged.apart, scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return ScoreOutcome(
        results=str(output / "results.json"),
        metrics=json.loads(json.dumps(results["results"], default=handle_non_serializable)),
        intervals=results["planaria"]["intervals"],
        higher_is_better=results["higher_is_better"],
        flags=tuple(flag.to_json() for flag in flags),
        untrusted={task: tuple(ids) for task, ids in judged.untrusted.items()},
        failed=dict(judged.failed),
        seconds=time.monotonic() - started,
        strict=job.settings.strict,
    )


def _replay_what_works(
    job: ScoreJob,
    recording: Recording,
    recorded: Mapping[RequestId, str],
    answers: Mapping[RequestId, Response],
    tracker: EvaluationTracker,
) -> tuple[dict[str, Any], LoadingManager, ScoreJob]:
    """Replay, and again without each task whose own code breaks on its answers: it fails, the others do not."""
    while True:
        try:
            results, manager = _replay(job, recording, recorded, answers, tracker)
            return results, manager, job
        except _TaskBrokeError as broken:
            if broken.task in job.failed:
                raise WorkFailedError(f"task {broken.task}: {broken}") from broken
            job = replace(job, failed={**job.failed, broken.task: str(broken)})


def _replay(
    job: ScoreJob,
    recording: Recording,
    recorded: Mapping[RequestId, str],
    answers: Mapping[RequestId, Response],
    tracker: EvaluationTracker,
) -> tuple[dict[str, Any], LoadingManager]:
    manager, _ = task_manager(job.settings, {"pretrained": job.tokenizer}, _ScoringManager)
    manager.failed = frozenset(job.failed)
    model = ReplayLM(Path(job.tokenizer), recorded, answers)
    results = simple_evaluate(
        model=model,
        model_args={"pretrained": job.model},
        tasks=list(recording.names),
        task_manager=manager,
        bootstrap_iters=job.settings.bootstrap_iters,
        evaluation_tracker=tracker,
        log_samples=True,
        **simple_evaluate_arguments(job.settings),
    )
    for task in recording.tasks:
        if task_config_digest(manager.loaded["tasks"][task.task]) != task.config:
            raise WorkFailedError(f"task {task.task}: its configuration or documents changed since the recording")
    results["config"]["model"] = str(job.block.get("engine", {}).get("name", "planaria"))
    results.update({**recording.tokenizer_info, "max_length": job.max_length})
    return dict(results or {}), manager


def _with_true_ids(flags: list[Flag], job: ScoreJob) -> list[Flag]:
    """Document numbers as the user knows them: with ``samples`` a request's number is its place in the selection."""
    chosen = job.settings.samples or {}
    return [
        Flag(kind=f.kind, task=f.task, doc_id=chosen[f.task][f.doc_id], choice=f.choice, detail=f.detail)
        if f.task in chosen
        else f
        for f in flags
    ]


class _Judged:
    """What was kept out of the results, and lm-eval's own numbers with it in."""

    def __init__(self) -> None:
        self.untrusted: dict[str, list[int]] = {}
        self.failed: dict[str, str] = {}
        self.apart: dict[str, list[Any]] = {}
        self.lm_eval: dict[str, Any] | None = None


def _judge(job: ScoreJob, results: dict[str, Any], manager: LoadingManager, flags: list[Flag]) -> _Judged:
    """Take failed tasks out, and in strict mode the documents whose verdict must not be believed."""
    judged = _Judged()
    judged.failed = dict(job.failed)
    judged.untrusted = untrusted_documents(flag for flag in flags if flag.task not in job.failed)
    unanswered = untrusted_documents(f for f in flags if f.kind in _NEVER_TRUSTED and f.task not in job.failed)
    excluded = judged.untrusted if job.settings.strict else unanswered
    if excluded:
        whole: dict[str, Any] = {key: results[key] for key in ("results", "groups") if key in results}
        _exclude(job, results, manager, excluded, judged)
        if job.settings.strict:
            judged.lm_eval = whole
    for name in judged.failed:
        _drop(results, name)
    return judged


_NEVER_TRUSTED = frozenset({"no_answer"})
"""There is no number of lm-eval's for these, so compat mode leaves them out too."""


def _exclude(
    job: ScoreJob,
    results: dict[str, Any],
    manager: LoadingManager,
    excluded: Mapping[str, Sequence[int]],
    judged: _Judged,
) -> None:
    acc: dict[str, Any] = {}
    for name, task in manager.loaded["tasks"].items():
        out = set(excluded.get(name, ()))
        kept = [sample for sample in results["samples"][name] if sample["doc_id"] not in out]
        judged.apart[name] = [sample for sample in results["samples"][name] if sample["doc_id"] in out]
        raw: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for sample in kept:
            for metric in sample["metrics"]:
                raw[(metric, sample["filter"])].append(sample[metric])
        if not kept and name not in judged.failed:
            judged.failed[name] = "no document is left whose verdict can be trusted"
        acc[name] = {"task": task, "raw_metrics": raw, "logged_samples": kept}
    groups = _groups_without(manager.loaded["groups"], set(judged.failed))
    again = _process_results(acc, groups, job.settings.bootstrap_iters)
    for key in ("results", "groups"):
        results.pop(key, None)
    results.update(again._to_eval_results(samples=again.samples))


def _drop(results: dict[str, Any], name: str) -> None:
    for key in ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "samples"):
        results.get(key, {}).pop(name, None)


def _block(
    job: ScoreJob,
    recording: Recording,
    manager: LoadingManager,
    judged: _Judged,
    samples: Mapping[str, list[Any]],
    flags: list[Flag],
) -> dict[str, Any]:
    """The ``planaria`` block: what is ours."""
    counts = Counter((flag.task, flag.kind.value) for flag in flags)
    return {
        **job.block,
        "strict": job.settings.strict,
        "settings": job.settings.to_json(),
        "recording": recording.key,
        "tasks": {
            task.task: {
                "requests": task.requests,
                "documents": task.documents,
                "digest": task.digest,
                "config": task.config,
            }
            for task in recording.tasks
        },
        "intervals": _intervals(manager, samples),
        "groups": {name: _weighting(group) for name, group in sorted(manager.loaded["groups"].items())},
        "flags": [flag.to_json() for flag in flags if flag.untrusted],
        "flag_counts": {f"{task}: {kind}": count for (task, kind), count in sorted(counts.items())},
        "notes": [flag.to_json() for flag in flags if not flag.untrusted][:1000],
        "untrusted": {task: list(ids) for task, ids in judged.untrusted.items()},
        "failed": dict(sorted(judged.failed.items())),
        **({"lm_eval": judged.lm_eval} if judged.lm_eval else {}),
    }


def _weighting(group: Any) -> dict[str, str]:
    """How a group's score comes about, per metric (lm-eval's own code computes it)."""
    return {
        entry.metric: "mean over tasks, weighted by size" if entry.weight_by_size else "mean over tasks, unweighted"
        for entry in group.aggregate_metric_list or []
    }


def _intervals(manager: LoadingManager, samples: Mapping[str, list[Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, rows in samples.items():
        values: dict[str, list[Any]] = defaultdict(list)
        for sample in rows:
            for metric in sample["metrics"]:
                values[f"{metric},{sample['filter']}"].append(sample[metric])
        aggregation = manager.loaded["tasks"][name].aggregation()
        found[name] = {}
        for key, column in sorted(values.items()):
            function = aggregation.get(key.partition(",")[0])
            interval = of_metric(getattr(function, "__name__", "mean"), column)
            if interval is not None:
                found[name][key] = interval.to_json()
    return found


def _write(
    tracker: EvaluationTracker,
    results: dict[str, Any],
    samples: dict[str, list[Any]],
    apart: Mapping[str, list[Any]],
    scratch: Path,
    output: Path,
) -> None:
    """Let lm-eval write its files into ``scratch``, then move each into place, the results last."""
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    for name, rows in apart.items():
        if rows:
            tracker.save_results_samples(task_name=f"{name}.untrusted", samples=rows)
    date = tracker.date_id
    for name in results["configs"]:
        _move(scratch / f"samples_{name}_{date}.jsonl", output / f"samples_{name}.jsonl")
    for name, rows in apart.items():
        if rows:
            _move(scratch / f"samples_{name}.untrusted_{date}.jsonl", output / f"untrusted_{name}.jsonl")
        else:
            (output / f"untrusted_{name}.jsonl").unlink(missing_ok=True)
    _move(scratch / f"results_{date}.json", output / "results.json")


def _move(source: Path, target: Path) -> None:
    if not source.is_file():
        raise WorkFailedError(f"{target}: lm-eval could not write it (is the disk full, or the folder read-only?)")
    source.replace(target)
