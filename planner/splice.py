"""One program, many questions: replace, drop or add one job without solving again from the start.

Bounds of the jobs before (prefix) and after (suffix) each place are computed once for a cluster size. A change of
one job in between then costs one max-plus combination of the two, and only the few states of tied plans are
followed further, so that the answer has the same tie-breaking as a solution from scratch.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from math import inf

import numpy as np

from planner.program import (
    Floats,
    Limits,
    Options,
    Program,
    Solution,
    choose,
    gains,
    prefix_bounds,
    settle,
    suffix_bounds,
)
from planner.rows import Row


class Spliced:
    """Prefix and suffix tables of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.prefix = program.prefix
        self.keys = [program.key(option) for option in program.options]
        self.places = {option.name: place for place, option in enumerate(program.options) if option.current is not None}
        self.limits = Limits.of(float(self.prefix[-1, -1]), (self.prefix[-1],), program.options)

    @cached_property
    def suffix(self) -> Floats:
        """``Q[i][u]``: the most that the options from i on are worth within u units."""
        return suffix_bounds(self.program.options, self.program.size, self.program.tails)

    @cached_property
    def penalised(self) -> list[Row]:
        """Value − λ·changes of the options from i on, at every exact number of units."""
        size = self.program.size
        start: Floats = np.full(size + 1, -inf)
        start[0] = 0.0
        rows = [Row(None, start)]
        for option, tail in zip(reversed(self.program.options), reversed(self.program.tails), strict=True):
            rows.append(rows[-1].extended(option.counts, gains(option, self.limits.change), tail))
        return rows[::-1]

    def solve(self) -> Solution:
        """The program itself."""
        return self.program.solve()

    def replaced(self, option: Options) -> Solution:
        """The plan when the job of that name has these choices instead."""
        found = self._spliced(self._position(option.name), 1, self.program.in_units(option))
        assert found is not None  # 0 is a choice of every job, so there is a plan
        return found

    def dropped(self, name: str) -> Solution:
        """The plan without a job."""
        found = self._spliced(self._position(name), 1, None)
        assert found is not None
        return found

    def added(self, option: Options) -> Solution:
        """The plan with one more job, which the program must have been made with room for."""
        found = self._spliced(bisect_left(self.keys, self.program.key(option)), 0, self.program.in_units(option))
        assert found is not None
        return found

    def without(self, name: str, count: int) -> Solution | None:
        """The best plan in which a job does not get ``count``; None if there is none."""
        position = self._position(name)
        return self._spliced(position, 1, self.program.options[position].without(count // self.program.unit))

    def _position(self, name: str) -> int:
        return self.places[name]

    def _spliced(self, position: int, removed: int, inserted: Options | None) -> Solution | None:
        """Options ``position … position + removed − 1`` make way for ``inserted``."""
        after = position + removed
        base = self.program.options
        new = [] if inserted is None else [inserted]
        options = [*base[:position], *new, *base[after:]]
        tails = [self.program.tail(option) for option in options]
        best = self._best(position, after, inserted)
        if best == -inf:
            return None
        partial = (self.prefix[position], self.suffix[after])
        limits = Limits.of(best, partial, options, self.limits.change)
        choice = self._settled(options, limits, position, after, tails) if limits.fitting else None
        if choice is None:
            bounds = prefix_bounds(options, self.program.size, tails)
            choice = choose(options, bounds, Limits.of(best, partial, options), tails)
        return self.program.solution(options, choice)

    def _best(self, position: int, after: int, inserted: Options | None) -> float:
        """``max_{a, k} P[position][a] + G(k) + Q[after][size − a − k]``."""
        before, behind = self.prefix[position], self.suffix[after][::-1]
        if inserted is None:
            return float((before + behind).max())
        best = -inf
        low = self.program.size - self.program.tail(inserted)
        for count, value in zip(inserted.counts.tolist(), inserted.values.tolist(), strict=True):
            rest = self.program.size + 1 - count
            if low >= rest:
                break
            best = max(best, value + float((before[low:rest] + behind[low + count :]).max()))
        return best

    def _settled(
        self, options: list[Options], limits: Limits, position: int, after: int, tails: list[int]
    ) -> list[int] | None:
        start = len(options) - (len(self.program.options) - after)
        rows = {start + offset: row for offset, row in enumerate(self.penalised[after:])}
        if start == position:
            slack = limits.threshold - limits.change * (len(options) - start)
            rows[start] = rows[start].pruned(self.prefix[start], self.program.size, slack)
        return settle(options, self.prefix, limits, rows, start, tails)
