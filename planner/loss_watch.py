"""Loss spikes of a run that goes on: robust detection over the completed steps (pure).

Source: Acme, section 6.1 (a spike: back to an *earlier* healthy checkpoint, skip the data that follows). The loss is
compared with the median of the last accepted steps and the scaled median of their jumps; the gradient's norm with its
own median. Only rises count, and only those that last: a warm-up falls, a schedule's step moves the loss by a few per
cent, one hard batch comes back. What is outside the band is not taken into the window, so that a spike cannot become
the usual.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

WINDOW = 50
"""Accepted steps that the band is made from."""
LEAST = 15
"""Accepted steps before anything is a spike, and those whose median is the usual loss."""
BAND = 8.0
"""Scaled deviations above the median at which the loss leaves its band."""
LEAST_RISE = 0.25
"""Relative rise over the median below which nothing is a spike, however quiet the window was."""
NORM_FACTOR = 10.0
"""A gradient's norm above so many medians is outside, where the loss rose as well by half of ``LEAST_RISE``."""
LASTING = 3
"""Steps in a row outside the band that make a spike."""


@dataclass(frozen=True)
class Spike:
    """A stretch of steps outside the band."""

    first: int
    last: int
    reason: str


@dataclass
class LossWatch:
    """Watches one run; feed it the completed steps in order. A step that comes again (after a roll-back) starts anew
    from what was accepted before it."""

    _accepted: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _outside: list[int] = field(default_factory=list)

    def feed(self, step: int, loss: float | None, norm: float | None) -> Spike | None:
        """Take in one step; the spike if this step makes the stretch outside the band ``LASTING`` long."""
        if loss is None or not math.isfinite(loss):
            return None
        while self._accepted and self._accepted[-1][0] >= step:
            self._accepted.pop()
        self._outside = [other for other in self._outside if other < step]
        size = norm if norm is not None and math.isfinite(norm) else 0.0
        why = self._why_outside(loss, size)
        if not why:
            self._outside.clear()
            self._accepted.append((step, loss, size))
            return None
        self._outside.append(step)
        if len(self._outside) != LASTING:
            return None
        return Spike(self._outside[0], step, f"{why}, for {LASTING} steps in a row")

    def replay(self, lines: Iterable[tuple[int, float | None, float | None]]) -> None:
        """Learn from steps that were completed before (a new supervisor); their spikes were somebody else's."""
        for step, loss, norm in lines:
            self.feed(step, loss, norm)
        self._outside.clear()

    def _why_outside(self, loss: float, norm: float) -> str:
        if len(self._accepted) < LEAST:
            return ""
        losses = [item[1] for item in self._accepted]
        middle = median(losses[-LEAST:])
        # From step to step, so that a warm-up's long fall does not pass for noise; two steps' noise is √2 of one's.
        jumps = [abs(value - before) for before, value in pairwise(losses)]
        spread = 1.4826 * median(jumps) / math.sqrt(2.0)
        limit = middle + max(BAND * spread, LEAST_RISE * abs(middle))
        if loss > limit:
            return f"loss {loss:.4g} above {limit:.4g} (median {middle:.4g} of the last {LEAST} steps)"
        usual = median([item[2] for item in self._accepted])
        if usual > 0 and norm > NORM_FACTOR * usual and loss > middle + LEAST_RISE / 2 * abs(middle):
            return f"gradient norm {norm:.4g}, {norm / usual:.0f} × the median, and loss {loss:.4g} rises with it"
        return ""
