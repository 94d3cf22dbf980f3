"""Ranks and replicas: who is broken by a dead rank, and what survivors and newcomers are called afterwards.

Megatron's order: tensor fastest, then data, then pipeline: ``rank = t + T · (d + D · p)``. Survivors keep their
tensor and pipeline coordinates, so that their part of the model stays theirs; replicas keep their order and
newcomers stand behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """A layout of ``tensor · pipeline · data`` ranks."""

    tensor: int
    pipeline: int
    data: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def group(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.pipeline

    def rank(self, tensor_rank: int, data_rank: int, pipeline_rank: int) -> int:
        """The rank at a coordinate."""
        return tensor_rank + self.tensor * (data_rank + self.data * pipeline_rank)

    def replica(self, rank: int) -> int:
        """Data-parallel rank of ``rank``.

        Raises:
            ValueError: no such rank.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of {self.world}")
        return rank // self.tensor % self.data

    def coordinate(self, rank: int) -> tuple[int, int]:
        """(tensor, pipeline) rank of ``rank``: what replicas of the same part of the model have in common.

        Raises:
            ValueError: no such rank.
        """
        self.replica(rank)
        return rank % self.tensor, rank // (self.tensor * self.data)

    def members(self, replica: int) -> tuple[int, ...]:
        """Ranks of a replica, ascending by (pipeline, tensor)."""
        return tuple(
            self.rank(tensor, replica, pipeline) for pipeline in range(self.pipeline) for tensor in range(self.tensor)
        )

    def broken(self, dead: Iterable[int]) -> frozenset[int]:
        """All ranks of the replicas that have lost a member."""
        lost = {self.replica(rank) for rank in dead}
        return frozenset(rank for replica in lost for rank in self.members(replica))


def grid(world: int, tensor: int, pipeline: int) -> Grid:
    """The layout of ``world`` ranks.

    Raises:
        ValueError: the world does not divide into whole replicas.
    """
    group = tensor * pipeline
    if world < group or world % group:
        raise ValueError(f"{world} ranks do not make replicas of {tensor} × {pipeline}")
    return Grid(tensor, pipeline, world // group)


def without(now: Grid, dead: Iterable[int]) -> tuple[Grid, dict[int, int]] | None:
    """Layout and map (old rank → new rank) of the survivors when ``dead`` ranks go; None if no replica is whole."""
    broken = now.broken(dead)
    whole = [replica for replica in range(now.data) if not broken.intersection(now.members(replica))]
    if not whole:
        return None
    after = Grid(now.tensor, now.pipeline, len(whole))
    return after, _renamed(now, after, {old: new for new, old in enumerate(whole)})


def enlarged(now: Grid, replicas: int) -> tuple[Grid, dict[int, int], tuple[int, ...]]:
    """Layout, map of the present ranks, and the new ranks to be filled, when ``replicas`` more join.

    The new ranks come replica by replica, each in the order of :meth:`Grid.members`.

    Raises:
        ValueError: a negative number.
    """
    if replicas < 0:
        raise ValueError(f"{replicas} replicas cannot join")
    after = Grid(now.tensor, now.pipeline, now.data + replicas)
    kept = _renamed(now, after, {replica: replica for replica in range(now.data)})
    new = [rank for replica in range(now.data, after.data) for rank in after.members(replica)]
    return after, kept, tuple(new)


def _renamed(now: Grid, after: Grid, replicas: Mapping[int, int]) -> dict[int, int]:
    return {
        old_rank: new_rank
        for old, new in replicas.items()
        for old_rank, new_rank in zip(now.members(old), after.members(new), strict=True)
    }
