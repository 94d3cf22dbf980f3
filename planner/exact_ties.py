"""The last resort of tie-breaking: the number of changed jobs as a dimension of the program.

Exact whatever the plans' values, at m times the work, so :mod:`planner.program` comes here only when plans lose
between once and a few times the tolerance, where a price for each change cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from planner.program import Options

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

Layer = tuple[Integers, Floats]
"""Surviving states (units used by the later jobs, ascending) and, per state, the best value by number of changes."""


def settle(options: Sequence[Options], prefix: Floats, threshold: float, tails: Sequence[int]) -> list[int]:
    """The index of the chosen count for each option: fewest changes, fewest units, smallest counts in order.

    ``prefix`` is :func:`planner.program.prefix_bounds`; plans whose value reaches ``threshold`` are tied; ``tails[i]``
    bounds the units of the options from i on.
    """
    most = 1 + _changes(options, _any_best(options, prefix, tails))
    layers: list[Layer] = [(np.zeros(1, dtype=np.int64), np.full((1, most), -inf))]
    layers[0][1][0, 0] = 0.0
    for position in range(len(options) - 1, -1, -1):
        layers.append(_extended(layers[-1], options[position], prefix[position], tails[position], threshold))
    layers.reverse()
    states, values = layers[0]
    changes = int((values >= threshold).any(axis=0).argmax())
    units = int(states[(values[:, changes] >= threshold).argmax()])
    return _walk(options, layers, threshold, units, changes)


def _any_best(options: Sequence[Options], prefix: Floats, tails: Sequence[int]) -> list[int]:
    """Some plan of the best value, followed back through the bounds."""
    left = size = prefix.shape[1] - 1
    choice: list[int] = []
    for position in range(len(options) - 1, -1, -1):
        option = options[position]
        fits = option.counts <= left - (size - tails[position])
        totals = np.where(fits, option.values + prefix[position][np.maximum(left - option.counts, 0)], -inf)
        index = int(totals.argmax())
        choice.append(index)
        left -= int(option.counts[index])
    return choice[::-1]


def _changes(options: Sequence[Options], choice: Sequence[int]) -> int:
    return sum(bool(option.changed[index]) for option, index in zip(options, choice, strict=True))


def _extended(layer: Layer, option: Options, bounds: Floats, tail: int, threshold: float) -> Layer:
    """One more option in front; states above ``tail`` are not allowed."""
    size = len(bounds) - 1
    states, values = layer
    low = int(states[0])
    most = values.shape[1]
    result: Floats = np.full((tail - low + 1, most), -inf)
    changed = option.changed.tolist()
    for count, value, change in zip(option.counts.tolist(), option.values.tolist(), changed, strict=True):
        inside = int(np.searchsorted(states, tail - count, side="right"))
        if not inside:
            break
        rows = states[:inside] + (count - low)
        moved = values[:inside, : most - change] + value
        result[rows, change:] = np.maximum(result[rows, change:], moved)
    alive = result + bounds[size - low :: -1][: tail - low + 1, None] >= threshold
    result[~alive] = -inf
    keep = np.flatnonzero(alive.any(axis=1))
    return keep + low, result[keep]


def _walk(options: Sequence[Options], layers: Sequence[Layer], threshold: float, units: int, changes: int) -> list[int]:
    need = threshold
    choice: list[int] = []
    for position, option in enumerate(options):
        states, values = layers[position + 1]
        changed = option.changed
        pick, reach = 0, -inf
        for index, count in enumerate(option.counts.tolist()):
            rest = changes - int(changed[index])
            place = int(np.searchsorted(states, units - count))
            if rest < 0 or place == len(states) or states[place] != units - count:
                continue
            total = float(option.values[index] + values[place, rest])
            if total >= need:
                pick, reach = index, total
                break
            if total > reach:  # rounding alone can leave every rest a hair below the need
                pick, reach = index, total
        choice.append(pick)
        need -= float(option.values[pick])
        units -= int(option.counts[pick])
        changes -= int(changed[pick])
    return choice
