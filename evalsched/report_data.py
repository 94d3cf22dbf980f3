"""What a report is made of, read from files: results, samples, a job's events and metrics."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from evalsched.comparison import Delta, Gate, decide_gate, delta, independent_stderr, paired_stderr
from planner.errors import BadInputError, one_line
from planner.ettr import Account, account
from planner.events import Action, Event
from planner.files import read_json_lines
from planner.manifest import parse_step_dir

_LARGEST_SAMPLES = 64 << 20
"""Bytes of a samples file above which differences are not computed document by document."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One metric of one task at one checkpoint. ``low`` and ``high`` end its 95% interval."""

    task: str
    metric: str
    value: float
    stderr: float | None
    low: float | None
    high: float | None
    n: int | None
    higher_is_better: bool | None
    primary: bool

    def to_json(self) -> dict[str, Any]:
        """The shape of the JSON report."""
        return {
            name: getattr(self, name) for name in ("value", "stderr", "low", "high", "n", "higher_is_better", "primary")
        }


@dataclass(frozen=True)
class Evaluated:
    """One results file: a checkpoint on its tasks."""

    path: Path
    data: Mapping[str, Any]

    @cached_property
    def step(self) -> int | None:
        """The training step, where the file or a folder's name tells it."""
        step = self.block.get("step")
        if isinstance(step, int):
            return step
        for name in (self.path.parent.name, Path(str(self.data.get("model_name") or "")).name):
            if parsed := parse_step_dir(name.removesuffix(".results")):
                return parsed[0]
        return None

    @property
    def label(self) -> str:
        """How the report names it."""
        return f"step {self.step:,}" if self.step is not None else self.path.parent.name

    @property
    def block(self) -> Mapping[str, Any]:
        """The ``planaria`` block (empty for a file of lm-eval's own)."""
        found = self.data.get("planaria")
        return found if isinstance(found, Mapping) else {}

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """All numbers, by task (tasks before groups, as in the file) and metric."""
        found: list[Score] = []
        for task, values in self.data.get("results", {}).items():
            found.extend(self._scores_of(task, values))
        return tuple(found)

    def _scores_of(self, task: str, values: Mapping[str, Any]) -> list[Score]:
        keys = [key for key in values if _is_metric(key, values[key])]
        primary = self._primary(task, keys)
        intervals = self.block.get("intervals", {}).get(task, {})
        better = self.data.get("higher_is_better", {}).get(task) or {}
        count = (self.data.get("n-samples", {}).get(task) or {}).get("effective")
        found = []
        for key in keys:
            name, _, filter_ = key.partition(",")
            interval = intervals.get(key, {})
            stderr = values.get(f"{name}_stderr,{filter_}")
            if not isinstance(stderr, (int, float)):
                stderr = interval.get("stderr")
            low, high = interval.get("low"), interval.get("high")
            if low is None and stderr is not None:
                low, high = values[key] - 1.96 * stderr, values[key] + 1.96 * stderr
            found.append(
                Score(
                    task=task, metric=key, value=float(values[key]), stderr=stderr, low=low, high=high,
                    n=interval.get("n", count), higher_is_better=better.get(name), primary=key == primary,
                )
            )  # fmt: skip
        return found

    def _primary(self, task: str, keys: Sequence[str]) -> str | None:
        """The metric that the task's own configuration lists first."""
        listed = (self.data.get("configs", {}).get(task) or {}).get("metric_list") or []
        for entry in listed:
            for key in keys:
                if key.partition(",")[0] == entry.get("metric"):
                    return key
        return keys[0] if keys else None

    def score(self, task: str, metric: str) -> Score | None:
        """One number, if it is there."""
        return next((s for s in self.scores if (s.task, s.metric) == (task, metric)), None)

    def values(self, task: str, metric: str) -> dict[tuple[Any, Any], Any]:
        """Per-document values of a metric by document and its hash; empty where no samples are kept."""
        path = self.path.parent / f"samples_{task}.jsonl"
        if not path.is_file() or path.stat().st_size > _LARGEST_SAMPLES:
            return {}
        name, _, filter_ = metric.partition(",")
        found: dict[tuple[Any, Any], Any] = {}
        for sample in read_json_lines(path):
            if sample.get("filter") == filter_ and name in sample:
                found[sample.get("doc_id"), sample.get("doc_hash")] = sample[name]
        return found


def _is_metric(key: str, value: Any) -> bool:
    name, comma, _ = key.partition(",")
    return (
        bool(comma) and not name.endswith("_stderr") and isinstance(value, (int, float)) and not isinstance(value, bool)
    )


@dataclass(frozen=True, kw_only=True)
class Marker:
    """An event on a curve."""

    step: float
    label: str
    kind: str
    """``fault`` or ``other``."""


@dataclass(frozen=True, kw_only=True)
class JobData:
    """What a job's folder tells besides its evaluations."""

    name: str
    state: str
    account: Account | None
    loss: tuple[tuple[int, float], ...]
    """(step, loss), the last line of each step."""
    valid_loss: tuple[tuple[int, float], ...]
    markers: tuple[Marker, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that a report shows."""

    title: str
    folder: Path
    evaluated: tuple[Evaluated, ...]
    job: JobData | None = None
    deltas: tuple[tuple[Delta, ...], ...] = ()
    """For each checkpoint, the moves since the one before."""
    gates: tuple[Gate, ...] = field(default=())
    left_out: tuple[tuple[str, str], ...] = ()
    """(checkpoint, what was left out and why): evaluations skipped or made smaller because evaluation was behind."""

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Tasks and groups with a number, in order of appearance."""
        return tuple(dict.fromkeys(score.task for one in self.evaluated for score in one.scores))

    def primary_of(self, task: str) -> str | None:
        """The metric that stands for a task in table and curve."""
        for one in reversed(self.evaluated):
            for score in one.scores:
                if score.task == task and score.primary:
                    return score.metric
        return None


# ---------------------------------------------------------------- reading


def results_files(folder: Path) -> list[Path]:
    """Results below a folder: its own, those of its sub-folders, those of a job's ``reports``, lm-eval's own files."""
    direct = folder / "results.json"
    if direct.is_file() and not (folder / "reports").is_dir():
        return [direct]
    found: list[Path] = []
    for base in (folder, folder / "reports"):
        found += base.glob("*/results.json")
    found += folder.glob("*/results_*.json")
    return sorted({path for path in found if path.is_file()})


def read_results(path: Path) -> Evaluated:
    """One results file.

    Raises:
        BadInputError: it is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read as results ({one_line(error)[:120]})") from error
    if not isinstance(data, dict) or not isinstance(data.get("results"), dict):
        raise BadInputError(f"{path}: not a results file (it has no results)")
    return Evaluated(path, data)


def read_report(folder: Path) -> ReportData:
    """Everything below a results folder or a job's folder.

    Raises:
        BadInputError: there is neither a result nor a job, or a file is broken.
    """
    found = [read_results(path) for path in results_files(folder)]
    found.sort(key=lambda one: (one.step is None, one.step or 0, one.data.get("date") or 0, str(one.path)))
    job = _read_job(folder) if (folder / "events.jsonl").is_file() else None
    if not found and job is None:
        raise BadInputError(f"{folder}: neither results.json (here or one folder below) nor a job's events.jsonl")
    deltas: list[tuple[Delta, ...]] = []
    gates: list[Gate] = []
    for number, one in enumerate(found):
        before = found[number - 1] if number else None
        moves = compare(before, one) if before else ()
        deltas.append(moves)
        gates.append(decide_gate((m for m in moves if _is_primary(one, m)), _broken(before, one)))
    return ReportData(
        title=job.name if job else folder.resolve().name, folder=folder, evaluated=tuple(found), job=job,
        deltas=tuple(deltas), gates=tuple(gates), left_out=tuple(_left_out(folder, found)),
    )  # fmt: skip


def _left_out(folder: Path, found: Sequence[Evaluated]) -> list[tuple[str, str]]:
    rows = [(one.step or 0, one.label, str(one.block["remark"])) for one in found if one.block.get("remark")]
    for base in (folder, folder / "reports"):
        for path in base.glob("*/skipped.json"):
            if (path.parent / "results.json").is_file():
                continue  # it was evaluated after all
            try:
                data = json.loads(path.read_text(encoding="utf-8"))
                rows.append((int(data["step"] or 0), f"step {int(data['step'] or 0):,}", f"skipped: {data['reason']}"))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # half written by a process that died
    return [(label, text) for _, label, text in sorted(rows)]


def _is_primary(one: Evaluated, move: Delta) -> bool:
    score = one.score(move.task, move.metric)
    return score is not None and score.primary


def _broken(before: Evaluated | None, now: Evaluated) -> dict[str, str]:
    """Tasks that failed at this checkpoint and had a number at the one before."""
    if before is None:
        return {}
    had = {score.task for score in before.scores}
    failed: Mapping[str, str] = now.block.get("failed", {})
    return {task: f"no number any more ({reason})" for task, reason in failed.items() if task in had}


def compare(before: Evaluated, now: Evaluated) -> tuple[Delta, ...]:
    """The move of every metric that both have, document by document where both kept their samples."""
    moves: list[Delta] = []
    for score in now.scores:
        old = before.score(score.task, score.metric)
        if old is None:
            continue
        first, second = before.values(score.task, score.metric), now.values(score.task, score.metric)
        stderr: float | None = None
        paired = bool(first) and first.keys() == second.keys()
        if paired:
            stderr = paired_stderr(list(first.values()), [second[key] for key in first])
            if stderr is not None:
                stderr *= _scale(score.metric, score.value)
        if stderr is None:
            paired, stderr = False, independent_stderr(old.stderr, score.stderr)
        moves.append(
            delta(
                score.task, score.metric, old.value, score.value, higher_is_better=score.higher_is_better,
                stderr=stderr, paired=paired,
            )
        )  # fmt: skip
    return tuple(moves)


def _scale(metric: str, value: float) -> float:
    """From the ratio of log-likelihood to weight, which is what samples hold, to the metric that is shown."""
    name = metric.partition(",")[0]
    if name == "bits_per_byte":
        return 1.4426950408889634
    return value if name in ("byte_perplexity", "word_perplexity") else 1.0


def _read_job(folder: Path) -> JobData:
    lines = list(read_json_lines(folder / "events.jsonl"))
    events: list[Event] = []
    for line in lines:
        try:
            events.append(Event.from_json(line))
        except (KeyError, ValueError, TypeError):
            continue  # of another version; what is known is shown
    metrics = list(read_json_lines(folder / "metrics.jsonl"))
    by_step = {int(line["step"]): line for line in metrics if isinstance(line.get("step"), int)}
    states = [event.new for event in events if event.action is Action.JOB_STATE and event.new]
    last = max((event.time for event in events), default=0.0)
    return JobData(
        name=_job_name(folder),
        state=states[-1] if states else "",
        account=account(events, metrics, last) if events and metrics else None,
        loss=_series(by_step, "loss"),
        valid_loss=_series(by_step, "valid_loss"),
        markers=tuple(markers(events)),
        events=tuple(events),
    )


def _job_name(folder: Path) -> str:
    try:
        config = json.loads((folder / "config.json").read_text())
        return f"{config['name']} ({folder.name})" if config["name"] not in folder.name else folder.name
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name


def _series(by_step: Mapping[int, Mapping[str, Any]], name: str) -> tuple[tuple[int, float], ...]:
    return tuple((step, float(line[name])) for step, line in sorted(by_step.items()) if line.get(name) is not None)


_MARKED = {
    Action.FAULT_INJECTED: "fault",
    Action.FAULT_DETECTED: "fault",
    Action.REFORM_COMPLETED: "other",
    Action.ROLLED_BACK: "other",
    Action.LOSS_SPIKE: "fault",
}


def markers(events: Iterable[Event]) -> list[Marker]:
    """Events that belong on a curve over steps; a fault that was injected is not shown again when it is detected."""
    marked = [e for e in events if e.action in _MARKED and isinstance(e.details.get("step"), (int, float))]
    injected = {int(e.details["step"]) for e in marked if e.action is Action.FAULT_INJECTED}
    found: list[Marker] = []
    for event in marked:
        kind, step = _MARKED[event.action], event.details["step"]
        if event.action is Action.FAULT_DETECTED and any(abs(int(step) - other) <= 1 for other in injected):
            continue
        found.append(Marker(step=float(step), label=_marker_label(event), kind=kind))
    return found


def _marker_label(event: Event) -> str:
    what = event.details.get("kind") or event.details.get("cause") or event.action.value.replace(".", " ")
    rank = event.details.get("rank")
    return f"{what}, rank {rank}" if rank is not None else str(what)
