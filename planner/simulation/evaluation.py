"""Evaluation as a service on a changing number of slots: reports in order, shards fine enough to share all slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from planner.simulation.engine import Engine
from planner.simulation.workload import Work

_DONE = 1e-6
"""Slot-seconds below which a report's inference is done."""


@dataclass
class Report:
    """One published checkpoint that waits for its report."""

    job: str
    index: int
    work: Work
    published: float
    left: float
    """Slot-seconds of inference that are left."""
    started: float | None = None


class EvaluationService:
    """All reports of a run. Policies change the number of slots; nothing here decides."""

    def __init__(
        self,
        engine: Engine,
        load_seconds: float,
        finished: Callable[[], None],
        out: Callable[[Report], None] = lambda report: None,
    ) -> None:
        self.engine = engine
        self.load_seconds = load_seconds
        self.queue: deque[Report] = deque()
        self.latencies: list[float] = []
        self.loaded = 0
        self.loading: deque[tuple[float, int]] = deque()
        self.gpu_seconds = 0.0
        """Slots held × seconds."""
        self._finished, self._told = finished, out
        self._since = 0.0
        self._version = 0
        self._tails = 0

    @property
    def slots(self) -> int:
        """Slots held, loaded or loading."""
        return self.loaded + sum(count for _, count in self.loading)

    @property
    def pending(self) -> int:
        """Reports that are not out yet."""
        return len(self.queue) + self._tails

    def publish(self, report: Report) -> None:
        """A checkpoint is there."""
        self.settle()
        self.queue.append(report)
        self._schedule()

    def change_slots(self, change: int, loaded: bool = False) -> None:
        """Take slots (they load first, unless ``loaded``) or give some up, those that still load first."""
        self.settle()
        if change > 0 and not loaded and self.load_seconds > 0:
            self.loading.append((self.engine.now + self.load_seconds, change))
        elif change > 0:
            self.loaded += change
        left = -change
        while left > 0 and self.loading:
            ready, count = self.loading.pop()
            if count > left:
                self.loading.append((ready, count - left))
            left -= min(count, left)
        self.loaded -= max(left, 0)
        self._schedule()

    def settle(self) -> None:
        """Work off what was done since the last call."""
        now = self.engine.now
        seconds, self._since = now - self._since, now
        self.gpu_seconds += self.slots * seconds
        done = self.loaded * seconds
        while self.queue and done > 0:
            head = self.queue[0]
            worked = min(done, head.left)
            head.left -= worked
            done -= worked
            if head.left > _DONE:
                break
            self._complete(head)
        while self.loading and self.loading[0][0] <= now + _DONE:
            self.loaded += self.loading.popleft()[1]
        if self.queue and self.loaded and self.queue[0].started is None:
            self.queue[0].started = now

    def _complete(self, head: Report) -> None:
        now = self.engine.now
        self.queue.popleft()
        started = head.started if head.started is not None else now
        ready = max(now, started + head.work.longest) + head.work.tail
        self._tails += 1
        self.engine.at(ready, lambda: self._out(head))
        if self.queue and self.queue[0].started is None and self.loaded:
            self.queue[0].started = now
        self.engine.after(0.0, self._finished)

    def _out(self, report: Report) -> None:
        self._tails -= 1
        self.latencies.append(self.engine.now - report.published)
        self._told(report)

    def _schedule(self) -> None:
        """The next moment at which something changes by itself."""
        self._version += 1
        version = self._version
        moments = [self.loading[0][0]] if self.loading else []
        if self.queue and self.loaded:
            moments.append(self.engine.now + self.queue[0].left / self.loaded)
        if moments:
            self.engine.at(min(moments), lambda: self._step(version))

    def _step(self, version: int) -> None:
        if version == self._version:
            self.settle()
            self._schedule()

    def all_latencies(self) -> list[float]:
        """Latencies of reports that are out, and the age so far of those that are not (a lower bound)."""
        return self.latencies + [self.engine.now - report.published for report in self.queue]
