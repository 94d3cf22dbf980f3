"""The event loop: a heap of callbacks and the clock that they move."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable

import numpy as np

from planner.clock import ManualClock


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A stream of random numbers of its own for each purpose, so that one more draw here changes nothing there."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


class Engine:
    """Runs callbacks in order of time; equal times in the order in which they were asked for."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.events = 0

    @property
    def now(self) -> float:
        """Simulated seconds since the start."""
        return self.clock.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run ``action`` at ``time`` (never before now)."""
        heapq.heappush(self._heap, (max(time, self.now), self._count, action))
        self._count += 1

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``seconds``."""
        self.at(self.now + seconds, action)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Run until the time is up, nothing is left, or ``done``; the clock then stands at the end."""
        while self._heap and self._heap[0][0] <= until and not done():
            time, _, action = heapq.heappop(self._heap)
            self.clock.now = time  # exactly: a sum of differences would drift
            self.events += 1
            action()
        if not done():
            self.clock.now = max(until, self.now)
