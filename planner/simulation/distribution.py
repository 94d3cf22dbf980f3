"""How long it takes until every node has a model, from storage alone or passed on between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from planner.distribution import FANOUT, choose_source
from planner.simulation.engine import Engine


@dataclass(frozen=True, slots=True)
class Spread:
    """What came out: seconds until the last node has it, and how often storage was read."""

    seconds: float
    storage_reads: int


def spread(
    nodes: int, size: float, nic: float, storage: float, *, fanout: int = FANOUT, broken: frozenset[int] = frozenset()
) -> Spread:
    """Everybody asks at once; the decisions are production's (:func:`planner.distribution.choose_source`).

    Args:
        size: bytes of the model.
        nic: bytes per second of a node's network card, each way.
        storage: bytes per second of the storage, for one reader.
        broken: holders (by the order in which they got it) that die when their first download from them is half done.
    """
    engine = Engine()
    names = [f"{number:05d}" for number in range(nodes)]
    holders: dict[str, int] = {}
    waiting, reading, reads = list(names), 0, 0
    served = got = 0

    def look() -> None:
        nonlocal reading, reads, served
        for name in list(waiting):
            source = choose_source(name, holders, reading, fanout)
            if source.kind == "wait":
                return  # nobody else would find anything either
            waiting.remove(name)
            if source.kind == "storage":
                reading, reads = reading + 1, reads + 1
                engine.after(size / min(nic, storage), partial(arrived, name, None))
            elif source.peer is not None:
                holders[source.peer] += 1
                served += 1
                seconds = size * fanout / nic
                if served in broken:
                    engine.after(seconds / 2, partial(lost, name, source.peer))
                else:
                    engine.after(seconds, partial(arrived, name, source.peer))

    def arrived(name: str, peer: str | None) -> None:
        nonlocal reading, got
        got += 1
        if peer is None:
            reading -= 1
        elif peer in holders:
            holders[peer] -= 1
        holders[name] = 0
        look()

    def lost(name: str, peer: str) -> None:
        holders.pop(peer, None)
        waiting.insert(0, name)
        look()

    engine.after(0.0, look)
    engine.run(1e12, lambda: got == nodes)
    return Spread(engine.now, reads)


def direct(nodes: int, size: float, nic: float, storage: float) -> Spread:
    """Everybody reads from storage at once."""
    return Spread(size / min(nic, storage / nodes), nodes)
