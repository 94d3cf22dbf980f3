"""Where a new rank's state comes from: the nearest source that holds the right step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from planner.topology import Topology
from planner.types import Slot

Coordinate = tuple[int, int]
"""(tensor, pipeline) rank: ranks with the same coordinate are data-parallel replicas of each other."""


class SourceKind(IntEnum):
    """Nearest first (DESIGN.md, "One fault, followed")."""

    PEER = 0  #: a live data-parallel replica
    SNAPSHOT_ON_NODE = 1
    SNAPSHOT_ON_PEER = 2
    STORAGE = 3  #: a published checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A copy of the state of one coordinate in a node's memory."""

    node: str
    coordinate: Coordinate
    step: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """State of ``step`` goes to ``target`` from ``source``: a slot, a node, or None for storage."""

    target: Slot
    coordinate: Coordinate
    kind: SourceKind
    source: Slot | str | None
    step: int


class NoSourceError(ValueError):
    """No source holds the whole state of any one step."""


def plan_transfers(
    topology: Topology,
    targets: Mapping[Slot, Coordinate],
    peers: Mapping[Slot, Coordinate],
    live_step: int | None,
    snapshots: Sequence[Snapshot] = (),
    published_step: int | None = None,
) -> tuple[Transfer, ...]:
    """A source for each target, all of one step: the newest that can be put together for every coordinate needed.

    ``peers`` are surviving ranks, whose state is of ``live_step``. While every coordinate in need has a live peer or
    a snapshot of that step, nothing is lost; otherwise all coordinates, the survivors' too, must go back to the newest
    step that snapshots hold whole, or to the published checkpoint if that is newer. Among equally near sources the
    one that has served least is taken, then the first by name.

    Raises:
        NoSourceError: nothing holds the whole state.
    """
    step = _newest_step(targets, peers, live_step, snapshots, published_step)
    served: dict[Slot | str, int] = {}
    transfers: list[Transfer] = []
    for target in sorted(targets):
        coordinate = targets[target]
        candidates = _candidates(topology, target, coordinate, peers if step == live_step else {}, snapshots, step)
        if not candidates:
            transfers.append(Transfer(target, coordinate, SourceKind.STORAGE, None, step))
            continue
        kind, _, _, _, source = min(
            (kind, distance, served.get(source, 0), str(source), source) for kind, distance, source in candidates
        )
        served[source] = served.get(source, 0) + 1
        transfers.append(Transfer(target, coordinate, kind, source, step))
    return tuple(transfers)


def _newest_step(
    targets: Mapping[Slot, Coordinate],
    peers: Mapping[Slot, Coordinate],
    live_step: int | None,
    snapshots: Sequence[Snapshot],
    published_step: int | None,
) -> int:
    needed = set(targets.values())
    everything = needed | set(peers.values())
    by_step: dict[int, set[Coordinate]] = {}
    for snapshot in snapshots:
        by_step.setdefault(snapshot.step, set()).add(snapshot.coordinate)
    whole = [step for step, coordinates in by_step.items() if everything <= coordinates]
    if live_step is not None and needed <= set(peers.values()) | by_step.get(live_step, set()):
        return live_step
    if published_step is not None:
        whole.append(published_step)
    if not whole:
        missing = sorted(needed - set(peers.values()))
        raise NoSourceError(f"no peer, snapshot or published checkpoint holds the state of ranks {missing}")
    return max(whole)


def _candidates(
    topology: Topology,
    target: Slot,
    coordinate: Coordinate,
    peers: Mapping[Slot, Coordinate],
    snapshots: Sequence[Snapshot],
    step: int,
) -> list[tuple[SourceKind, int, Slot | str]]:
    found: list[tuple[SourceKind, int, Slot | str]] = [
        (SourceKind.PEER, topology.distance(target, peer), peer)
        for peer, holds in peers.items()
        if holds == coordinate and peer != target
    ]
    for snapshot in snapshots:
        if snapshot.step == step and snapshot.coordinate == coordinate:
            near = snapshot.node == target.node
            kind = SourceKind.SNAPSHOT_ON_NODE if near else SourceKind.SNAPSHOT_ON_PEER
            found.append((kind, topology.node_distance(target.node, snapshot.node), snapshot.node))
    return found
