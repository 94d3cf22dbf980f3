"""Time comes in from outside: a :class:`Clock` is injected wherever a shell needs "now"."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time in seconds."""

    def time(self) -> float:
        """Seconds since the epoch (wall clock; may step)."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""

    def sleep(self, seconds: float) -> None:
        """Wait for ``seconds``."""


class SystemClock:
    """The real clock."""

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of the system's monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block the calling thread for ``seconds``."""
        time.sleep(seconds)


class ManualClock:
    """A clock that moves only when told, for tests and for the simulator."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def time(self) -> float:
        """The present simulated time in seconds."""
        return self.now

    def monotonic(self) -> float:
        """The same as :meth:`time`."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the clock instead of waiting."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back (advance by {seconds} s)")
        self.now += seconds
