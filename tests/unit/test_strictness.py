"""Each finding from the least that shows it; weaker ones give way to stronger."""

from __future__ import annotations

import pytest

from evalsched.strictness import (
    EXPLANATIONS,
    UNTRUSTED,
    FlagKind,
    bos_flags,
    collect,
    generation_flags,
    scoring_flags,
    untrusted_documents,
)
from evalsched.types import Request, Response, Window

WINDOW = Window(max_length=100)


def _scored(context: str, continuation: str, doc: int = 0, idx: int = 0) -> Request:
    return Request(
        request_type="loglikelihood", task="t", doc_id=doc, idx=idx, occurrence=0, arguments=(context, continuation)
    )


def _kinds(*requests: Request, responses: tuple[Response, ...] = ()) -> list[FlagKind]:
    return [flag.kind for flag in collect(requests, {response.id: response for response in responses})]


@pytest.mark.parametrize(
    ("context", "continuation", "kinds"),
    [
        ("c", "", [FlagKind.EMPTY_CONTINUATION]),
        ("", "", [FlagKind.EMPTY_REQUEST]),
        ("c", "  ", [FlagKind.BLANK_CONTINUATION]),
        ("", "x", []),
        ("c", "x", []),
    ],
)
def test_texts(context: str, continuation: str, kinds: list[FlagKind]) -> None:
    assert _kinds(_scored(context, continuation)) == kinds


@pytest.mark.parametrize(
    ("context", "continuation", "kinds"),
    [
        (10, 0, [FlagKind.EMPTY_CONTINUATION]),
        (10, 98, [FlagKind.CONTEXT_TRUNCATED]),  # one token of context is left: scored in full
        (10, 99, [FlagKind.CONTINUATION_TRUNCATED]),  # the window less a new token: the first token has no context
        (0, 500, [FlagKind.CONTINUATION_TRUNCATED]),
        (89, 10, []),
        (90, 10, [FlagKind.CONTEXT_TRUNCATED]),
    ],
)
def test_scored_lengths(context: int, continuation: int, kinds: list[FlagKind]) -> None:
    assert scoring_flags(context, continuation, WINDOW) == kinds


@pytest.mark.parametrize(
    ("prompt", "budget", "kinds"),
    [
        (0, 10, [FlagKind.EMPTY_PROMPT]),
        (90, 10, []),
        (91, 10, [FlagKind.CONTEXT_TRUNCATED]),
        (5, 100, [FlagKind.BUDGET_EXCEEDS_WINDOW]),
    ],
)
def test_generation_lengths(prompt: int, budget: int, kinds: list[FlagKind]) -> None:
    assert generation_flags(prompt, budget, WINDOW) == kinds


@pytest.mark.parametrize(
    ("ids", "bos", "adds", "kinds"),
    [
        ([1, 1, 5], 1, True, [FlagKind.DOUBLE_BOS]),
        ([1, 5], 1, True, []),
        ([5, 6], 1, True, [FlagKind.MISSING_BOS]),
        ([5, 6], 1, False, []),
        ([5], None, False, []),
        ([], 1, True, []),
    ],
)
def test_begin_of_text(ids: list[int], bos: int | None, adds: bool, kinds: list[FlagKind]) -> None:
    assert bos_flags(ids, bos, adds) == kinds


def test_a_choice_that_stands_twice_is_named() -> None:
    requests = [_scored("c", " yes", idx=0), _scored("c", " no", idx=1), _scored("c", " yes", idx=2)]
    (flag,) = collect(requests, {})
    assert (flag.kind, flag.choice) == (FlagKind.SAME_CHOICES, 2)
    assert "t: document 0, choice 2" in flag.line()


def test_the_engines_findings_come_in_and_an_error_carries_its_reason() -> None:
    one, two = _scored("c", "x"), _scored("c", "y", doc=1)
    responses = (
        Response(id=one.id, value=(0.0, True), flags=("empty_continuation", "context_truncated")),
        Response(id=two.id, value=None, error="needs 5 GiB"),
    )
    flags = collect([one, two], {response.id: response for response in responses})
    assert [flag.kind for flag in flags] == [
        FlagKind.EMPTY_CONTINUATION, FlagKind.CONTEXT_TRUNCATED, FlagKind.NO_ANSWER,
    ]  # fmt: skip
    assert "needs 5 GiB" in flags[2].detail
    assert untrusted_documents(flags) == {"t": [0, 1]}


def test_the_same_finding_of_text_and_engine_is_one() -> None:
    request = _scored("c", "")
    response = Response(id=request.id, value=(0.0, True), flags=("empty_continuation",))
    assert _kinds(request, responses=(response,)) == [FlagKind.EMPTY_CONTINUATION]


def test_every_kind_is_explained() -> None:
    assert set(EXPLANATIONS) == set(FlagKind)
    assert set(FlagKind) >= UNTRUSTED
