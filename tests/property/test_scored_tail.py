"""Which rows of logits are computed for scored prompts, however their prefill is cut into steps."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy
from hypothesis import given
from hypothesis import strategies as st

from evalsched.scored_tail import LEAST_ROWS, SCORED_FROM, lacks_rows, tails

Prompt = tuple[int, int | None, int, list[int]]
"""(length, position of the first scored token or None, tokens in the prefix cache, tokens of each step)."""


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    length = draw(st.integers(2, 60))
    first = draw(st.none() | st.integers(1, length - 1))
    cached = draw(st.just(0) | st.integers(0, length - 1)) if first is not None else 0
    borders = sorted(one for one in draw(st.sets(st.integers(1, length - 1), max_size=4)) if one > cached)
    return length, first, cached, [b - a for a, b in zip([cached, *borders], [*borders, length], strict=True)]


class Runner:
    """What of a model runner is looked at, with the rows that were asked of it: request → (row, place in the batch)."""

    def __init__(self, given: Mapping[str, Prompt]) -> None:
        self.num_prompt_logprobs = dict.fromkeys(given, 1)
        self.input_batch = SimpleNamespace(req_id_to_index={name: index for index, name in enumerate(given)})
        self.query_start_loc = SimpleNamespace(np=numpy.zeros(len(given) + 1, dtype=numpy.int32))
        self.requests = {
            name: SimpleNamespace(
                prompt_token_ids=list(range(length)), num_computed_tokens=cached,
                in_progress_prompt_logprobs_cpu="begun",
                sampling_params=SimpleNamespace(extra_args=None if first is None else {SCORED_FROM: first}),
            )
            for name, (length, first, cached, _) in given.items()
        }  # fmt: skip
        self.rows: dict[str, list[tuple[int, int]]] = {name: [] for name in given}
        self.completed: dict[str, int] = {}


def compute(runner: Any, step: int, scheduled: Mapping[str, int]) -> dict[str, Any]:
    """Rows as vLLM counts them: row i, about token i + 1, for each token of the step but the prompt's last."""
    for name in list(runner.num_prompt_logprobs):
        if name not in scheduled:
            continue
        request = runner.requests[name]
        begin, left = request.num_computed_tokens, len(request.prompt_token_ids) - 1 - request.num_computed_tokens
        if scheduled[name] > left:
            runner.completed[name] = step
            del runner.num_prompt_logprobs[name]
        start = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
        runner.rows[name] += [(begin + one, start + one) for one in range(min(scheduled[name], left))]
    return {}


@given(st.lists(prompts(), min_size=1, max_size=4), st.data())
def test_exactly_the_rows_that_are_read_are_computed_where_they_lie(given: list[Prompt], data: st.DataObject) -> None:
    named = {f"r{number}": prompt for number, prompt in enumerate(given)}
    runner = Runner(named)
    places: dict[str, dict[int, int]] = {name: {} for name in named}
    waiting = {name: list(steps) for name, (*_, steps) in named.items()}
    step = 0
    while any(waiting.values()):
        going = [name for name, steps in waiting.items() if steps]
        chosen = data.draw(st.sets(st.sampled_from(going), min_size=1), label="requests of the step")
        scheduled, at = {}, 0
        for name, index in runner.input_batch.req_id_to_index.items():
            runner.query_start_loc.np[index] = at
            if name in chosen:
                scheduled[name] = waiting[name].pop(0)
                begin = runner.requests[name].num_computed_tokens
                places[name] |= {begin + one: at + one for one in range(scheduled[name])}
                at += scheduled[name]
        before = {name: one.num_computed_tokens for name, one in runner.requests.items()}
        tails(compute, runner, step, scheduled)
        assert {name: one.num_computed_tokens for name, one in runner.requests.items()} == before
        for name, count in scheduled.items():
            runner.requests[name].num_computed_tokens += count
            assert (name in runner.completed) == (not waiting[name]), "ended in the step of its last token"
        step += 1
    for name, (length, first, cached, _) in named.items():
        least = 0 if first is None else max(0, min(first, length - LEAST_ROWS) - 1)
        assert runner.rows[name] == [(row, places[name][row]) for row in range(max(least, cached), length - 1)]


def test_a_row_that_was_not_computed_is_noticed() -> None:
    nan = float("nan")
    computed = [None, {5: nan, 0: nan}, {7: -1.0, 3: -0.5}, {0: -2.0}]
    assert not lacks_rows([4, 5, 7, 0], 2, computed)
    assert lacks_rows([4, 5, 7, 0], 1, computed)
    assert lacks_rows([4, 5, 8, 0], 2, computed), "the row is about no token of the prompt"
    assert lacks_rows([4, 5, 7, 0], 2, [*computed[:3], {0: nan}])
    assert not lacks_rows([4], 0, [None])
