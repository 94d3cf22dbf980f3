"""Who runs which micro-batch of a step: a pure, deterministic share-out that every rank computes alike.

The unit is the *data-parallel replica* (one data-parallel rank; with tensor or pipeline parallelism all ranks of
one model-parallel group). Micro-batches are numbered 0 to ``count - 1`` within the step's global batch; they need
not divide evenly, and a replica may get none. The scaling of the loss must come from ``count``, never from what a
replica runs, so that the gradient does not depend on the share-out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

Shares = tuple[tuple[int, ...], ...]
"""Micro-batches of each replica, in the order in which it runs them; index = data-parallel rank."""


def assign(count: int, replicas: int) -> Shares:
    """The share-out of an undisturbed step: contiguous blocks, the first ``count % replicas`` one longer.

    Raises:
        ValueError: fewer than one replica, or a negative count.
    """
    if replicas < 1:
        raise ValueError(f"a step needs at least one replica, got {replicas}")
    if count < 0:
        raise ValueError(f"a step cannot have {count} micro-batches")
    base, longer = divmod(count, replicas)
    shares: list[tuple[int, ...]] = []
    start = 0
    for replica in range(replicas):
        end = start + base + (1 if replica < longer else 0)
        shares.append(tuple(range(start, end)))
        start = end
    return tuple(shares)


def share_out(lost: Iterable[int], remaining: Sequence[int]) -> Shares:
    """Give each lost micro-batch to the survivor with the least left to do (ties: the lowest rank).

    ``remaining[i]`` is how many micro-batches survivor ``i`` has still to run of its own. The result is what each
    survivor runs *besides* those, ascending. Survivors that were within one of each other stay within one; others
    are brought as near to each other as the lost micro-batches allow, so the step ends as early as it can.

    Raises:
        ValueError: nobody survives while something is lost, or a negative remainder.
    """
    orphans = sorted(set(lost))
    if any(left < 0 for left in remaining):
        raise ValueError(f"a survivor cannot have a negative remainder: {list(remaining)}")
    if orphans and not remaining:
        raise ValueError(f"nobody survives to run micro-batches {orphans}")
    extra: list[list[int]] = [[] for _ in remaining]
    heap = [(left, rank) for rank, left in enumerate(remaining)]
    heapq.heapify(heap)
    for orphan in orphans:
        left, rank = heap[0]
        extra[rank].append(orphan)
        heapq.heapreplace(heap, (left + 1, rank))
    return tuple(tuple(part) for part in extra)


def reassign(
    count: int, done: Mapping[int, Iterable[int]], replicas: int, own: Mapping[int, Iterable[int]] | None = None
) -> Shares:
    """What each of ``replicas`` has still to run, given whose gradients are kept.

    ``done`` maps each replica's *new* data-parallel rank to the micro-batches whose gradient it still holds. All
    others (the dead replicas', and those that survivors had not reached) are run, each exactly once. They are shared
    out evenly, and within that a replica runs what was its ``own`` before.

    Raises:
        ValueError: a micro-batch done twice or outside ``range(count)``, or a replica outside ``range(replicas)``.
    """
    held: dict[int, int] = {}
    for replica, batches in done.items():
        if not 0 <= replica < replicas:
            raise ValueError(f"replica {replica} is not one of {replicas}")
        for batch in batches:
            if not 0 <= batch < count:
                raise ValueError(f"micro-batch {batch} is not one of the step's {count}")
            if batch in held:
                raise ValueError(f"micro-batch {batch} is held by replicas {held[batch]} and {replica}")
            held[batch] = replica
    missing = [batch for batch in range(count) if batch not in held]
    mine: list[list[int]] = [[] for _ in range(replicas)]
    claims = {batch: replica for replica, batches in (own or {}).items() for batch in batches}
    for batch in missing:
        if batch in claims:
            mine[claims[batch]].append(batch)
    even, longer = divmod(len(missing), replicas)
    order = sorted(range(replicas), key=lambda replica: (-len(mine[replica]), replica))
    kept = {replica: mine[replica][: even + (place < longer)] for place, replica in enumerate(order)}
    orphans = set(missing).difference(*kept.values())
    extra = share_out(orphans, [len(kept[replica]) for replica in range(replicas)])
    return tuple(tuple(sorted([*kept[replica], *extra[replica]])) for replica in range(replicas))
