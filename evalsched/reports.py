"""Reports of a job or of a results folder: HTML that opens without a network, Markdown, JSON."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jinja2

from evalsched.charts import Line, Point, line_chart, sparkline
from evalsched.comparison import Delta, size_in_errors
from evalsched.report_data import Evaluated, ReportData, Score, read_report
from planner.errors import PlanariaError, one_line
from planner.files import write_atomic, write_json

log = logging.getLogger("planaria.report")

_LOSS_NAMES = {
    "checkpoint_stall": "checkpoint stall",
    "redo": "work done again",
    "degraded": "fewer ranks",
}


def write_report(folder: Path, data: ReportData | None = None) -> Path:
    """Write ``report.html``, ``report.md`` and ``report.json`` for a job's or results folder; the HTML's path.

    They go to the job's ``reports`` folder, for results into their own.

    Raises:
        BadInputError: there is nothing to report, or a file is broken.
    """
    found = data or read_report(folder)
    target = report_folder(found)
    target.mkdir(parents=True, exist_ok=True)
    write_atomic(target / "report.html", to_html(found))
    write_atomic(target / "report.md", to_markdown(found))
    write_json(target / "report.json", to_json(found))
    return target / "report.html"


def report_folder(data: ReportData) -> Path:
    """Where a report is written."""
    return data.folder / "reports" if data.job is not None else data.folder


# ---------------------------------------------------------------- JSON


def to_json(data: ReportData) -> dict[str, Any]:
    """The report as data."""
    checkpoints = []
    for number, one in enumerate(data.evaluated):
        results: dict[str, dict[str, Any]] = {}
        for score in one.scores:
            results.setdefault(score.task, {})[score.metric] = score.to_json()
        checkpoints.append(
            {
                "step": one.step,
                "path": str(one.path),
                "model": one.data.get("model_name"),
                "results": results,
                "comparison": [move.to_json() for move in data.deltas[number]],
                "gate": data.gates[number].to_json(),
                "flags": list(one.block.get("flags", [])),
                "untrusted": dict(one.block.get("untrusted", {})),
                "failed": dict(one.block.get("failed", {})),
            }
        )
    found: dict[str, Any] = {"title": data.title, "folder": str(data.folder), "checkpoints": checkpoints}
    found["left_out"] = [{"checkpoint": label, "what": what} for label, what in data.left_out]
    found["calibration"] = dict(data.evaluated[-1].block.get("calibration") or {}) if data.evaluated else {}
    if data.job is not None:
        found["job"] = {
            "name": data.job.name,
            "state": data.job.state,
            "steps": data.job.loss[-1][0] if data.job.loss else 0,
            "loss": data.job.loss[-1][1] if data.job.loss else None,
            "ettr": data.job.account.ettr if data.job.account else None,
            "ettr_losses": dict(data.job.account.losses) if data.job.account else {},
            "markers": [marker.__dict__ for marker in data.job.markers],
        }
    return found


# ---------------------------------------------------------------- pieces of the page


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"


def _cell(data: ReportData, number: int, task: str, metric: str | None) -> dict[str, Any]:
    one = data.evaluated[number]
    if reason := one.block.get("failed", {}).get(task):
        return {"text": "failed", "note": reason, "kind": "failed"}
    score = one.score(task, metric) if metric else None
    if score is None:
        return {"text": "–", "note": "not evaluated", "kind": "none"}
    move = next((m for m in data.deltas[number] if (m.task, m.metric) == (task, metric)), None)
    return {
        "text": _number(score.value), "stderr": _error_text(score), "kind": "value", "note": _cell_note(score, move),
        "move": _arrow(move), "verdict": move.verdict if move else "same",
        "untrusted": len(one.block.get("untrusted", {}).get(task, ())),
    }  # fmt: skip


def _error_text(score: Score) -> str:
    """The standard error, or the interval where the standard error of 0 would say too much (0 or all of N)."""
    if score.stderr == 0 and score.low is not None and score.high is not None and score.high > score.low:
        return f"({score.low:.3g} to {score.high:.3g})"
    return f"± {score.stderr:.4f}" if score.stderr is not None else ""


def _arrow(move: Delta | None) -> str:
    if move is None or move.z is None:
        return ""
    sign = "▲" if move.difference > 0 else "▼" if move.difference < 0 else "·"
    return f"{sign} {size_in_errors(move.z)} se"


def _cell_note(score: Score, move: Delta | None) -> str:
    parts = [score.metric]
    if score.low is not None and score.high is not None:
        parts.append(f"95%: {score.low:.4g} to {score.high:.4g}")
    if score.n is not None:
        parts.append(f"{score.n} documents")
    if move is not None and move.z is not None:
        how = "document by document" if move.paired else "independent errors"
        parts.append(f"since the one before: {move.difference:+.4g}, {move.z:+.1f} standard errors ({how})")
    return "; ".join(parts)


def _direction(data: ReportData, task: str, metric: str | None) -> str:
    for one in data.evaluated:
        score = one.score(task, metric) if metric else None
        if score is not None and score.higher_is_better is not None:
            return "higher is better" if score.higher_is_better else "lower is better"
    return ""


def _table(data: ReportData) -> dict[str, Any]:
    heads = []
    for task in data.tasks:
        metric = data.primary_of(task)
        name, _, filter_ = (metric or "").partition(",")
        heads.append(
            {
                "task": task,
                "metric": name + (f" ({filter_})" if filter_ not in ("", "none") else ""),
                "direction": _direction(data, task, metric),
            }
        )
    rows = []
    for number, one in enumerate(data.evaluated):
        cells = [_cell(data, number, task, data.primary_of(task)) for task in data.tasks]
        rows.append({"label": one.label, "cells": cells, "gate": data.gates[number], "first": number == 0})
    return {"heads": heads, "rows": rows}


def _lines(data: ReportData) -> list[Line]:
    if data.job is None:
        return []
    merged: dict[float, Line] = {}
    for marker in data.job.markers:
        old = merged.get(marker.step)
        if old is None or (marker.kind == "fault" and old.kind != "fault"):
            merged[marker.step] = Line(x=marker.step, label=marker.label, kind=marker.kind)
    return list(merged.values())


def _curve(data: ReportData, task: str) -> str:
    metric = data.primary_of(task)
    points = []
    for number, one in enumerate(data.evaluated):
        score = one.score(task, metric) if metric else None
        if score is not None:
            x = float(one.step if one.step is not None else number + 1)
            text = f"{one.label}: {score.value:.4f}" + (f" ± {score.stderr:.4f}" if score.stderr is not None else "")
            points.append(Point(x=x, y=score.value, low=score.low, high=score.high, label=text))
    name = (metric or "").partition(",")[0]
    direction = _direction(data, task, metric)
    title = f"{task}: {name}" + (f" ({direction})" if direction else "")
    return line_chart(points, title=title, lines=_lines(data), reference=_chance(data, task, metric))


def _chance(data: ReportData, task: str, metric: str | None) -> tuple[float, str] | None:
    """The level of guessing, for multiple choice with a fixed number of choices in the samples."""
    if metric is None or metric.partition(",")[0] not in ("acc", "acc_norm"):
        return None
    for one in data.evaluated:
        requests = one.block.get("tasks", {}).get(task)
        config = one.data.get("configs", {}).get(task) or {}
        if requests and config.get("output_type") == "multiple_choice" and requests.get("documents"):
            width = requests["requests"] / requests["documents"]
            if width == int(width) and width > 1:
                return 1 / width, f"chance {1 / width:.2f}"
    return None


def _loss_chart(data: ReportData) -> str:
    if data.job is None or not data.job.loss:
        return ""
    return line_chart(
        [Point(x=step, y=loss) for step, loss in data.job.loss],
        title="training loss (line) and validation loss (dots)" if data.job.valid_loss else "training loss",
        lines=_lines(data), dots=False,
        more=[Point(x=s, y=v, label=f"step {s}: validation loss {v:.4f}") for s, v in data.job.valid_loss],
    )  # fmt: skip


def _time_parts(data: ReportData) -> list[dict[str, Any]]:
    account = data.job.account if data.job else None
    if account is None or account.wall <= 0:
        return []
    parts = [("effective", account.effective), *account.losses.items()]
    return [
        {"name": _LOSS_NAMES.get(name, name), "seconds": seconds, "share": seconds / account.wall, "key": name}
        for name, seconds in parts
        if seconds / account.wall >= 0.0005 or name == "effective"
    ]


def _cards(data: ReportData) -> list[tuple[str, str]]:
    cards = [("checkpoints", str(len(data.evaluated)))]
    if data.job is not None:
        if data.job.loss:
            cards.append(("steps", f"{data.job.loss[-1][0]:,}"))
            cards.append(("last loss", f"{data.job.loss[-1][1]:.4f}"))
        cards.append(("faults", str(sum(marker.kind == "fault" for marker in data.job.markers))))
        if data.job.account is not None:
            cards.append(("ETTR", f"{data.job.account.ettr:.1%}"))
        if data.job.state:
            cards.append(("state", data.job.state))
    if data.gates:
        cards.append(("gate", data.gates[-1].verdict if len(data.gates) > 1 else "first checkpoint"))
    return cards


def _facts(one: Evaluated) -> list[tuple[str, str]]:
    """How the last checkpoint was evaluated."""
    engine = one.block.get("engine", {})
    found = [("model", str(one.data.get("model_name") or "")), ("lm-eval", str(one.data.get("lm_eval_version") or ""))]
    found += [(str(name), str(value)) for name, value in sorted(engine.items())] if isinstance(engine, dict) else []
    check = one.block.get("batch_check")
    if isinstance(check, dict):
        found += [(f"batch check: {name}", str(value)) for name, value in check.items() if not isinstance(value, list)]
    found += _judged(one.path.parent)
    timings = one.block.get("timings", {})
    found += [(name.replace("_", " "), f"{value:.2f}") for name, value in timings.items()
              if isinstance(value, (int, float))]  # fmt: skip
    return [(name, value) for name, value in found if value]


def _calibration(one: Evaluated) -> list[dict[str, str]]:
    """How well times were predicted, as it stood at the last checkpoint's scoring."""
    return [
        {
            "what": name,
            "count": f"{found['count']:,}",
            "error": f"× {found['error']:.2f}",
            "default_error": f"× {found['default_error']:.2f}",
            "covered": f"{found['covered']:.0%}",
        }
        for name, found in sorted((one.block.get("calibration") or {}).items())
        if found.get("count")
    ]


def _judged(folder: Path) -> list[tuple[str, str]]:
    """What judge metrics cost, and where their prompts are."""
    try:
        data = json.loads((folder / "judge.json").read_text(encoding="utf-8"))
        rows = [("judge", f"{data['asked']} asked, {data['from_cache']} known, {data['tokens']:,} tokens")]
        for task, facts in data["tasks"].items():
            unreadable = f", {facts['unreadable']} without a verdict" if facts["unreadable"] else ""
            rows.append((f"judge of {task}", f"{facts['model']}{unreadable}; prompts in judge_{task}.jsonl"))
        return rows
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _flag_rows(data: ReportData, limit: int = 200) -> list[dict[str, Any]]:
    rows = []
    for one in data.evaluated:
        rows += [{"label": one.label, **flag} for flag in one.block.get("flags", [])]
        rows += [
            {"label": one.label, "task": task, "doc_id": "–", "choice": "–", "kind": "failed", "detail": reason}
            for task, reason in one.block.get("failed", {}).items()
        ]
    return rows[:limit]


def _all_numbers(one: Evaluated) -> list[dict[str, str]]:
    """Every metric of one checkpoint."""
    rows = []
    for score in one.scores:
        name, _, filter_ = score.metric.partition(",")
        interval = f"{score.low:.4g} to {score.high:.4g}" if score.low is not None and score.high is not None else ""
        rows.append(
            {
                "task": score.task, "metric": name, "filter": filter_, "value": _number(score.value),
                "stderr": f"{score.stderr:.4f}" if score.stderr is not None else "", "interval": interval,
                "n": f"{score.n:,}" if score.n is not None else "",
            }
        )  # fmt: skip
    return rows


def _context(data: ReportData) -> dict[str, Any]:
    last = data.evaluated[-1] if data.evaluated else None
    return {
        "data": data,
        "cards": _cards(data),
        "table": _table(data),
        "curves": [_curve(data, task) for task in data.tasks] if len(data.evaluated) > 1 else [],
        "numbers": _all_numbers(last) if last else [],
        "loss": _loss_chart(data),
        "time": _time_parts(data),
        "faults": _fault_rows(data),
        "flags": _flag_rows(data),
        "facts": _facts(last) if last else [],
        "left_out": data.left_out,
        "calibration": _calibration(last) if last else [],
        "trends": _trends(data),
    }


def _fault_rows(data: ReportData) -> list[dict[str, Any]]:
    """Each fault, and how long it was until the next step."""
    if data.job is None:
        return []
    rows: list[dict[str, Any]] = []
    for event in data.job.events:
        if event.action.value == "fault.recovered":
            details = event.details
            rows.append(
                {
                    "step": details.get("fault_step", details.get("step", "")),
                    "what": details.get("kind") or details.get("cause") or event.reason,
                    "rank": details.get("rank", ""),
                    "cure": details.get("cure", ""),
                    "seconds": next(
                        (details[name] for name in ("recovered_seconds", "seconds") if name in details), None
                    ),
                }
            )
    return rows


def _trends(data: ReportData) -> list[dict[str, str]]:
    found = []
    for task in data.tasks:
        metric = data.primary_of(task)
        scores = [s for one in data.evaluated if metric and (s := one.score(task, metric))]
        found.append({"task": task, "line": sparkline([s.value for s in scores])})
    return found


def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader, autoescape=jinja2.select_autoescape(["html.j2"]), trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["cell"] = _markdown_cell
    return environment


def _markdown_cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def to_html(data: ReportData) -> str:
    """The report as one HTML file that needs nothing else."""
    return _environment().get_template("report.html.j2").render(**_context(data))


def to_markdown(data: ReportData) -> str:
    """The report as Markdown."""
    return _environment().get_template("report.md.j2").render(**_context(data))


def refresh_report(output: Path) -> Path | None:
    """Renew the report of the job whose results folder ``output`` is (or of that folder alone); its HTML's path.

    A report that cannot be made is logged and never fails the evaluation whose results are already there.
    """
    job = output.parent.parent
    folder = job if output.parent.name == "reports" and (job / "events.jsonl").is_file() else output
    try:
        return write_report(folder)
    except (PlanariaError, OSError, jinja2.TemplateError) as error:
        log.warning("action=report.failed folder=%s reason=%s", folder, one_line(error))
        return None
