"""Datasets into shards: long CPU metrics first, pieces of about equal seconds, finer towards the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FINEST = 0.1
"""Smallest piece as a share of the usual one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a dataset that one slot runs at one go."""

    dataset: str
    seconds: float


def cut(datasets: Sequence[tuple[str, float, float]], slots: int, shard_seconds: float) -> list[Shard]:
    """Shards in the order in which slots take them (list scheduling).

    ``datasets`` are ``(name, inference seconds, metric seconds)``. A piece is ``shard_seconds`` long, or half of a
    slot's share of what is left where that is less, so that all slots end together.
    """
    left = sum(inference for _, inference, _ in datasets)
    found: list[Shard] = []
    for name, inference, _ in sorted(datasets, key=lambda d: (-d[2], -d[1], d[0])):
        rest = inference
        while rest > 1e-9:
            piece = min(shard_seconds, max(left / (2 * slots), FINEST * shard_seconds), rest)
            if rest - piece < FINEST * shard_seconds:
                piece = rest
            found.append(Shard(name, piece))
            rest -= piece
            left -= piece
    return found
