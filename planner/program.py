"""The exact program behind every plan: choose one count per job, maximise the sum of values within a capacity.

``S(i, j) = max_k S(i−1, j−k) + G(i, k)`` (Unicron, arXiv 2401.00134), over the listed counts alone, with numpy
along the slots. Ties are part of the problem (DESIGN.md): among all plans whose value is within 1e-12 (relative)
of the best, the one with the fewest changed jobs, then the fewest slots, then the smallest counts in name order.
A tolerance is no order, so it cannot be folded into the comparison of single states; it is met in two stages.

1. *Bounds.* ``P[i][u]``: the most that the first i jobs are worth within u slots. The best value is ``P[m][n]``,
   and a state of the later jobs is on the way to a tied plan only if its value plus ``P`` reaches the threshold
   best − ε. Without near ties about one state a job survives, so everything after the bounds is nearly free.
2. *Settling.* Going from the last job to the first over surviving states, each change costs λ > ε. Let L be the
   best ``value − λ·changes``. Any tied plan has at least ``c* = ⌈(best − ε − L)/λ⌉`` changes; with c* known, the
   smallest number of slots, and then job by job the smallest count, whose rest can still reach
   ``best − ε − λ·c*`` are found: whatever is refused on the way is proven to lie on no tied plan. If the plan
   found is itself within ε with c* changes, it is therefore *the* plan. That fails only if some plan loses
   between ε and λ·m, and then :mod:`planner.exact_ties` keeps the number of changes as a dimension of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, inf

import numpy as np
from numpy.typing import NDArray

from planner import exact_ties
from planner.rows import Row

Floats = NDArray[np.float64]

TIE = 1e-12
"""Relative distance from the best value within which plans are tied (DESIGN.md)."""
CELLS = 250_000_000
"""Most jobs × slots (in units) that are held at once: 2 GB."""


@dataclass(frozen=True, slots=True)
class Options:
    """What one job can be given: ascending ``counts`` that begin with 0, and the value (FLOP) of each.

    ``current`` is the count that is no change; None means that no count is one (slots held in reserve). ``group`` is
    the number of slots that must lie together on a node (:mod:`planner.placement`); every count is a multiple of it.
    """

    name: str
    counts: NDArray[np.int64]
    values: Floats
    current: int | None
    group: int = 1
    changed: NDArray[np.bool_] = field(init=False, repr=False)
    """Which of the counts change the job."""

    def __post_init__(self) -> None:
        none = np.zeros(len(self.counts), dtype=np.bool_)
        changed = none if self.current is None else np.not_equal(self.counts, self.current)
        object.__setattr__(self, "changed", changed)

    def without(self, count: int) -> Options:
        """The same choices less one; 0 stays in the list, at a value that is never taken, if it is the one."""
        if count == 0:
            values = self.values.copy()
            values[0] = -inf
            return replace(self, values=values)
        keep = self.counts != count
        return replace(self, counts=self.counts[keep], values=self.values[keep])


@dataclass(frozen=True, slots=True)
class Solution:
    """The chosen count of each job and the sum of the values, added in name order."""

    counts: Mapping[str, int]
    value: float


def _by_name(option: Options) -> tuple[int, bool, str]:
    return 0, option.current is None, option.name


def _by_group(option: Options) -> tuple[int, bool, str]:
    return option.group, option.current is None, option.name


class TooLargeError(ValueError):
    """The program does not fit in memory."""


def unit_of(options: Sequence[Options]) -> int:
    """The largest number of slots that divides every count: planning in nodes of 8 is 8 times less work."""
    unit = 0
    for option in options:
        for count in option.counts.tolist():
            unit = gcd(unit, count)
            if unit == 1:
                return 1
    return unit or 1


def prefix_bounds(options: Sequence[Options], size: int, tails: Sequence[int]) -> Floats:
    """``P[i][u]``: the most that the first i options are worth within u units; shape (m+1, size+1).

    ``tails[i]`` bounds what the options from i on use together, those not in the prefix (size − u) included.
    """
    table: Floats = np.empty((len(options) + 1, size + 1))
    table[0] = 0.0
    buffer: Floats = np.empty(size + 1)
    for position, option in enumerate(options):
        _widen(table[position], table[position + 1], option, size - tails[position], buffer)
    return table


def suffix_bounds(options: Sequence[Options], size: int, tails: Sequence[int]) -> Floats:
    """``Q[i][u]``: the most that the options from i on are worth within u units; shape (m+1, size+1)."""
    table: Floats = np.empty((len(options) + 1, size + 1))
    table[-1] = 0.0
    buffer: Floats = np.empty(size + 1)
    for position in range(len(options) - 1, -1, -1):
        _widen(table[position + 1], table[position], options[position], 0, buffer)
        table[position, tails[position] + 1 :] = table[position, tails[position]]
    return table


def _widen(before: Floats, after: Floats, option: Options, low: int, buffer: Floats) -> None:
    """``after[u] = max_k before[u − k] + value(k)`` with u − k ≥ ``low``; ``before`` never falls with u."""
    size = len(before) - 1
    values = option.values.tolist()
    best = values[0]
    after[:low] = -inf
    np.add(before[low:], best, out=after[low:])
    for count, value in zip(option.counts.tolist()[1:], values[1:], strict=True):
        if low + count > size:
            break
        if value <= best:
            continue  # a smaller count is worth as much, so this one cannot raise a bound
        best = value
        rest = size + 1 - count
        np.add(before[low:rest], value, out=buffer[low:rest])
        np.maximum(after[low + count :], buffer[low:rest], out=after[low + count :])


class Program:
    """Options in name order and the capacity, both in units; the bounds are computed once, on first use.

    ``room_for`` names options that are no part of the program yet but may be spliced in later. ``ceilings`` says, for
    a group size g, how many slots the options with groups of g or more may have together: on damaged nodes that is
    less than the capacity. It changes the order of the program, and so the last rule of tie-breaking, to (group,
    name): later options are the ones with larger groups, so that a ceiling bounds a whole tail of the program.
    """

    def __init__(
        self,
        options: Sequence[Options],
        capacity: int,
        room_for: Sequence[Options] = (),
        ceilings: Mapping[int, int] | None = None,
    ) -> None:
        everything = [*options, *room_for]
        self.unit = unit_of(everything)
        # What is held in reserve (no current count) comes last: the list of (name, count) has no such entry.
        self.key: Callable[[Options], tuple[int, bool, str]] = _by_name if ceilings is None else _by_group
        self.options = [self.in_units(option) for option in sorted(options, key=self.key)]
        most = sum(int(option.counts[-1]) for option in everything) // self.unit
        self.size = min(capacity // self.unit, most)
        self._ceilings = {group: slots // self.unit for group, slots in (ceilings or {}).items()}
        if (len(options) + 1) * (self.size + 1) > CELLS:
            raise TooLargeError(
                f"{len(options)} jobs × {self.size} units of {self.unit} slots is above {CELLS} cells; "
                "list counts that are multiples of a node"
            )

        self.tails = [self.tail(option) for option in self.options]
        """How many units the options from i on may use together."""

    def tail(self, option: Options) -> int:
        """How many units ``option`` and those behind it may use together."""
        return min(self.size, self._ceilings.get(option.group, self.size))

    def in_units(self, option: Options) -> Options:
        """``option`` counted in this program's units."""
        current = option.current
        if current is not None:
            # -1 equals no count: a present count that is no multiple of the unit is not listed.
            current = current // self.unit if current % self.unit == 0 else -1
        return replace(option, counts=option.counts // self.unit, current=current)

    @cached_property
    def prefix(self) -> Floats:
        """See :func:`prefix_bounds`."""
        return prefix_bounds(self.options, self.size, self.tails)

    def solve(self) -> Solution:
        """The one plan that DESIGN.md's order puts first."""
        limits = Limits.of(float(self.prefix[-1, -1]), (self.prefix[-1],), self.options)
        return self.solution(self.options, choose(self.options, self.prefix, limits, self.tails))

    def solution(self, options: Sequence[Options], choice: Sequence[int]) -> Solution:
        """``choice`` (an index per option) as counts in slots."""
        value = 0.0
        counts: dict[str, int] = {}
        for option, index in zip(options, choice, strict=True):
            value += float(option.values[index])
            counts[option.name] = int(option.counts[index]) * self.unit
        return Solution(counts, value)


def choose(options: Sequence[Options], prefix: Floats, limits: Limits, tails: Sequence[int]) -> list[int]:
    """The index of the chosen count for each option, both stages and, where they prove nothing, the last resort."""
    rows = {len(options): Row.single(0, 0.0)}
    found = settle(options, prefix, limits, rows, len(options), tails)
    return found if found is not None else exact_ties.settle(options, prefix, limits.threshold, tails)


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers that decide a tie: the best value, how far below it still ties, the price of a change."""

    best: float
    tie: float  #: ε
    noise: float  #: bound of the rounding of sums
    change: float  #: λ

    @property
    def threshold(self) -> float:
        """A plan is tied if its value reaches this."""
        return self.best - self.tie - self.noise

    @classmethod
    def of(
        cls, best: float, bounds: Sequence[Floats], options: Sequence[Options], change: float | None = None
    ) -> Limits:
        """For a best value; ``bounds``: rows of partial sums that it came from; ``change``: a λ already in use."""
        tie = TIE * abs(best)
        noise = rounding(best, bounds, options)
        return cls(best, tie, noise, change if change is not None else price_of_change(tie, noise))

    @property
    def fitting(self) -> bool:
        """Whether λ separates numbers of changes, and is small enough not to drown the values in its own rounding."""
        return 2 * (self.tie + self.noise) <= self.change <= 100 * max(self.tie, self.noise)


def rounding(best: float, bounds: Sequence[Floats], options: Sequence[Options]) -> float:
    """Bound of the rounding error of a sum of one value per option."""
    sizes = [abs(best), *(abs(float(row[end])) for row in bounds for end in (0, -1))]
    sizes += [float(np.abs(o.values[np.isfinite(o.values)]).max(initial=0.0)) for o in options]
    return 2.0**-53 * (len(options) + 2) * max(size for size in sizes if size < inf)


def price_of_change(tie: float, noise: float) -> float:
    """λ: four times what may be lost in a tie, or anything positive where nothing may be."""
    return 4 * max(tie, 4 * noise) or 1.0


def gains(option: Options, change: float) -> Floats:
    """Values less λ for each count that is a change."""
    return option.values - change * option.changed


def settle(
    options: Sequence[Options],
    prefix: Floats,
    limits: Limits,
    rows: dict[int, Row],
    start: int,
    tails: Sequence[int],
) -> list[int] | None:
    """Stage 2 from layer ``start`` down: ``rows[i]`` holds value − λ·changes of the options from i on by exact slots.

    Rows above ``start`` are given (they may be dense and unpruned); ``prefix[i]`` must be right for i ≤ ``start``.
    Returns the index of the chosen count for each option, or None if near ties leave the answer unproven.
    """
    size = prefix.shape[1] - 1
    count = len(options)
    for layer in range(start - 1, -1, -1):
        option = options[layer]
        row = rows[layer + 1].extended(option.counts, gains(option, limits.change), tails[layer])
        # A suffix of r options hides at most r changes.
        slack = limits.threshold - limits.change * (count - layer)
        rows[layer] = row.pruned(prefix[layer], size, slack)
    goal = _goal(rows[0], limits)
    if goal is None:
        return None
    slots, changes = goal
    choice = _walk(options, rows, limits, slots, changes)
    return choice if choice is not None and _proven(options, choice, limits, slots, changes) else None


def _goal(row: Row, limits: Limits) -> tuple[int, int] | None:
    """(slots, changes) that the plan must have if it exists: proven lower bounds, the second given the first."""
    indices, values = row.items()
    if not len(indices):
        return None
    most = float(values.max())
    changes = max(0, int(np.ceil((limits.threshold - limits.noise - most) / limits.change)))
    reached = indices[values >= limits.threshold - limits.change * changes]
    return (int(reached[0]), changes) if len(reached) else None


def _walk(
    options: Sequence[Options], rows: Mapping[int, Row], limits: Limits, slots: int, changes: int
) -> list[int] | None:
    """Job by job in name order the smallest count whose rest can reach the goal."""
    need = limits.threshold - limits.change * changes
    choice: list[int] = []
    for layer, option in enumerate(options):
        gain = gains(option, limits.change)
        totals = gain + rows[layer + 1].at(slots - option.counts)
        index = int((totals >= need).argmax())
        if not totals[index] >= need:
            return None
        choice.append(index)
        slots -= int(option.counts[index])
        need -= float(gain[index])
    return choice


def _proven(options: Sequence[Options], choice: Sequence[int], limits: Limits, slots: int, changes: int) -> bool:
    value, used, changed = 0.0, 0, 0
    for option, index in zip(options, choice, strict=True):
        value += float(option.values[index])
        count = int(option.counts[index])
        used += count
        changed += option.current is not None and count != option.current
    return value >= limits.threshold and used == slots and changed == changes
