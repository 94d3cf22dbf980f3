"""Cutting requests into shards of about equal seconds. Pure: costs come in as a function.

What must stay together is an *atom*: the choices of a document (they share their context), and generation
requests with the same prompt (repeats, whose prefix vLLM computes once; prompts that are scored never read
the prefix cache). Atoms of one kind of work follow each other over task borders, so that small tasks share
a shard and large ones are split; generation is ordered by prompt, so that neighbours share a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from evalsched.types import Request, Shard, canonical_json, digest_of

Cost = Callable[[Request], float]
"""Estimated seconds of one request on one slot."""

PREFIX_LETTERS = 400
"""Length of a prompt's beginning by which generation shards are grouped."""
MAX_REQUESTS = 5000
"""Bound on a shard's requests, which keeps its message small whatever the estimate says."""


@dataclass(frozen=True)
class _Atom:
    requests: tuple[Request, ...]
    seconds: float


def cut(
    requests: Iterable[Request],
    cost: Cost,
    target_seconds: float,
    *,
    scope: str = "",
    max_requests: int = MAX_REQUESTS,
) -> list[Shard]:
    """Shards of about ``target_seconds`` each, in request order; every request is in exactly one.

    ``scope`` names the checkpoint (or run) in the shards' ids. No shard is longer than the target by more
    than its last atom, and all shards of one kind of work are about equally long.

    Raises:
        ValueError: the target is not positive, or a cost is negative or not a number.
    """
    if not target_seconds > 0 or max_requests < 1:
        raise ValueError(f"target of {target_seconds} s and {max_requests} requests: positive ones are needed")
    scoring: list[Request] = []
    generation: list[Request] = []
    for request in requests:
        (generation if request.request_type == "generate_until" else scoring).append(request)
    shards: list[Shard] = []
    for atoms in (_scoring_atoms(scoring, cost), _generation_atoms(generation, cost)):
        shards.extend(_fill(atoms, target_seconds, scope, max_requests))
    return shards


def split(shard: Shard, cost: Cost, parts: int = 2, *, scope: str = "") -> list[Shard]:
    """``shard`` in up to ``parts`` smaller ones of about equal seconds (for a retry, down to single requests).

    Atoms are kept together while there are enough of them.
    """
    if len(shard.requests) <= 1 or parts < 2:
        return [shard]
    seconds = sum(_checked(cost(request)) for request in shard.requests)
    smaller = cut(shard.requests, cost, max(seconds / parts, 1e-9), scope=scope)
    if len(smaller) > 1:
        return smaller
    half = math.ceil(len(shard.requests) / parts)
    pieces = [shard.requests[i : i + half] for i in range(0, len(shard.requests), half)]
    return [_shard([_Atom(piece, sum(cost(r) for r in piece))], scope) for piece in pieces]


def take(shard: Shard, cost: Cost, seconds: float, *, scope: str = "") -> tuple[Shard, Shard | None]:
    """The first atoms of ``shard``, about ``seconds`` of them and one at least, and the rest (None: nothing is left).

    Both have ids of their own, by what is in them.
    """
    scoring = [one for one in shard.requests if one.request_type != "generate_until"]
    generation = [one for one in shard.requests if one.request_type == "generate_until"]
    atoms = [*_scoring_atoms(scoring, cost), *_generation_atoms(generation, cost)]
    held, count = 0.0, 0
    for atom in atoms:
        if count and held + atom.seconds / 2 > seconds:
            break
        held, count = held + atom.seconds, count + 1
    if count == len(atoms):
        return shard, None
    return _shard(atoms[:count], scope), _shard(atoms[count:], scope)


def prefix_group(shard: Shard) -> str:
    """Shards of one group begin with the same prompt text, which the engine's prefix cache then holds; "" for
    scoring, which never reads that cache."""
    first = shard.requests[0]
    return "" if first.request_type != "generate_until" else digest_of([first.task, first.context[:PREFIX_LETTERS]])[:8]


def _scoring_atoms(requests: Sequence[Request], cost: Cost) -> list[_Atom]:
    """The requests of one document of one task, where they follow each other."""
    grouped = groupby(requests, key=lambda r: (r.task, r.doc_id))
    return [_atom(tuple(group), cost) for _, group in grouped]


def _generation_atoms(requests: Sequence[Request], cost: Cost) -> list[_Atom]:
    """Requests with the same prompt, ordered by prompt within equal generation settings."""
    ordered = sorted(requests, key=lambda r: (canonical_json(r.arguments[1]), r.context, r.id))
    return [_atom(tuple(group), cost) for _, group in groupby(ordered, key=lambda r: r.context)]


def _atom(requests: tuple[Request, ...], cost: Cost) -> _Atom:
    return _Atom(requests, math.fsum(_checked(cost(request)) for request in requests))


def _checked(seconds: float) -> float:
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ValueError(f"a cost of {seconds} s: zero or more seconds are needed")
    return seconds


def _fill(atoms: Sequence[_Atom], target: float, scope: str, max_requests: int) -> list[Shard]:
    """Close a shard where the sum over all atoms passes the next multiple of an equal share."""
    total = math.fsum(atom.seconds for atom in atoms)
    share = total / max(1, math.ceil(total / target - 1e-9))
    shards: list[Shard] = []
    current: list[_Atom] = []
    held = 0
    done = 0.0
    for atom in (piece for whole in atoms for piece in _bounded(whole, max_requests)):
        if current and held + len(atom.requests) > max_requests:
            shards.append(_shard(current, scope))
            current, held = [], 0
        current.append(atom)
        held += len(atom.requests)
        before, done = done, done + atom.seconds
        if share > 0 and math.floor(done / share + 1e-9) > math.floor(before / share + 1e-9):
            shards.append(_shard(current, scope))
            current, held = [], 0
    if current:
        shards.append(_shard(current, scope))
    return shards


def _bounded(atom: _Atom, max_requests: int) -> list[_Atom]:
    """An atom with more requests than a shard may hold is cut, evenly."""
    if len(atom.requests) <= max_requests:
        return [atom]
    pieces = [atom.requests[i : i + max_requests] for i in range(0, len(atom.requests), max_requests)]
    return [_Atom(piece, atom.seconds * len(piece) / len(atom.requests)) for piece in pieces]


def _shard(atoms: Sequence[_Atom], scope: str) -> Shard:
    requests = tuple(request for atom in atoms for request in atom.requests)
    identity = digest_of([scope, [[*request.id, request.digest] for request in requests]])
    return Shard(id=identity, requests=requests, seconds=math.fsum(atom.seconds for atom in atoms))
