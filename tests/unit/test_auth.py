"""Only who holds the key can speak; anything else is dropped."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.auth import ForgedMessageError, job_token, new_secret, seal, unseal

JSON = st.dictionaries(
    st.text(max_size=8), st.integers() | st.text(max_size=20) | st.booleans() | st.none(), max_size=5
)


@given(JSON)
def test_round_trip(message: dict[str, object]) -> None:
    key = "k" * 64
    assert unseal(key, seal(key, message)) == message


def test_changed_body_and_wrong_key_are_refused() -> None:
    secret = new_secret()
    text = seal(secret, {"kind": "leave"})
    outer = json.loads(text)
    outer["body"] = outer["body"].replace("leave", "stage")
    with pytest.raises(ForgedMessageError):
        unseal(secret, json.dumps(outer))
    with pytest.raises(ForgedMessageError):
        unseal(new_secret(), text)


@pytest.mark.parametrize("garbage", ["", "{}", "[]", "null", '{"body": 1, "mac": "x"}', b"\xff\xfe", '{"body": "{}"}'])
def test_garbage_is_refused(garbage: str | bytes) -> None:
    with pytest.raises(ForgedMessageError):
        unseal("key", garbage)


def test_job_tokens_differ_by_job_and_cluster() -> None:
    one, two = new_secret(), new_secret()
    assert len({job_token(one, "a"), job_token(one, "b"), job_token(two, "a")}) == 3
    assert job_token(one, "a") == job_token(one, "a")
