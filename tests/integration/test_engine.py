"""The engine against lm-eval's own vLLM class and against transformers, on a tiny Llama; one engine for all tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evalsched.types import Request
from tests.support.engine_host import EngineHost
from tests.support.fork_server import ForkServer
from tests.support.tiny_model import write_model

WINDOW = 256
pytestmark = pytest.mark.timeout(600)


def request(kind: Any, *arguments: Any, doc: int = 0, task: str = "t") -> dict[str, Any]:
    return Request(
        request_type=kind, task=task, doc_id=doc, idx=0, occurrence=0, arguments=arguments, digest=str(doc)
    ).to_json()


def mixed(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Requests of every type and of lengths around the window's edges."""
    rng = random.Random(seed)
    text = Path(random.__file__).read_text()
    found = []
    for number in range(count):
        start, length = rng.randrange(20_000), rng.choice([1, 7, 60, 200, 250, 254, 255, 300])
        kind = rng.choice(["loglikelihood", "loglikelihood", "loglikelihood_rolling", "generate_until"])
        piece = text[start : start + length]
        if kind == "loglikelihood":
            context = "" if number % 9 == 0 else "x" + piece + rng.choice(["", " ", "  \n"])
            found.append(
                request(kind, context, text[start + length : start + length + rng.randrange(1, 40)], doc=number)
            )
        elif kind == "loglikelihood_rolling":
            found.append(request(kind, piece * rng.choice([1, 1, 4]), doc=number))
        else:
            settings = {"until": rng.choice([["\n"], ["e", "\n\n"], "s"]), "max_gen_toks": rng.choice([1, 12, 40])}
            settings |= rng.choice([{"do_sample": False}, {"temperature": 0}, {"do_sample": False, "temperature": 0.7}])
            found.append(request(kind, "y" + piece, settings, doc=number))
    return found


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("engine-models")
    return write_model(folder / "one", seed=1), write_model(folder / "two", seed=2)


@pytest.fixture(scope="session")
def host(
    engines: ForkServer, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHost]:
    host = EngineHost(tmp_path_factory.mktemp("engine"), models[0], engines, exact=True)
    yield host
    host.close()


def values(answers: list[dict[str, Any]]) -> dict[int, Any]:
    return {one["id"][2]: one["value"] for one in answers}


def test_answers_are_those_of_lm_evals_own_class(host: EngineHost) -> None:
    requests = mixed(90)
    ours = values(host.call("run", requests=requests))
    stock = host.call("stock", requests=requests)
    assert len(ours) == 90
    for one, theirs in zip(requests, stock, strict=True):
        assert ours[one["doc_id"]] == theirs, one
    assert len({str(value) for value in stock}) > 60, "the comparison must not be of constants"


def test_log_probabilities_are_those_of_transformers(host: EngineHost) -> None:
    requests = [one for one in mixed(60, seed=2) if one["request_type"] == "loglikelihood"]
    pairs = []
    for one in requests:
        (prompt,) = host.call("encode", request=one)
        start = prompt["from"]
        pairs.append((prompt["tokens"][:start], prompt["tokens"][start:]))
    ours = values(host.call("run", requests=requests))
    for one, expected in zip(requests, host.call("reference", pairs=pairs), strict=True):
        assert ours[one["doc_id"]][0] == pytest.approx(expected, abs=1e-4)


def test_answers_do_not_depend_on_the_batch_in_exact_mode(host: EngineHost) -> None:
    requests = mixed(60, seed=3)
    together = values(host.call("run", requests=requests))
    assert values(host.call("singly", requests=requests)) == together
    assert values(host.call("run", requests=requests[::-1])) == together


def test_what_nobody_reads_is_not_computed_and_changes_no_bit(host: EngineHost) -> None:
    requests = [
        request("loglikelihood", f"{number:0>200}", " yes no"[: 1 + number % 7], doc=number) for number in range(40)
    ]
    requests += mixed(40, seed=4)
    ours, whole = (host.call("rows", requests=requests, whole=one) for one in (False, True))
    assert values(ours["answers"]) == values(whole["answers"])
    assert ours["rows"] < whole["rows"] - 40 * 170, "of each of the first forty at most 23 rows"


def test_what_scored_prompts_share_is_computed_once(
    host: EngineHost, engines: ForkServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Outside exact mode: contexts come from the prefix cache, and a continuation that lies in it is computed again."""
    shots = "".join(f"Question {number}, answer {number * 7}. " for number in range(7))[:150]
    requests = [
        request("loglikelihood", shots + f" Question {number}?", f" answer {choice}", doc=4 * number + choice)
        for number in range(5)
        for choice in range(4)
    ]
    twice = [request("loglikelihood", "The same twice", "z" * 150, doc=100 + number) for number in range(2)]
    rolling = [request("loglikelihood_rolling", shots + str(number), doc=200 + number) for number in range(3)]
    sharing = EngineHost(tmp_path, models[0], engines)
    try:
        found = sharing.call("shared", requests=requests + twice + rolling)
        again = sharing.call("run", requests=requests + twice + rolling)
    finally:
        sharing.close()
    exact = values(host.call("run", requests=requests + twice + rolling))
    for answers in (found["answers"], again):
        assert values(answers).keys() == exact.keys()
        for doc, value in values(answers).items():
            assert value == pytest.approx(exact[doc], abs=1e-4), doc
    assert found["cached"] >= 15 * 128, "a block of the cache is 128 tokens on CPU"
    assert found["anew"] >= 1


def test_two_workers_of_one_model_answer_the_same_and_take_another_checkpoint(
    host: EngineHost, engines: ForkServer, models: tuple[Path, Path], tmp_path: Path
) -> None:
    requests = [
        request("loglikelihood", "a context " * 15 + str(doc), " yes" * (1 + doc % 3), doc=doc) for doc in range(8)
    ]
    first = values(host.call("run", requests=requests))
    parallel = EngineHost(tmp_path, models[0], engines, tensor_parallel=2)
    try:
        for model in (models[1], models[0]):
            parallel.call("swap", model=str(model))
            found = values(parallel.call("run", requests=requests))
            close = all(found[doc][0] == pytest.approx(first[doc][0], abs=1e-4) for doc in first)
            assert close == (model == models[0])
    finally:
        parallel.close()


def test_what_a_pass_generates_has_room_in_the_cache_in_exact_mode(host: EngineHost) -> None:
    """200 prompts fit into one pass, and what they generate takes 400 blocks of a cache of 256."""
    settings = {"until": [], "max_gen_toks": 110, "do_sample": False}
    requests = [request("generate_until", f"{number:0>30}", settings, doc=number) for number in range(200)]
    assert host.call("put_off", requests=requests) == 0


def test_a_continuation_that_fills_the_window_is_an_error_of_that_request_alone(host: EngineHost) -> None:
    long = "z" * (WINDOW - 1)
    requests = [
        request("loglikelihood", "a", long, doc=1),
        request("loglikelihood", "a", "b", doc=2),
        request("loglikelihood", "   ", "b", doc=3),
        request("loglikelihood", "", "", doc=4),
        request("generate_until", "a", {"until": [], "max_gen_toks": 5, "no_such_setting": 1}, doc=5),
        request("generate_until", "a", {"until": [], "max_gen_toks": WINDOW}, doc=6),
    ]
    answers = {one["id"][2]: one for one in host.call("run", requests=requests)}
    assert answers[2]["error"] is None
    for doc, word in (
        (1, "fills the window"),
        (3, "white space"),
        (4, "both empty"),
        (5, "no_such_setting"),
    ):
        assert word in answers[doc]["error"], answers[doc]
        assert answers[doc]["value"] is None
    assert "continuation_truncated" in answers[1]["flags"]
    assert "budget_exceeds_window" in answers[6]["flags"]


def test_a_continuation_longer_than_the_window_is_scored_in_part_as_lm_eval_does_and_flagged(host: EngineHost) -> None:
    requests = [request("loglikelihood", "abc", "z" * 400, doc=1), request("loglikelihood", "abc", "", doc=2)]
    answers = {one["id"][2]: one for one in host.call("run", requests=requests)}
    assert [answers[1]["value"], answers[2]["value"]] == host.call("stock", requests=requests)
    assert answers[1]["flags"] == ["continuation_truncated"]
    assert answers[2]["flags"] == ["empty_continuation"]
    assert answers[2]["value"] == [0, True]


def test_a_prompt_just_as_long_as_the_window_allows(host: EngineHost) -> None:
    """The window holds prompt and one generated token; one more is cut from the left (E12)."""
    requests = [request("loglikelihood", "c" * (WINDOW - 2 + more), "d", doc=more) for more in (-1, 0, 1)]
    answers = {one["id"][2]: one for one in host.call("run", requests=requests)}
    assert [answers[doc]["prompt_tokens"] for doc in (-1, 0, 1)] == [WINDOW - 2, WINDOW - 1, WINDOW - 1]
    assert [answers[doc]["flags"] for doc in (-1, 0, 1)] == [[], [], ["context_truncated"]]
    generation = [request("generate_until", "c" * WINDOW, {"until": [], "max_gen_toks": WINDOW - 1}, doc=7)]
    (one,) = host.call("run", requests=generation)
    assert one["error"] is None
    assert one["prompt_tokens"] == 1


def test_the_next_checkpoint_is_swapped_in_place(host: EngineHost, models: tuple[Path, Path]) -> None:
    requests = mixed(30, seed=4)
    before = values(host.call("run", requests=requests))
    host.call("swap", model=str(models[1]))
    after = values(host.call("run", requests=requests))
    assert host.call("stock", requests=requests) == [after[one["doc_id"]] for one in requests]
    assert after != before
    host.call("swap", model=str(models[0]))
    assert values(host.call("run", requests=requests)) == before


def test_wrong_weights_are_noticed(host: EngineHost) -> None:
    assert "other weights than the file: model.norm.weight" in host.call("wrong_weights")


def test_another_tokenizer_or_architecture_is_not_swapped_in(
    host: EngineHost, models: tuple[Path, Path], tmp_path: Path
) -> None:
    import json
    import shutil

    other = tmp_path / "other"
    shutil.copytree(models[0], other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<|pad|>", "<|pat|>"))
    assert host.call("why_not", model=str(other)) == "another tokenizer"
    shutil.copytree(models[0], other, dirs_exist_ok=True)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert host.call("why_not", model=str(other)) == "another architecture"
    with pytest.raises(AssertionError, match="cannot be swapped into a running engine: another architecture"):
        host.call("swap", model=str(other))
    assert host.call("run", requests=[request("loglikelihood", "a", "b")])[0]["error"] is None


def test_out_of_memory_halves_the_batch_and_then_is_one_requests_error(host: EngineHost) -> None:
    requests = [request("loglikelihood", "q" * length, "rst", doc=length) for length in range(20, 60)]
    expected = values(host.call("run", requests=requests))
    host.call("starve", tokens=150)
    try:
        assert values(host.call("run", requests=requests)) == expected
        long = request("loglikelihood", "q" * 200, "rst", doc=200)
        answers = {one["id"][2]: one for one in host.call("run", requests=[long, *requests])}
    finally:
        host.call("starve", tokens=None)
    assert "out of memory with a prompt of 203 tokens" in answers[200]["error"]
    assert {doc: one["value"] for doc, one in answers.items() if doc != 200} == expected


def test_it_stops_at_the_next_step_and_is_usable_afterwards(host: EngineHost) -> None:
    requests = [
        request("generate_until", "w" * 20 + str(n), {"until": [], "max_gen_toks": 100}, doc=n) for n in range(8)
    ]
    assert len(host.call("run", requests=requests, stop_after=1)) < 8
    assert len(host.call("run", requests=requests)) == 8


def test_sampling_is_the_same_wherever_it_runs_and_differs_between_repeats(host: EngineHost) -> None:
    """lm-eval leaves the temperature out where a task names none, and vLLM then samples: flagged, and seeded."""
    settings = {"until": [], "max_gen_toks": 30}
    one = request("generate_until", "abc", settings)
    again = one | {"occurrence": 1}
    answers = host.call("run", requests=[one, again])
    texts = {answer["id"][4]: answer["value"] for answer in answers}
    assert texts[0] != texts[1]
    assert all("sampled_by_default" in answer["flags"] for answer in answers)
    assert host.call("run", requests=[again])[0]["value"] == texts[1]


def test_special_tokens_do_not_leak_into_texts(host: EngineHost) -> None:
    """E14: the end token is a stop string whatever the task says, and never part of the text."""
    requests = [
        request("generate_until", f"{n} end", {"max_gen_toks": 120, "until": ["<|end|>"]}, doc=n) for n in range(8)
    ]
    for one in host.call("run", requests=requests):
        assert "<|end|>" not in one["value"]
