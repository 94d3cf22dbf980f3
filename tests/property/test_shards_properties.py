"""Cutting: every request once, documents and prompts whole, shards about equally long, the same cut every time."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalsched.shards import cut, split
from evalsched.types import Request, Shard, request_digest


def _request(kind: str, task: str, doc: int, idx: int, occurrence: int, text: str) -> Request:
    arguments = {"loglikelihood": (text, "x"), "loglikelihood_rolling": (text,)}.get(kind, (text, {"until": ["\n"]}))
    return Request(
        request_type=kind, task=task, doc_id=doc, idx=idx, occurrence=occurrence, arguments=arguments,
        digest=request_digest(kind, arguments), context_tokens=1 + len(text),
    )  # type: ignore[arg-type]  # fmt: skip


@st.composite
def request_lists(draw: st.DrawFn) -> list[Request]:
    """Several tasks of all types: with choices, with repeats, with shared prompts."""
    found: list[Request] = []
    for number in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["loglikelihood", "loglikelihood_rolling", "generate_until"]))
        width = draw(st.integers(1, 4))
        for doc in range(draw(st.integers(0, 12))):
            text = "p" * draw(st.integers(0, 30))
            for inner in range(width):
                idx, occurrence = (0, inner) if kind == "generate_until" else (inner, 0)
                found.append(_request(kind, f"task{number}", doc, idx, occurrence, text))
    return found


def cost(request: Request) -> float:
    return 0.25 * request.context_tokens


targets = st.floats(0.1, 200, allow_nan=False)


@given(request_lists(), targets, st.integers(1, 50))
def test_every_request_is_in_exactly_one_shard(requests: list[Request], target: float, most: int) -> None:
    shards = cut(requests, cost, target, max_requests=most)
    assert Counter(r.id for s in shards for r in s.requests) == Counter(r.id for r in requests)
    assert len({shard.id for shard in shards}) == len(shards)
    assert all(0 < len(shard.requests) <= most for shard in shards)
    assert math.isclose(sum(s.seconds for s in shards), sum(map(cost, requests)), abs_tol=1e-6)


@given(request_lists(), targets)
def test_documents_and_equal_prompts_stay_whole(requests: list[Request], target: float) -> None:
    where: dict[object, set[str]] = {}
    for shard in cut(requests, cost, target):
        for r in shard.requests:
            atom = ("prompt", r.context) if r.request_type == "generate_until" else (r.task, r.doc_id)
            where.setdefault(atom, set()).add(shard.id)
    assert all(len(ids) == 1 for ids in where.values())


@given(request_lists(), targets)
def test_no_shard_passes_the_target_by_more_than_an_atom(requests: list[Request], target: float) -> None:
    atoms: Counter[object] = Counter()
    for r in requests:
        atoms[r.context if r.request_type == "generate_until" else (r.task, r.doc_id)] += cost(r)  # type: ignore[assignment]
    longest = max(atoms.values(), default=0)
    for shard in cut(requests, cost, target):
        assert shard.seconds <= target + longest + 1e-6


@given(request_lists(), targets)
def test_the_same_cut_has_the_same_ids_and_another_scope_others(requests: list[Request], target: float) -> None:
    first, again = (cut(requests, cost, target, scope="a") for _ in range(2))
    assert first == again
    assert not {s.id for s in first} & {s.id for s in cut(requests, cost, target, scope="b")}
    assert [Shard.from_json(s.to_json()) for s in first] == first


@given(request_lists(), st.integers(2, 5))
@settings(max_examples=50)
def test_splitting_goes_down_to_single_requests(requests: list[Request], parts: int) -> None:
    waiting = cut(requests, cost, 1e9)
    single: list[Request] = []
    for _ in range(400):
        if not waiting:
            break
        shard = waiting.pop()
        if len(shard.requests) == 1:
            single.extend(shard.requests)
            continue
        pieces = split(shard, cost, parts)
        assert len(pieces) > 1
        assert Counter(r.id for p in pieces for r in p.requests) == Counter(r.id for r in shard.requests)
        waiting.extend(pieces)
    assert not waiting
    assert Counter(r.id for r in single) == Counter(r.id for r in requests)


def test_small_tasks_share_shards_and_large_ones_are_split() -> None:
    small = [_request("loglikelihood", f"small{n}", doc, 0, 0, "ctx") for n in range(10) for doc in range(3)]
    large = [_request("loglikelihood", "large", doc, 0, 0, "ctx") for doc in range(300)]
    shards = cut([*small, *large], lambda r: 1.0, 60)
    assert len(shards) == 6
    assert {len(shard.requests) for shard in shards} == {55}
    assert len(shards[0].tasks) == 11
    assert sum("large" in shard.tasks for shard in shards) == 6


def test_generation_is_ordered_by_prompt() -> None:
    texts = ["b tail", "a tail", "b head", "a head"]
    requests = [_request("generate_until", "g", n, 0, 0, text) for n, text in enumerate(texts)]
    (shard,) = cut(requests, lambda r: 1.0, 100)
    assert all(one.context <= two.context for one, two in pairwise(shard.requests))


def test_requests_that_cost_nothing_are_cut_by_their_number() -> None:
    requests = [_request("loglikelihood", "t", n, 0, 0, "c") for n in range(25)]
    assert [len(s.requests) for s in cut(requests, lambda r: 0.0, 1.0, max_requests=10)] == [10, 10, 5]


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan")])
def test_wrong_targets_and_costs_are_refused(wrong: float) -> None:
    requests = [_request("loglikelihood", "t", 0, 0, 0, "c")]
    with pytest.raises(ValueError, match="target"):
        cut(requests, lambda r: 1.0, wrong)
    if wrong:
        with pytest.raises(ValueError, match="cost"):
            cut(requests, lambda r: wrong, 1.0)
