"""``planaria tasks show``: the tokens that the engine gets, and what is odd about them (E11)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evalsched.show_command import show, show_command
from evalsched.types import Request
from planner.errors import BadInputError
from tests.support.tiny_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def _request(kind: str, *arguments: object) -> Request:
    return Request(request_type=kind, task="t", doc_id=0, idx=0, occurrence=0, arguments=arguments)  # type: ignore[arg-type]


def test_tokens_with_the_place_where_scoring_begins(model: Path) -> None:
    (one,) = show([_request("loglikelihood", "ab", " c")], model)
    (prompt,) = one["prompts"]
    assert prompt["texts"] == ["a", "b", " ", "c"]
    assert prompt["scored_from"] == 2


def test_a_doubled_begin_of_text_and_an_empty_continuation_show(model: Path) -> None:
    twice, empty = show(
        [_request("loglikelihood", "<|begin|><|begin|>ab", "c"), _request("loglikelihood", "ab", "")], model
    )
    assert twice["prompts"][0]["tokens"][:2] == [256, 256]
    assert "double_bos" in twice["flags"]
    assert "empty_continuation" in empty["flags"]


def test_the_command(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLANARIA_CACHE", str(tmp_path))
    asked = {"model": model, "num_fewshot": None, "include_path": None, "apply_chat_template": False}
    assert show_command("stdlib_next_line", document=1, json_output=True, **asked) == 0  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert [one["choice"] for one in found["requests"]] == [0, 1, 2, 3]
    assert all(one["doc_id"] == 1 and not one["flags"] for one in found["requests"])
    assert show_command("stdlib_next_line", document=1, json_output=False, **asked) == 0  # type: ignore[arg-type]
    assert "choice 3, loglikelihood" in capsys.readouterr().out
    with pytest.raises(BadInputError, match="no such document"):
        show_command("stdlib_next_line", document=10**6, json_output=False, **asked)  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="--document -1"):
        show_command("stdlib_next_line", document=-1, json_output=False, **asked)  # type: ignore[arg-type]
