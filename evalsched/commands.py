"""``planaria eval``, and what it shares with ``planaria watch``."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evalsched.evaluate import EvaluationResult, Progress, evaluate
from evalsched.report_command import report_command as report_command
from evalsched.report_command import retry_command as retry_command
from evalsched.types import EvalSettings
from planner.errors import BadInputError, PreemptedError, one_line


def eval_command(
    model_dir: Path,
    tasks: str,
    limit: float | None,
    num_fewshot: int | None,
    workers: int,
    output: Path | None,
    include_path: Path | None,
    strict: bool,
    exact: bool,
    samples: str | None,
    apply_chat_template: bool,
    system_instruction: str | None,
    fewshot_as_multiturn: bool,
    gen_kwargs: str | None,
    seed: int,
    state_dir: Path | None,
    json_output: bool,
) -> int:
    """``planaria eval``; returns the exit code."""
    settings = EvalSettings(
        tasks=task_list(tasks),
        limit=limit,
        samples=_samples(samples),
        num_fewshot=num_fewshot,
        include_path=(str(_folder(include_path)),) if include_path else (),
        apply_chat_template=apply_chat_template,
        system_instruction=system_instruction,
        fewshot_as_multiturn=fewshot_as_multiturn,
        gen_kwargs=_gen_kwargs(gen_kwargs),
        fewshot_random_seed=seed,
        strict=strict,
        exact=exact,
    )
    with preemptible(), ProgressLine() as line:
        result = evaluate(
            model_dir, settings=settings, workers=workers, output=output, state_dir=state_dir, progress=line.show
        )
    _say(result)
    if json_output:
        print(json.dumps(result.to_json()))
    else:
        print(table(result.results))
        print(f"results: {result.path}")
    return int(result.exit_code)


def task_list(text: str) -> tuple[str, ...]:
    """Task names from the command line, each once.

    Raises:
        BadInputError: none is named.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise BadInputError("--tasks: no task is named; `planaria tasks list` shows what there is")
    return names


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise BadInputError(f"--include-path {path}: no such folder")
    return path.resolve()


def _samples(text: str | None) -> Mapping[str, tuple[int, ...]] | None:
    if text is None:
        return None
    source = Path(text)
    try:
        raw = source.read_text() if text.endswith(".json") and source.is_file() else text
        data = json.loads(raw)
        return {str(task): tuple(ids) for task, ids in data.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise BadInputError(
            f'--samples {text[:80]}: JSON is needed, for example {{"task": [0, 3]}} ({one_line(error)[:100]})'
        ) from error


def _gen_kwargs(text: str | None) -> dict[str, Any] | None:
    if not text:
        return None
    if text.lstrip().startswith("{"):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise BadInputError(f"--gen-kwargs {text[:80]}: not valid JSON ({error})") from error
        return dict(data)
    if wrong := [part for part in text.split(",") if part.strip() and not part.partition("=")[1]]:
        raise BadInputError(f"--gen-kwargs {text[:80]}: {wrong[0]!r} has no value; write key=value,key=value")
    from lm_eval.utils import simple_parse_args_string

    return dict(simple_parse_args_string(text))


@contextmanager
def preemptible() -> Iterator[None]:
    """SIGTERM ends the work in order, with the exit code that says: run me again."""

    def leave(*_: Any) -> None:
        raise PreemptedError("told to end; what was answered is kept, run it again to go on")

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ProgressLine:
    """Progress on standard error: one line that changes on a terminal, a line now and then elsewhere."""

    PLAIN_SECONDS = 5.0

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0
        self._state = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._terminal and self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        """Say how far it is, if it is time."""
        now = time.monotonic()
        pause = 0.2 if self._terminal else self.PLAIN_SECONDS
        if now - self._last < pause and progress.state == self._state:
            return
        self._last, self._state = now, progress.state
        text = progress_text(progress)
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)


def progress_text(progress: Progress) -> str:
    """One line: state, share, requests, estimate."""
    text = progress.state
    if progress.total:
        text += f" {progress.share:.0%}, {progress.done} of {progress.total} requests, {progress.workers} workers"
    if progress.seconds_left is not None and progress.state == "running":
        text += f", about {progress.seconds_left:.0f} s left"
    return text


def _say(result: EvaluationResult) -> None:
    print(
        f"{result.requests_run} of {result.requests} requests run, {result.seconds:.1f} s", file=sys.stderr, flush=True
    )
    bad = [flag for flag in result.outcome.flags if flag.get("untrusted")]
    for flag in bad[:20]:
        where = f"{flag['task']}: document {flag['doc_id']}, choice {flag['choice']}"
        print(f"NOT TRUSTED: {where}: {flag['kind']}: {flag['detail']}", file=sys.stderr)
    if len(bad) > 20:
        print(f"… and {len(bad) - 20} more that are not trusted, in {result.path}", file=sys.stderr)
    notes = Counter((flag["task"], flag["kind"]) for flag in result.outcome.flags if not flag.get("untrusted"))
    for (task, kind), count in sorted(notes.items()):
        print(f"note: {task}: {kind} in {count} requests", file=sys.stderr)
    for task, reason in result.outcome.failed.items():
        print(f"FAILED: {task}: {reason}", file=sys.stderr)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Results as a Markdown table: task, filter, metric, value, standard error."""
    rows = [("task", "filter", "metric", "value", "stderr")]
    for task, values in results.items():
        for name, value in values.items():
            metric, _, filter_ = name.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, (int, float)) or not filter_:
                continue
            error = values.get(f"{metric}_stderr,{filter_}")
            shown = f"{error:.4f}" if isinstance(error, (int, float)) else ""
            rows.append((task, filter_, metric, f"{value:.4f}", shown))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
