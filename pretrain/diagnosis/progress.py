"""Progress lines: what step was reached when, and whether the loss left its band (pure)."""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from pretrain.diagnosis.origin import find_time, iso_seconds
from pretrain.diagnosis.reading import LogLine

_STEP = re.compile(r"\b(?:iteration|iter|step|batch)s?[ :=]+(\d+)(?:\s*/\s*(\d+))?", re.I)
_LOSS = re.compile(
    r"(?:\b|_)(?:lm |train(?:ing)? |total )?(?:loss|loss/train/total|CrossEntropyLoss|loss train)['\"]?[ :=]+"
    r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))",
    re.I,
)
_STEP_WORDS = ("iteration", "step", "Step", "iter ", "batch=")
_UNNUMBERED = re.compile(r"^\W*['\"]?loss['\"]?: .*(?:learning_rate|grad_norm|epoch)")
_NOT_PROGRESS = re.compile(r"(?i)error|exception|traceback|checkpoint|saving|loading|failed|warning|validation|skipp")

_ISO = re.compile(r"\d{4}-\d\d-\d\d[T _]\d\d:\d\d:\d\d(?![.,]\d)")
WINDOW = 50
BAND = 8.0
"""Deviations (scaled median absolute) that a loss may be off the window's median."""
LEAST_RISE = 0.25
"""Relative rise over the median below which nothing is a spike, however quiet the window was."""
TIMES = 256
RENEW = 16
LASTING = 3
"""Progress lines in a row outside the band that make a spike a lasting one."""


class Progress(NamedTuple):
    """One progress line: step, loss (None where it shows none), the line's number and time."""

    step: int
    loss: float | None
    file: str
    number: int
    time: float | None


def parse(line: LogLine) -> Progress | None:
    """The progress that a line reports, or None."""
    text = line.text
    if not any(word in text for word in _STEP_WORDS):
        return _unnumbered(line, text)
    match = _STEP.search(text)
    if match is None:
        return None
    loss = _LOSS.search(text)
    if loss is None and (match.group(2) is None or _NOT_PROGRESS.search(text)):
        return None
    return Progress(
        int(match.group(1)), float(loss.group(1)) if loss else None, line.file, line.number, find_time(text)
    )


@dataclass(frozen=True, slots=True)
class ProgressShape:
    """Where step, loss and time stand in every progress line of one shape (offsets in bytes; None: it shows none)."""

    step: tuple[int, int] | None
    loss: tuple[int, int] | None
    time: int | None
    """Offset of an ISO time of 19 characters."""

    def read(self, raw: bytes, start: int, file: str, number: int) -> Progress:
        """The progress of the line that starts at ``start``."""
        step = int(raw[start + self.step[0] : start + self.step[1]]) if self.step else -1
        loss = float(raw[start + self.loss[0] : start + self.loss[1]]) if self.loss else None
        when = None if self.time is None else iso_seconds(raw[start + self.time : start + self.time + 19])
        return Progress(step, loss, file, number, when)


def shape_of(line: LogLine, progress: Progress) -> ProgressShape | None:
    """The shape of a progress line, or None where its numbers cannot be found again by their places alone."""
    if not line.shape:
        return None
    step, loss = _STEP.search(line.text), _LOSS.search(line.text)
    stamp = _ISO.search(line.text[:160])
    if progress.time is not None and (stamp is None or iso_seconds(stamp.group().encode()) != progress.time):
        return None
    found = ProgressShape(
        step.span(1) if step is not None and progress.step >= 0 else None,
        loss.span(1) if loss is not None else None,
        stamp.start() if stamp is not None and progress.time is not None else None,
    )
    same = found.read(line.text.encode(), 0, line.file, line.number)
    return found if same == progress else None


def _unnumbered(line: LogLine, text: str) -> Progress | None:
    """A trainer's line that shows a loss but no step (Hugging Face's): one more step than the last."""
    if "loss" not in text or _UNNUMBERED.search(text) is None or (loss := _LOSS.search(text)) is None:
        return None
    return Progress(-1, float(loss.group(1)), line.file, line.number, find_time(text))


@dataclass
class Course:
    """The run so far, in bounded memory: the last progress, the usual interval, and a spike that lasts.

    Robust detection as Acme asks for (section 6.1): median and scaled median absolute deviation over a window.
    """

    count: int = 0
    times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=TIMES))
    """Step and time of the last progress lines, to compare clocks."""
    last: Progress | None = None
    not_finite: Progress | None = None
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _outside: list[Progress] = field(default_factory=list)
    _limit: float | None = None
    _since_limit: int = 0

    def feed(self, progress: Progress) -> bool:
        """Take in a progress line; True if it is news (a later step than the last one)."""
        if progress.step < 0:
            progress = progress._replace(step=self.last.step + 1 if self.last is not None else 0)
        fresh = self.last is None or progress.step > self.last.step
        if self.last is not None and fresh and progress.time is not None and self.last.time is not None:
            self._gaps.append(progress.time - self.last.time)
        if progress.loss is not None:
            self._judge(progress, progress.loss)
        if fresh:
            self.count += 1
            if progress.time is not None:
                self.times.append((progress.step, progress.time))
        if fresh or (self.last is not None and progress.step < self.last.step):
            self.last = progress
        return fresh

    def _judge(self, progress: Progress, loss: float) -> None:
        if not math.isfinite(loss):
            self.not_finite = self.not_finite or progress
            return
        limit = self._upper_limit()
        if limit is not None and loss > limit:
            self._outside.append(progress)
            if len(self._outside) > 4 * WINDOW:
                del self._outside[WINDOW:-WINDOW]
            return
        self._outside.clear()
        self._losses.append(loss)
        self._since_limit += 1

    def _upper_limit(self) -> float | None:
        """The band's upper end; worked out anew after every ``RENEW`` losses inside it."""
        if len(self._losses) < 8:
            return None
        if self._limit is None or self._since_limit >= RENEW:
            middle = median(self._losses)
            spread = 1.4826 * median([abs(value - middle) for value in self._losses])
            self._limit, self._since_limit = middle + max(BAND * spread, LEAST_RISE * abs(middle)), 0
        return self._limit

    @property
    def outside(self) -> list[Progress]:
        """Progress lines since the loss left its band; empty as soon as one is inside again."""
        return self._outside

    def spike(self) -> list[Progress]:
        """Progress lines since the loss left its band for good; empty if it did not, or came back."""
        return self._outside if len(self._outside) >= LASTING else []

    def usual_gap(self) -> float | None:
        """Median seconds between progress lines, or None with too few times."""
        return median(self._gaps) if len(self._gaps) >= 2 else None
