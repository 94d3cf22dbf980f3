"""The quick reader gives what the standard library gives, on what it likes and on what it does not."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.quick_json import loads

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec=None))
documents = st.recursive(leaves, lambda one: st.lists(one) | st.dictionaries(st.text(), one), max_leaves=20)


@given(documents, st.booleans())
def test_it_reads_what_json_reads(document: object, ascii_only: bool) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only)
    assert loads(text) == json.loads(text)
    assert repr(loads(text)) == repr(json.loads(text)), "-0.0, 1 and 1.0 stay what they are"


@pytest.mark.parametrize(
    "text", ['{"a": -Infinity}', "[1e400]", '"\\ud800"', '{"a": 1, "a": 2}', b"[1]", b'\xef\xbb\xbf"a"']
)
def test_oddities(text: str | bytes) -> None:
    try:
        expected = json.loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            loads(text)
    else:
        assert loads(text) == expected


def test_not_a_number_is_read() -> None:
    assert math.isnan(loads("[NaN]")[0])


@pytest.mark.parametrize("text", ["", "{", "[1,]", "nul", b"\xff"])
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        loads(text)
