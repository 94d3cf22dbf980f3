"""From lm-eval's requests to token prompts, exactly as lm-eval 0.4.13's vLLM class makes them.

The rules that are free functions in lm-eval are called there (``lm_eval.models.utils``, ``lm_eval.utils``); what
its class does by itself (``lm_eval/models/vllm_causallms.py`` and ``TemplateLM`` in ``lm_eval/api/model.py``) is
repeated here, apart from the engine, so that it can be compared with the original without loading a model.

Where the original would crash, or would send something that the engine refuses, :class:`Encoded` carries an
error for that request alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    maybe_truncate,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from evalsched.strictness import FlagKind, bos_flags, generation_flags, scoring_flags
from evalsched.types import Request, Value, Window

_HUGE = 1 << 30


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as it is sent to the engine."""

    tokens: tuple[int, ...]
    scored_from: int = 0
    """Index of the first scored token, as a Python slice start: lm-eval lets it be negative (cut continuation)."""
    sampling: Mapping[str, Any] | None = None
    """Sampling parameters of a generation; None: the prompt is scored."""

    @property
    def new_tokens(self) -> int:
        """Most tokens that the engine generates for it."""
        return 1 if self.sampling is None else int(self.sampling["max_tokens"])


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request as prompts: one, several windows for a rolling request, none where ``error`` is set."""

    request: Request
    prompts: tuple[Prompt, ...] = ()
    until: tuple[str, ...] = ()
    """Stop strings that are cut from a generated text afterwards."""
    flags: tuple[str, ...] = ()
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens sent to the engine."""
        return sum(len(prompt.tokens) for prompt in self.prompts)


@dataclass(kw_only=True)
class Encoder:
    """Turns requests into prompts with one tokenizer and one window.

    ``tokenizer`` is a Hugging Face tokenizer. lm-eval's ``prefix_token_id``: the BOS token, else EOS.
    """

    tokenizer: Any
    window: Window
    prefix_token: int = field(init=False)
    prefix_text: str = field(init=False)
    eos_text: str = field(init=False)
    adds_bos: bool = field(init=False)

    def __post_init__(self) -> None:
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if bos is None and eos is None:
            raise ValueError("the tokenizer has neither a BOS nor an EOS token; lm-eval's scoring needs one of them")
        self.prefix_token = eos if bos is None else bos
        self.prefix_text = self.tokenizer.decode(self.prefix_token)
        self.eos_text = "" if eos is None else (self.tokenizer.decode(eos) or self.tokenizer.eos_token or "")
        first = self.tokenizer("a", return_attention_mask=False).input_ids[:1]
        self.adds_bos = bos is not None and list(first) == [bos]

    def tokens(self, text: str, special: bool | None = None) -> list[int]:
        """Token ids of ``text``; no second BOS where the text already begins with it."""
        if not text:
            return []
        kwargs: dict[str, Any] = {} if special is None else {"add_special_tokens": special}
        if has_bos_prefix(text, self.prefix_text):
            kwargs["add_special_tokens"] = False
        return list(self.tokenizer(text, return_attention_mask=False, **kwargs).input_ids)

    def encode(self, request: Request) -> Encoded:
        """``request`` as prompts; never raises for what is wrong with the request itself."""
        try:
            if request.request_type == "loglikelihood":
                return self._score(request)
            if request.request_type == "loglikelihood_rolling":
                return self._rolling(request)
            if request.request_type == "generate_until":
                return self._generate(request)
        except (ValueError, TypeError, AttributeError, IndexError, AssertionError) as error:
            return Encoded(request, error=f"the request cannot be encoded: {type(error).__name__}: {error}")
        return Encoded(request, error=f"request type {request.request_type!r} is not supported by this engine")

    # ------------------------------------------------------------------ scored continuations

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of context and continuation, cut where lm-eval cuts them (``_encode_pair``).

        Raises:
            ValueError: both are empty.
        """
        if context == "":
            tokens = self.tokens(continuation, special=False)
            if not tokens:
                raise ValueError("context and continuation are both empty: there is nothing to score")
            if tokens[0] == self.prefix_token:
                return tokens[:1], tokens[1:]
            return [self.prefix_token], tokens
        spaces = len(context) - len(context.rstrip())
        if spaces > 0:
            continuation = context[-spaces:] + continuation
            context = context[:-spaces]
        whole = self.tokens(context + continuation)
        before = self.tokens(context)
        return before, whole[len(before) :]

    def scored(self, context: Sequence[int], continuation: Sequence[int]) -> Prompt:
        """The prompt that scores ``continuation``; cut from the left to leave room for one generated token."""
        longest = self.window.max_length - 1
        whole = [*context, *continuation]
        start = len(context) - max(0, len(whole) - longest)
        return Prompt(tuple(whole[-longest:]), scored_from=start)

    def _score(self, request: Request) -> Encoded:
        context, continuation = self.pair(str(request.arguments[0]), str(request.arguments[1]))
        prompt = self.scored(context, continuation)
        kinds = scoring_flags(len(context), len(continuation), self.window)
        if request.arguments[0]:  # an empty context is begun with one BOS by the rule above
            kinds = kinds + self._bos(context)
        if not context:
            return Encoded(
                request,
                flags=_names(kinds),
                error="the context is white space only, which leaves no token to condition on (lm-eval crashes here)",
            )
        if error := self._unscorable(prompt):
            return Encoded(request, flags=_names(kinds), error=error)
        return Encoded(request, (prompt,), flags=_names(kinds))

    def _bos(self, tokens: Sequence[int]) -> list[FlagKind]:
        return bos_flags(tokens[:2], self.tokenizer.bos_token_id, self.adds_bos)

    def _unscorable(self, prompt: Prompt) -> str | None:
        if not prompt.tokens:
            return "the prompt has no tokens"
        if prompt.scored_from == 0:
            return (
                f"the continuation fills the window of {self.window.max_length} tokens: no token is left before it "
                "to condition on (lm-eval crashes here)"
            )
        return None

    def _rolling(self, request: Request) -> Encoded:
        windows = get_rolling_token_windows(
            token_list=self.tokens(str(request.arguments[0])),
            prefix_token=self.prefix_token,
            max_seq_len=self.window.max_length - 2,
            context_len=1,
        )
        prompts = tuple(self.scored(*make_disjoint_window(window)) for window in windows)
        for prompt in prompts:
            if error := self._unscorable(prompt):
                return Encoded(request, error=error)
        return Encoded(request, prompts)

    # ------------------------------------------------------------------ generation

    def _generate(self, request: Request) -> Encoded:
        context, settings = str(request.arguments[0]), request.arguments[1]
        if not isinstance(settings, Mapping):
            raise TypeError(f"generation settings must be a mapping, found {type(settings).__name__}")
        sampling, until, budget = self.generation_settings(dict(settings))
        whole = self.tokens(context)
        kinds = generation_flags(len(whole), budget, self.window) + self._bos(whole)
        if "temperature" not in sampling:
            kinds.append(FlagKind.SAMPLED_BY_DEFAULT)
        flags = _names(kinds)
        tokens, budget = maybe_truncate(
            whole,
            max_gen_toks=budget,
            max_model_len=self.window.max_length,
            side="left",
            verbose=False,
        )
        error = None
        if not tokens:
            error = "the prompt has no tokens after truncation" if context else "the prompt is empty"
        elif len(tokens) >= self.window.max_length:
            error = (
                f"the prompt of {len(tokens)} tokens does not fit into the window of {self.window.max_length} together "
                f"with one new token (max_gen_toks {budget}); give the task a smaller max_gen_toks"
            )
        elif budget < 1:
            error = f"max_gen_toks {budget} leaves nothing to generate"
        if error:
            return Encoded(request, flags=flags, error=error)
        if float(sampling.get("temperature", 1.0)) > 0 and "seed" not in sampling:
            sampling["seed"] = sampling_seed(request)
        prompt = Prompt(tuple(tokens), sampling={**sampling, "max_tokens": budget, "stop": list(until)})
        return Encoded(request, (prompt,), until=tuple(until), flags=flags)

    def generation_settings(self, settings: dict[str, Any]) -> tuple[dict[str, Any], list[str], int]:
        """(sampling parameters, stop strings, most new tokens) of a request's settings (``modify_gen_kwargs``)."""
        own: dict[str, Any] = dict(normalize_gen_kwargs(settings, default_max_gen_toks=self.window.max_gen_toks))
        until = handle_stop_sequences(own.pop("until", None), eos=self.eos_text)
        budget = int(own.pop("max_gen_toks", self.window.max_gen_toks))
        own.pop("do_sample", None)
        return {"skip_special_tokens": False, "spaces_between_special_tokens": False} | own, until, budget


def _names(kinds: Sequence[FlagKind]) -> tuple[str, ...]:
    return tuple(kind.value for kind in dict.fromkeys(kinds))


def sampling_seed(request: Request) -> int:
    """Seed of a sampled generation: the same wherever and whenever it runs, another for each repeat.

    lm-eval draws from one stream over all requests, which cannot be cut into shards; only its greedy
    generations can be equal to ours.
    """
    identity = repr((request.task, request.doc_id, request.idx, request.occurrence, request.digest)).encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "big") % _HUGE


# ---------------------------------------------------------------------- from outputs to values


def score_of(prompt: Prompt, logprobs: Sequence[Mapping[int, float] | None]) -> tuple[float, bool]:
    """(log-probability, is greedy) of a scored prompt (``_parse_logprobs``).

    ``logprobs`` has one entry per prompt token: the log-probability of that token first, then of the most
    probable one; None for the first token, which nothing stands before.
    """
    scored = list(zip(prompt.tokens[prompt.scored_from :], logprobs[prompt.scored_from :], strict=True))
    total = sum(_logprob(token, entry) for token, entry in scored)
    greedy = all(entry is None or max(entry, key=lambda one: entry[one]) == token for token, entry in scored)
    return total, greedy


def _logprob(token: int, entry: Mapping[int, float] | None) -> float:
    if entry is None:
        raise ValueError("the first token of a prompt has no log-probability")
    return entry[token]


def text_of(encoded: Encoded, generated: str) -> str:
    """A generated text without what follows a stop string (``postprocess_generated_text``)."""
    return str(postprocess_generated_text(generated, list(encoded.until), None))


def value_of(encoded: Encoded, results: Sequence[tuple[float, bool] | str]) -> Value:
    """The answer to a request from its prompts' results, in order."""
    kind = encoded.request.request_type
    if kind == "loglikelihood_rolling":
        return sum(result[0] for result in results if not isinstance(result, str))
    return results[0]
