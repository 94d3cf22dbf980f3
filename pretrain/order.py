"""The order of samples: a pure function of the number of samples consumed, whatever the number of ranks.

Sample ids are counted through epochs: id = epoch · (samples of the data) + index within the data. An id is therefore
drawn exactly once in a run, and ``id % samples`` says which stretch of tokens it is.
"""

from __future__ import annotations

from dataclasses import dataclass

_ROUNDS = 6
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """SplitMix64's finaliser: 64 bits in, 64 well-mixed bits out (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permuted(position: int, size: int, key: int) -> int:
    """Where ``position`` goes in a permutation of ``range(size)`` chosen by ``key``.

    A balanced Feistel network over the next power of four, walked until it falls inside the range: a bijection
    that needs no table, so any position of an epoch of any size is found at once.

    Raises:
        ValueError: position outside the range.
    """
    if not 0 <= position < size:
        raise ValueError(f"position {position} is outside range({size})")
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = position
    while True:
        left, right = value >> half, value & mask
        for round_ in range(_ROUNDS):
            left, right = right, left ^ (_mix(key ^ _mix(right * _ROUNDS + round_)) & mask)
        value = (left << half) | right
        if value < size:
            return value


@dataclass(frozen=True)
class SampleOrder:
    """The endless, seeded order in which a job draws its ``samples``; each epoch draws every one once."""

    samples: int
    """Samples of one epoch."""
    seed: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"an order needs at least one sample, got {self.samples}")

    def at(self, position: int) -> int:
        """Id of the sample that is drawn after ``position`` others."""
        epoch, offset = divmod(position, self.samples)
        return epoch * self.samples + permuted(offset, self.samples, _mix(self.seed) ^ _mix(epoch + 1))

    def batch(self, consumed: int, size: int) -> list[int]:
        """Ids of the global batch that follows ``consumed`` samples, in the order that micro-batches are cut from.

        A resumed run may use another ``size``: the batch still begins at ``consumed``, also within an epoch, so
        nothing is drawn twice and nothing is left out.
        """
        return [self.at(position) for position in range(consumed, consumed + size)]

    def index(self, sample_id: int) -> int:
        """Which sample of the data an id stands for."""
        return sample_id % self.samples
