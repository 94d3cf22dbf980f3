"""One layer of the program's states: a value for each number of used units, held densely or thinly."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

THIN = 4096
"""Most combinations of state and count that are sorted; above it whole rows are shifted and compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """``values[n]`` of the state ``index[n]`` (ascending); without an index the states are 0, 1, 2, …"""

    index: Integers | None
    values: Floats

    @classmethod
    def single(cls, state: int, value: float) -> Row:
        """A row of one state."""
        return cls(np.array([state], dtype=np.int64), np.array([value]))

    def items(self) -> tuple[Integers, Floats]:
        """States that can be reached, ascending, and their values."""
        if self.index is not None:
            return self.index, self.values
        reached = np.flatnonzero(self.values > -inf)
        return reached, self.values[reached]

    def at(self, states: Integers) -> Floats:
        """Values at ``states``; −inf where a state is not held (negative ones included)."""
        result: Floats = np.full(len(states), -inf)
        if self.index is None:
            inside = (states >= 0) & (states < len(self.values))
            result[inside] = self.values[states[inside]]
            return result
        if not len(self.index):
            return result
        place = np.searchsorted(self.index, states)
        place[place == len(self.index)] = 0
        found = self.index[place] == states
        result[found] = self.values[place[found]]
        return result

    def extended(self, counts: Integers, gains: Floats, size: int) -> Row:
        """The row after one more job: ``max_k value(j − k) + gain(k)`` at each j up to ``size``."""
        if self.index is not None and len(self.index) * len(counts) <= THIN:
            return self._extended_thin(counts, gains, size)
        return self._extended_dense(counts, gains, size)

    def _extended_thin(self, counts: Integers, gains: Floats, size: int) -> Row:
        assert self.index is not None
        if len(self.index) == 1:  # the usual case where nothing is tied: already in order
            states = counts + self.index[0]
            fit = int(np.searchsorted(states, size, side="right"))
            return Row(states[:fit], gains[:fit] + self.values[0])
        states = np.add.outer(self.index, counts).ravel()
        values = np.add.outer(self.values, gains).ravel()
        inside = states <= size
        states, values = states[inside], values[inside]
        order = np.argsort(states, kind="stable")
        states, values = states[order], values[order]
        first = np.flatnonzero(np.diff(states, prepend=-1))
        return Row(states[first], np.maximum.reduceat(values, first) if len(first) else values)

    def _extended_dense(self, counts: Integers, gains: Floats, size: int) -> Row:
        source = self.values
        low = 0
        if self.index is not None:
            low = int(self.index[0])
            source = np.full(int(self.index[-1]) - low + 1, -inf)
            source[self.index - low] = self.values
        result: Floats = np.full(size + 1, -inf)
        buffer: Floats = np.empty(len(source))
        for count, gain in zip(counts.tolist(), gains.tolist(), strict=True):
            start = low + count
            length = min(len(source), size + 1 - start)
            if length <= 0:
                break
            np.add(source[:length], gain, out=buffer[:length])
            target = result[start : start + length]
            np.maximum(target, buffer[:length], out=target)
        return Row(None, result)

    def pruned(self, bounds: Floats, size: int, threshold: float) -> Row:
        """Only the states j with ``value(j) + bounds[size − j] ≥ threshold``."""
        if self.index is None:
            length = len(self.values)
            keep = np.flatnonzero(self.values + bounds[size::-1][:length] >= threshold)
            return Row(keep, self.values[keep])
        mask = self.values + bounds[size - self.index] >= threshold
        return Row(self.index[mask], self.values[mask])
