"""What one sees while the demo runs: a live view on a terminal, a line per change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from planner.events import Action, Event
from planner.overview import event_in_words

_BLOCKS = "▁▂▃▄▅▆▇█"
_SHOWN = frozenset(
    {
        Action.JOB_STATE, Action.FAULT_INJECTED, Action.FAULT_DETECTED, Action.SEVERITY_DECIDED, Action.FAULT_RECOVERED,
        Action.REFORM_COMPLETED, Action.RANK_JOINED, Action.CHECKPOINT_PUBLISHED, Action.CHECKPOINT_LOADED,
        Action.EXPORT_PUBLISHED, Action.EXPORT_FAILED, Action.WORKER_READY, Action.WORKER_SWAPPED,
        Action.REPORT_PUBLISHED, Action.TRIAL_STATE,
    }
)  # fmt: skip
_LAST = 9


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """A curve in one line: the values, thinned to ``width``, from the least to the greatest."""
    if not values:
        return ""
    thin = [values[index * len(values) // min(width, len(values))] for index in range(min(width, len(values)))]
    least, most = min(thin), max(thin)
    scale = (len(_BLOCKS) - 1) / (most - least) if most > least else 0.0
    return "".join(_BLOCKS[round((value - least) * scale)] for value in thin)


class DemoView:
    """Shows the cluster's overview and the job's record; on anything but a terminal it prints what changed.

    Args:
        console: where to; stdout belongs to the result.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._started = time.monotonic()
        self._losses: list[float] = []
        self._loss_step = -1
        self._events: list[Event] = []
        self._printed = ""

    def __enter__(self) -> DemoView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    def show(self, overview: Mapping[str, Any], record: Mapping[str, Any], events: Sequence[Event]) -> None:
        """Bring the view up to date. ``events`` are those since the last call."""
        if record.get("loss") is not None and record["step"] != self._loss_step:
            self._loss_step = int(record["step"])
            self._losses.append(float(record["loss"]))
        told = [event for event in events if event.action in _SHOWN]
        self._events = [*self._events, *told][-_LAST:]
        if self._live is not None:
            self._live.update(self._render(overview, record))
            return
        for event in told:
            self._line(_words(event))
        self._progress_line(overview, record)

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._line(text)

    def _line(self, text: str) -> None:
        seconds = time.monotonic() - self._started
        self._console.print(f"[{seconds:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    def _progress_line(self, overview: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """One line for every tenth of the steps and every change of who holds the slots or of the queue's length."""
        steps = int(record.get("steps") or 1)
        tenth = int(record["step"]) * 10 // steps
        evaluation = overview["evaluation"]
        holders = [row["holder"] or "free" for row in overview["slots"]]
        key = f"{tenth} {holders} {evaluation['done']}"
        if key == self._printed:
            return
        self._printed = key
        loss = "" if record.get("loss") is None else f", loss {record['loss']:.3f}"
        self._line(
            f"step {record['step']} of {steps}{loss}; slots: {', '.join(holders)}; evaluation: {_queue(evaluation)}"
        )

    def _render(self, overview: Mapping[str, Any], record: Mapping[str, Any]) -> RenderableType:
        steps = int(record.get("steps") or 1)
        loss = "–" if record.get("loss") is None else f"{record['loss']:.4f}"
        head = Table.grid(padding=(0, 2))
        head.add_row("job", Text(str(record["id"])), Text(str(record["state"]), style=_style(record["state"])))
        head.add_row("steps", ProgressBar(total=steps, completed=int(record["step"]), width=40),
                     f"{record['step']} of {steps}, incarnation {record['incarnation']}")  # fmt: skip
        head.add_row("loss", Text(sparkline(self._losses), style="cyan"), loss)
        head.add_row("evaluation", _queue(overview["evaluation"]), f"{time.monotonic() - self._started:.0f} s")
        slots = Table("slot", "holder", "state", title="Slots", title_justify="left")
        for row in overview["slots"]:
            slots.add_row(f"{row['node']}/{row['slot']}", row["holder"] or "–", row["state"])
        log = Text("\n".join(_words(event) for event in self._events), no_wrap=True, overflow="ellipsis")
        return Group(head, slots, log)


def _style(state: str) -> str:
    return {"running": "green", "healing": "red", "failed": "red", "done": "bold green"}.get(state, "yellow")


def _queue(evaluation: Mapping[str, Any]) -> str:
    return (
        f"{evaluation['queued']} queued, {evaluation['running']} running, {evaluation['done']} done, "
        f"{evaluation['workers']} workers"
    )


def _words(event: Event) -> str:
    extra = [f"{key} {event.details[key]}" for key in ("step", "rank", "kind", "severity", "task", "worker")
             if event.details.get(key) is not None]  # fmt: skip
    if isinstance(seconds := event.details.get("seconds"), float):
        extra.append(f"{seconds:.2f} s")
    stamp = time.strftime("%H:%M:%S", time.localtime(event.time))
    return f"{stamp}  {event_in_words(event)}" + (f"  ({', '.join(extra)})" if extra else "")
