"""Jobs from files: the AcmeTrace CSV schema, Slurm's ``sacct --parsable2``, and a real job's ``events.jsonl``.

Traces tell how many GPUs a job had and for how long, not how it would have run elsewhere: a training job is one of
fixed size with as much work as it did, evaluation jobs are evaluation demand of as many GPU-seconds. Jobs of other
kinds (and CPU jobs) are left out.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import mean, median
from typing import Any

from planner.errors import BadInputError, one_line
from planner.ettr import Account, account
from planner.events import Action, Event, JobState
from planner.severity import TABLE
from planner.simulation.failures import Failure
from planner.simulation.parameters import Parameters
from planner.simulation.scenario import ClusterSpec, TraceSpec
from planner.simulation.workload import GivenReport, TrainingJob, Work
from planner.types import Layout, ThroughputProfile

ACME_COLUMNS = ("job_id", "node_num", "gpu_num", "type", "state", "submit_time", "start_time", "end_time", "duration")
SLURM_COLUMNS = ("JobID", "JobName", "State", "Submit", "Start", "End", "NNodes", "AllocTRES")
MEASURED_STEPS = 3
"""Steps at a size that make its rate a measured one."""
TRAINING = frozenset({"pretrain", "sft", "mllm"})
"""Acme's types that are training; ``Eval`` and ``Evaluation`` are evaluation."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a file gave; times count from its first submission."""

    jobs: tuple[TrainingJob, ...] = ()
    reports: tuple[GivenReport, ...] = ()
    failures: tuple[Failure, ...] | None = None
    """Failures that really happened, where the file tells; None leaves them to the scenario."""
    skipped: int = 0
    """Jobs of other kinds."""
    parameters: Parameters | None = None
    """Parameters as the file's own job measured them."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    line: int
    name: str
    kind: str
    gpus: int
    submit: float
    seconds: float


@dataclass
class _Reader:
    """Rows of one file with errors that name file, line and column."""

    path: Path
    spec: TraceSpec
    cluster: ClusterSpec
    parameters: Parameters
    skipped: int = 0
    last: float = field(default=float("-inf"))

    def fail(self, line: int, column: str, value: object, why: str) -> BadInputError:
        return BadInputError(f"{self.path}:{line}: {column}: {why} (value {str(value)[:60]!r})")

    def table(self, delimiter: str, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
        """Rows as mappings; the first line names the columns."""
        try:
            with self.path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file, delimiter=delimiter)
                missing = [name for name in columns if name not in (reader.fieldnames or [])]
                if missing:
                    raise BadInputError(
                        f"{self.path}:1: the column {missing[0]!r} is missing; needed: {', '.join(columns)}"
                    )
                for row in reader:
                    short = [name for name in columns if row.get(name) is None]
                    if short:
                        raise self.fail(reader.line_num, short[0], "", "the line ends before this column")
                    yield reader.line_num, row
        except FileNotFoundError:
            raise BadInputError(f"{self.path}: no such file") from None
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise BadInputError(f"{self.path}: cannot be read ({one_line(error)})") from error

    def number(self, line: int, row: Mapping[str, str], column: str) -> float:
        try:
            value = float(row[column])
        except ValueError:
            raise self.fail(line, column, row[column], "a number is needed") from None
        if not isfinite(value) or value < 0:
            raise self.fail(line, column, row[column], "a number of at least 0 is needed")
        return value

    def time(self, line: int, row: Mapping[str, str], column: str) -> float:
        """ISO 8601, or seconds since the epoch."""
        text = row[column].strip()
        try:
            return float(text)
        except ValueError:
            pass
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            raise self.fail(line, column, text, "a time is needed, ISO 8601 or seconds") from None
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()

    def checked(self, line: int, name: str, kind: str, gpus: int, times: Mapping[str, float]) -> _Row:
        """The row, its times in order and its size within the cluster."""
        (first, submit), (second, start), (third, end) = times.items()
        if submit > start:
            raise self.fail(line, second, start, f"times out of order, it is before {first}")
        if start > end:
            raise self.fail(line, third, end, f"times out of order, it is before {second}")
        if submit < self.last:
            raise self.fail(line, first, submit, "times out of order, the line before is later; sort the file")
        self.last = submit
        most = self.cluster.nodes * self.cluster.gpus_per_node
        if gpus > most:
            raise self.fail(line, "gpus", gpus, f"job {name} is larger than the cluster's {most} GPUs")
        return _Row(line=line, name=name, kind=kind, gpus=gpus, submit=submit, seconds=end - start)


def read_trace(spec: TraceSpec, folder: Path, cluster: ClusterSpec, parameters: Parameters) -> Trace:
    """The jobs of a trace file.

    Raises:
        BadInputError: one line with file, line and column.
    """
    reader = _Reader(folder / spec.path, spec, cluster, parameters)
    if spec.format == "events":
        return _events(reader)
    rows = list(_acme(reader) if spec.format == "acme" else _slurm(reader))
    rows = rows[: spec.limit]
    if not rows:
        raise BadInputError(f"{reader.path}: no training or evaluation job in it")
    start = rows[0].submit
    jobs = tuple(_job(reader, row, start) for row in rows if row.kind == "training")
    reports = tuple(
        GivenReport(
            time=row.submit - start, name=row.name,
            work=Work(slot_seconds=row.seconds * row.gpus, longest=0.0, tail=0.0, datasets=1),
        )
        for row in rows
        if row.kind == "evaluation"
    )  # fmt: skip
    return Trace(jobs=jobs, reports=reports, skipped=reader.skipped)


def _acme(reader: _Reader) -> Iterator[_Row]:
    for line, row in reader.table(",", ACME_COLUMNS):
        kind = row["type"].strip().lower()
        gpus = int(reader.number(line, row, "gpu_num"))
        role = "training" if kind in TRAINING else "evaluation" if kind.startswith("eval") else ""
        times = {name: reader.time(line, row, name) for name in ("submit_time", "start_time", "end_time")}
        checked = reader.checked(line, row["job_id"], role, gpus, times)
        if role and gpus and checked.seconds > 0:
            yield checked
        else:
            reader.skipped += 1


def _slurm(reader: _Reader) -> Iterator[_Row]:
    for line, row in reader.table("|", SLURM_COLUMNS):
        if "." in row["JobID"]:
            continue  # a step of a job that has its own row
        found = re.search(r"gres/gpu(?::[\w-]+)?=(\d+)", row["AllocTRES"])
        if found is None or "Unknown" in (row["Start"], row["End"]) or row["Start"] == "None":
            reader.skipped += 1
            continue
        times = {name: reader.time(line, row, name) for name in ("Submit", "Start", "End")}
        role = "evaluation" if "eval" in row["JobName"].lower() else "training"
        checked = reader.checked(line, row["JobID"], role, int(found[1]), times)
        if checked.seconds > 0:
            yield checked


def _job(reader: _Reader, row: _Row, start: float) -> TrainingJob:
    """A job of fixed size: as many whole nodes as its GPUs need, with the work that it did."""
    rate = reader.spec.flops_per_gpu * row.gpus
    nodes = -(-row.gpus // reader.cluster.gpus_per_node)
    profile = ThroughputProfile((nodes,), (rate,), (Layout(data=row.gpus),))
    given = reader.parameters.training
    return TrainingJob(
        name=row.name, weight=1.0, profile=profile, min_nodes=nodes, step_flop=None, step_seconds=given.step_seconds,
        checkpoint_interval=given.checkpoint_interval, submit=row.submit - start, flop=rate * row.seconds,
    )  # fmt: skip


# ---------------------------------------------------------------- a real job's event log


def _events(reader: _Reader) -> Trace:
    """The job of an event log with the failures that it met; ``metrics.jsonl`` beside it tells its steps."""
    # Ranks, agents and the coordinator each say when; lines stand in the order in which they arrived.
    events = sorted(map(Event.from_json, _json_lines(reader.path)), key=lambda event: event.time)
    metrics = list(_json_lines(reader.path.parent / "metrics.jsonl"))
    if not events or not metrics:
        raise BadInputError(f"{reader.path}: an event log and its metrics.jsonl are needed, one of them is empty")
    found = account(events, metrics, events[-1].time)
    workers = max(int(line["workers"]) for line in metrics)
    if workers > reader.cluster.nodes * reader.cluster.gpus_per_node or found.healthy_step <= 0 or found.wall <= 0:
        raise BadInputError(f"{reader.path}: the job had {workers} workers and a step of {found.healthy_step} s; "
                            "give the scenario as many GPUs")  # fmt: skip
    counts = range(1, workers + 1)
    # One FLOP a step, so rates are steps per second: measured where they were, else in proportion to the ranks.
    # At fewer ranks all excess over a healthy step counts as degraded (planner.ettr): hence the mean, and no jitter.
    measured = {}
    for count in counts:
        seconds = [float(line["seconds"]) for line in metrics if int(line["workers"]) == count]
        if len(seconds) >= MEASURED_STEPS:
            measured[count] = 1 / mean(seconds)
    rates = {count: count / workers / found.healthy_step for count in counts} | measured
    rates[workers] = 1 / found.healthy_step
    profile = ThroughputProfile.of(rates, {count: Layout(data=count) for count in counts})
    given = reader.parameters.training
    gaps, jitter = _jitter(found, [line for line in metrics if int(line["workers"]) == workers])
    job = TrainingJob(
        name=str(next((event.job for event in events if event.job), "job")), weight=1.0, profile=profile, min_nodes=1,
        step_flop=1.0, step_seconds=found.healthy_step, submit=0.0, flop=float(found.steps_kept),
        checkpoint_interval=given.checkpoint_interval, gaps=gaps, jitter=jitter,
    )  # fmt: skip
    start = next(e.time for e in events if e.action == Action.JOB_STATE and e.new == JobState.STARTING)
    return Trace(
        jobs=(job,), failures=_faults(events, start, reader.cluster.nodes),
        parameters=_measured(reader.parameters, found, events),
    )  # fmt: skip


def _measured(parameters: Parameters, found: Account, events: list[Event]) -> Parameters:
    """The parameters of healing as this job met them: each category's seconds over the times that it happened."""
    lost = found.losses

    def each(category: str, *happened: Action) -> float:
        return lost[category] / max(1, sum(event.action in happened for event in events))

    starts = max(1, sum(event.action == Action.JOB_STATE and event.new == JobState.STARTING for event in events))
    detect = each("detect", Action.FAULT_DETECTED)
    tiers = dict.fromkeys(("node_health", "process_supervision", "exception_propagation"), detect)
    steps = {"statistics_steps": detect / found.healthy_step}
    healing = {
        "decide": each("decide", Action.FAULT_DETECTED),
        "join": 0.0,
        "process_start": lost["start"] / starts,
        "newcomer_start": _newcomer(events, lost["start"] / starts),
        "load_peer": lost["load"] / starts,
        "snapshot_interval": _snapshots(events, parameters.planaria.snapshot_interval),
        "stall_share": lost["checkpoint_stall"] / found.wall,
    }
    reform = {"base": each("reallocate", Action.REFORM_COMPLETED), "per_gpu": 0.0}
    return parameters.model_copy(
        update={
            "detection": parameters.detection.model_copy(update=tiers | steps),
            "planaria": parameters.planaria.model_copy(update=healing),
            "communicators": parameters.communicators.model_copy(update=reform),
        }
    )


def _jitter(found: Account, at_full: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """``other`` in two parts: the share of stepping time between steps, and that of slow steps at full size."""
    other, steps = found.losses["other"], len({line["step"] for line in at_full}) * found.healthy_step
    slow = min(other, max(0.0, sum(float(line["seconds"]) for line in at_full) - steps))
    stepping = found.effective + sum(found.losses[name] for name in ("redo", "degraded", "other"))
    gaps = (other - slow) / stepping if stepping > 0 else 0.0
    return gaps, slow / (steps + slow) * (1 - gaps) if steps + slow > 0 else 0.0


def _newcomer(events: list[Event], default: float) -> float:
    """Mean seconds from survivors going on to the replacement having joined."""
    waits: list[float] = []
    healed: float | None = None
    for event in events:
        if event.action == Action.FAULT_DETECTED:
            healed = None
        elif event.action == Action.REFORM_COMPLETED:
            if healed is not None:
                waits.append(event.time - healed)
            healed = event.time
    return sum(waits) / len(waits) if waits else default


def _snapshots(events: list[Event], default: float) -> float:
    """Median seconds between states that a restart could go back to."""
    taken = [event.time for event in events if event.action in (Action.SNAPSHOT_TAKEN, Action.CHECKPOINT_SAVED)]
    gaps = [other - one for one, other in pairwise(taken) if other > one]
    return median(gaps) if gaps else default


def _faults(events: list[Event], start: float, nodes: int) -> tuple[Failure, ...]:
    """The faults that were detected. One that no re-forming followed, but a start of all ranks, took the whole job."""
    faults: list[Failure] = []
    detected = [index for index, event in enumerate(events) if event.action == Action.FAULT_DETECTED]
    for index, following in zip(detected, [*detected[1:], len(events)], strict=True):
        event, after = events[index], events[index + 1 : following]
        occurred = event.details.get("occurred", event.time)
        time = float(occurred) if isinstance(occurred, (int, float)) else event.time
        rank, cause = event.details.get("rank"), str(event.details.get("name", ""))
        reformed = any(other.action == Action.REFORM_COMPLETED for other in after)
        started = any(other.action == Action.JOB_STATE and other.new == JobState.STARTING for other in after)
        struck = tuple(range(nodes)) if started and not reformed else (rank % nodes if isinstance(rank, int) else 0,)
        faults.append(
            Failure(time=max(0.0, time - start), nodes=struck, cause=cause if cause in TABLE else "exited_abnormally")
        )
    return tuple(faults)


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read ({one_line(error)})") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if path.name != "metrics.jsonl":
                Event.from_json(found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInputError(f"{path}:{number}: not a line of such a log ({one_line(error)})") from error
        yield found
