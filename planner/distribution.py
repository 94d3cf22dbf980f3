"""Where a node gets a staged model from, so that any number of nodes cost storage one read: pure.

Nodes that have the model serve it to others, at most :data:`FANOUT` at a time, so the number of nodes that have it
doubles with each round: a tree whose root is the one that read from storage. Whoever finds all holders busy waits for
the next one that is ready, which is sooner than sharing a holder's network card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FANOUT = 1
"""Downloads that a holder serves at a time."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a node does now; ``peer`` names the holder that it loads from."""

    kind: Literal["storage", "peer", "wait"]
    peer: str | None = None


def choose_source(node: str, holders: Mapping[str, int], from_storage: int, fanout: int = FANOUT) -> Source:
    """Where ``node`` loads from.

    Args:
        node: who asks; it holds nothing itself.
        holders: nodes that have the model → downloads that they serve now.
        from_storage: nodes that read it from storage now.
        fanout: most downloads per holder.
    """
    free = [(serving, name) for name, serving in holders.items() if name != node and serving < fanout]
    if free:
        return Source("peer", min(free)[1])
    if not from_storage and all(name == node for name in holders):
        return Source("storage")
    return Source("wait")
