"""Swap process groups inside live Megatron objects, so that a model survives a change of incarnation in place.

Megatron's modules, gradient buffers and optimizer keep the groups that they were built with. Building them anew
would lose gradients and optimizer state; with the plain optimizer nothing but the groups (and the number of
replicas) differs between incarnations, so they are exchanged one by one: each group is known by the name under
which :mod:`megatron.core.parallel_state` holds it.

The distributed optimizer cuts its state by the number of replicas: a lost shard has no live copy, so such a job
cannot heal in place and is started from its newest snapshot (:func:`can_swap`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch.distributed import ProcessGroup

Groups = Mapping[str, ProcessGroup]
"""Process groups by the name of the variable that holds them in Megatron's parallel state."""


def can_swap(chunk: DistributedDataParallel) -> bool:
    """Whether the state of this model does not depend on the number of replicas."""
    return not chunk.ddp_config.use_distributed_optimizer


def present() -> dict[str, ProcessGroup]:
    """The groups of the present incarnation."""
    return {name: value for name, value in vars(parallel_state).items() if isinstance(value, ProcessGroup)}


def swap(roots: Iterable[object], old: Groups, new: Groups) -> int:
    """Replace every group of ``old`` that is reachable from ``roots`` by the one of the same name in ``new``.

    Returns:
        How many references were replaced.

    Raises:
        ValueError: an old group has no successor (the layouts differ in more than the number of replicas).
    """
    missing = sorted(old.keys() - new.keys())
    if missing:
        raise ValueError(f"no successor for the process groups {', '.join(missing)}")
    successors = {id(group): new[name] for name, group in old.items()}
    count = 0
    for owner in _reachable(roots):
        entries = owner.items() if isinstance(owner, dict) else enumerate(owner)
        for key, value in list(entries):
            if isinstance(value, ProcessGroup) and id(value) in successors:
                owner[key] = successors[id(value)]
                count += 1
    return count


def resize(chunk: DistributedDataParallel) -> None:
    """Tell the gradient buffers how many replicas there are now."""
    for buffer in chunk.buffers:
        buffer.data_parallel_world_size = buffer.data_parallel_group.size()


def _reachable(roots: Iterable[object]) -> Iterator[Any]:
    """Every dict and list that belongs to Megatron objects or modules below ``roots``, attribute dicts included."""
    seen: set[int] = set()
    stack: list[object] = list(roots)
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, torch.Tensor):
            continue
        seen.add(id(item))
        if isinstance(item, (dict, list)):
            yield item
            stack.extend(item.values() if isinstance(item, dict) else item)
        elif isinstance(item, (tuple, set, frozenset)):
            stack.extend(item)
        elif isinstance(item, torch.nn.Module) or type(item).__module__.startswith("megatron."):
            attributes = getattr(item, "__dict__", None)
            if attributes is not None:
                stack.append(attributes)
