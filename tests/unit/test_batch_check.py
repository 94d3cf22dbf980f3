"""How far answers depend on their batch (E10): differences, texts that changed, verdicts that would flip."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evalsched.engine_check import compare_responses, sample_documents
from evalsched.types import Request, RequestId, Response


def response(kind: Any, doc: int, idx: int, value: Any) -> Response:
    return Response(id=RequestId(kind, "t", doc, idx, 0), value=value, error=None if value is not None else "no memory")


def check(*pairs: tuple[Response, Any]) -> Any:
    first = {old.id: old for old, _ in pairs}
    return compare_responses(
        first, [response(old.id.request_type, old.id.doc_id, old.id.idx, new) for old, new in pairs]
    )


def choice(doc: int, idx: int, old: Any, new: Any) -> tuple[Response, Any]:
    return response("loglikelihood", doc, idx, old), new


def test_equal_answers_differ_in_nothing() -> None:
    found = check(choice(0, 0, (-1.0, True), (-1.0, True)), choice(0, 1, (-2.0, False), (-2.0, False)))
    assert (found.checked, found.different, found.largest_difference, found.flipped) == (2, 0, 0.0, ())


def test_a_difference_that_changes_the_best_choice_flips_the_document() -> None:
    found = check(
        choice(1, 0, (-1.00, False), (-1.02, False)), choice(1, 1, (-1.01, False), (-1.01, False)),
        choice(2, 0, (-1.00, False), (-1.02, False)), choice(2, 1, (-3.00, False), (-3.00, False)),
    )  # fmt: skip
    assert found.flipped == ("t/1",)
    assert found.different == 2
    assert found.largest_difference == pytest.approx(0.02)


def test_a_document_flips_where_only_the_best_choice_per_letter_does() -> None:
    pairs = [choice(1, 0, (-1.00, False), (-1.00, False)), choice(1, 1, (-1.99, False), (-2.01, False))]
    assert check(*pairs).flipped == ()
    first, again = {old.id: old for old, _ in pairs}, [replace(old, value=new) for old, new in pairs]
    lengths = {response("loglikelihood", 1, idx, (0.0, False)).id: length for idx, length in ((0, 5), (1, 10))}
    assert compare_responses(first, again, lengths).flipped == ("t/1",)


@pytest.mark.parametrize(
    ("kind", "old", "new", "flipped"),
    [
        ("loglikelihood", (-1.0, True), (-1.1, True), ()),
        ("loglikelihood", (-1.0, True), (-1.1, False), ("t/0",)),
        ("loglikelihood_rolling", -7.0, -7.25, ()),
        ("generate_until", "yes", "no", ("t/0",)),
    ],
)
def test_single_requests(kind: Any, old: Any, new: Any, flipped: tuple[str, ...]) -> None:
    found = check((response(kind, 0, 0, old), new))
    assert found.flipped == flipped
    assert found.different == 1
    assert found.changed_texts == (("t/0",) if kind == "generate_until" else ())


def test_an_answer_that_came_only_in_the_batch_is_the_largest_difference() -> None:
    assert check(choice(0, 0, (-1.0, True), None)).largest_difference == float("inf")


def test_a_sample_has_whole_documents_and_is_the_same_each_time() -> None:
    requests = [
        Request(request_type="loglikelihood", task=task, doc_id=doc, idx=idx, occurrence=0, arguments=("a", "b"))
        for task in ("one", "two") for doc in range(20) for idx in range(4)
    ]  # fmt: skip
    sample = sample_documents(requests, 12)
    assert sample == sample_documents(requests, 12)
    assert len(sample) == 12
    assert all(sum(one.doc_id == other.doc_id and one.task == other.task for other in sample) == 4 for one in sample)
