"""Log-probabilities only where something is scored: an extension of vLLM's worker.

A scored request asks for its continuation's tokens; its context is there to be attended to. Asked for the
log-probabilities of a prompt, vLLM computes a row of logits, a soft-max and a rank for each of its tokens, over the
whole vocabulary: two fifths of the time of SmolLM2-135M on CPU with prompts of 120 tokens, and a lot of memory where
the vocabulary is large. Here the rows before the scored ones are left out (they are not a number).

So the beginning of a scored prompt may come from the prefix cache too, which has keys and values and no logits: choices
of one question, few-shot examples of one task are computed once. Where the cache holds scored tokens as well, their
rows are missing (:func:`lacks_rows`), and the prompt is computed again, whole.

vLLM mixes :class:`ScoredTail` into its workers (:mod:`evalsched.engine_extension`), in whatever process they are.
A row's value does not depend on how many rows are computed with it where matrix products are batch-invariant, which
exact mode relies on anyway; some rows more than one are computed always, so that no kernel for one vector is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan, nan
from types import SimpleNamespace
from typing import Any

SCORED_FROM = "planaria_scored_from"
"""Key in ``SamplingParams.extra_args``: position of the first token whose log-probability is needed."""
LEAST_ROWS = 16

Compute = Callable[[Any, Any, Mapping[str, int]], dict[str, Any]]
"""``_get_prompt_logprobs_dict`` of a model runner: (runner, hidden states, tokens scheduled by request)."""


class ScoredTail:
    """What the worker gets."""

    model_runner: Any

    def score_tails_only(self) -> bool:
        """From now on leave out what nobody reads; False where this vLLM does not compute it the way that is known."""
        runner = self.model_runner
        compute: Compute | None = getattr(type(runner), "_get_prompt_logprobs_dict", None)
        if compute is None:
            return False
        runner._get_prompt_logprobs_dict = partial(tails, compute, runner)
        return True


def tails(compute: Compute, runner: Any, hidden_states: Any, scheduled: Mapping[str, int]) -> dict[str, Any]:
    """``compute`` with the first rows of each request left out: to it they are computed already."""
    left_out = {name: rows for name in runner.num_prompt_logprobs if (rows := _unread(runner, name, scheduled)) >= 0}
    starts = runner.query_start_loc.np.copy()
    for name, rows in left_out.items():
        starts[runner.input_batch.req_id_to_index[name]] += rows
        runner.requests[name].num_computed_tokens += rows
        _blank(runner.requests[name], runner.num_prompt_logprobs[name])
    try:
        return compute(_Later(runner, starts), hidden_states, {n: c - left_out.get(n, 0) for n, c in scheduled.items()})
    finally:
        for name, rows in left_out.items():
            runner.requests[name].num_computed_tokens -= rows


def _unread(runner: Any, name: str, scheduled: Mapping[str, int]) -> int:
    """How many of the rows that this step would compute for a request nobody reads; -1: the request is not ours."""
    request = runner.requests[name]
    first = (request.sampling_params.extra_args or {}).get(SCORED_FROM)
    if first is None or name not in scheduled or request.prompt_token_ids is None:
        return -1
    needed = min(first, len(request.prompt_token_ids) - LEAST_ROWS) - 1  # row i is about token i + 1
    return int(min(scheduled[name], max(0, needed - request.num_computed_tokens)))


def lacks_rows(tokens: Sequence[int], first: int, entries: Sequence[Mapping[int, float] | None]) -> bool:
    """Whether a log-probability from position ``first`` on was not computed: it was in the prefix cache."""
    read = zip(tokens[first:], entries[first:], strict=True)
    return any(entry is not None and isnan(entry.get(token, nan)) for token, entry in read)


def _blank(request: Any, count: int) -> None:
    """Not-a-number instead of uninitialized memory, before the first row is written."""
    from vllm.v1.outputs import LogprobsTensors

    if request.in_progress_prompt_logprobs_cpu is None:
        held = LogprobsTensors.empty_cpu(len(request.prompt_token_ids) - 1, count + 1)
        held.logprob_token_ids.zero_()
        held.logprobs.fill_(nan)
        held.selected_token_ranks.zero_()
        request.in_progress_prompt_logprobs_cpu = held


class _Later:
    """A model runner whose requests begin later in the batch."""

    def __init__(self, runner: Any, starts: Any) -> None:
        self._runner = runner
        self.query_start_loc = SimpleNamespace(np=starts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
