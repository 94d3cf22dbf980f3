"""What the next new job will probably be like: people hand in again what they handed in before.

Of the last arrivals the commonest form counts, the newest of them in a tie (a heuristic, unverified). A form is
everything that a plan depends on, without the name.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from planner.cost_aware import job_of
from planner.demand import Demand
from planner.types import Job

REMEMBERED = 32
"""Arrivals that the guess is made from."""
NEWCOMER = "newcomer"
"""Name of the job that is expected; a holder's name has a colon, so that no job has it."""


class Arrivals:
    """The training demands that came lately, as they were when they came."""

    def __init__(self) -> None:
        self._known: frozenset[str] = frozenset()
        self._recent: deque[Demand] = deque(maxlen=REMEMBERED)

    def note(self, demands: Iterable[Demand], held: Mapping[str, int]) -> None:
        """The demands of training as they are now; ``held`` are the slots of each holder.

        A demand that already holds slots when it is seen first did not come now: its rates are measured ones.
        """
        now = {demand.holder: demand for demand in demands}
        for holder, demand in now.items():
            if holder not in self._known and not held.get(holder) and not demand.faulted:
                self._recent.append(replace(demand, holder=NEWCOMER))
        self._known = frozenset(now)

    def likeliest(self, typical: float) -> Job | None:
        """The job that is expected next; None before the first arrival.

        ``typical`` (FLOP/s) is a slot's rate where nothing is known (:func:`planner.cost_aware.typical_rate`).
        """
        forms = [job_of(demand, 0, typical) for demand in reversed(self._recent)]
        # most_common keeps the order of first sight among equals, which is the newest first.
        return Counter(forms).most_common(1)[0][0] if forms else None
