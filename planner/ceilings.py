"""What whole groups can use of nodes by their usable slots: the bounds under which a plan can be placed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Ceilings = tuple[tuple[int, int], ...]
"""(g, slots) by ascending group size g: how many slots the jobs with groups of g or more can have together."""


def ceilings(capacities: Sequence[int], groups: Iterable[int]) -> Ceilings:
    """``Σ over nodes of g·⌊c/g⌋`` for each group size g, of the usable slots c of each node.

    Empty where no group size loses anything, so that the capacity alone decides: on undamaged nodes whose size every
    group divides. See :func:`planner.placement.place` for what these ceilings prove.
    """
    found = tuple((group, usable(capacities, group)) for group in sorted(set(groups)))
    return () if all(most == sum(capacities) for _, most in found) else found


def changed(capacities: Sequence[int], slots: int) -> list[tuple[int, ...]]:
    """The nodes that an event may leave which changes the usable slots by ``slots``: one list per kind of node struck.

    Nodes are alike if they have as many usable slots. A loss of one slot strikes a node with any, a loss of more
    takes a whole node of that size; a gain brings a node. Without nodes nothing is known of them.
    """
    now = tuple(capacities)
    if not now or slots == 0:
        return [now]
    if slots > 0:
        return [(*now, slots)]
    found = []
    for size in sorted(set(now)):
        place = now.index(size)
        others = now[:place] + now[place + 1 :]
        if slots == -1 and size > 1:
            found.append((*others, size - 1))
        elif size == -slots:
            found.append(others)
    return found


def usable(capacities: Collection[int], group: int) -> int:
    """Slots that groups of ``group`` slots, each within a node, can use."""
    return sum(capacity // group * group for capacity in capacities)
