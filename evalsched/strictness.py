"""What lm-eval scores wrongly in silence, told by name of task, document and choice.

Pure. The recording sees texts, the engine sees tokens: both report :class:`FlagKind` values, and
:func:`collect` brings them together. In strict mode a document with an *untrusted* flag stays out of the
results and is shown apart; in compat mode lm-eval's number stands and the flag is a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from evalsched.types import Request, RequestId, Response, Window


class FlagKind(StrEnum):
    """Kinds of finding. :data:`UNTRUSTED` lists those whose verdict must not be believed."""

    EMPTY_CONTINUATION = "empty_continuation"
    EMPTY_REQUEST = "empty_request"
    EMPTY_TEXT = "empty_text"
    EMPTY_PROMPT = "empty_prompt"
    CONTINUATION_TRUNCATED = "continuation_truncated"
    PROMPT_FILLS_WINDOW = "prompt_fills_window"
    BUDGET_EXCEEDS_WINDOW = "budget_exceeds_window"
    NO_ANSWER = "no_answer"
    CONTEXT_TRUNCATED = "context_truncated"
    BUDGET_CUT = "budget_cut"
    BLANK_CONTINUATION = "blank_continuation"
    DOUBLE_BOS = "double_bos"
    MISSING_BOS = "missing_bos"
    SAME_CHOICES = "same_choices"
    SPECIAL_TOKEN_IN_OUTPUT = "special_token_in_output"
    SAMPLED_BY_DEFAULT = "sampled_by_default"


UNTRUSTED = frozenset(
    {
        FlagKind.EMPTY_CONTINUATION,
        FlagKind.EMPTY_REQUEST,
        FlagKind.EMPTY_TEXT,
        FlagKind.EMPTY_PROMPT,
        FlagKind.CONTINUATION_TRUNCATED,
        FlagKind.PROMPT_FILLS_WINDOW,
        FlagKind.BUDGET_EXCEEDS_WINDOW,
        FlagKind.NO_ANSWER,
        FlagKind.DOUBLE_BOS,
    }
)

EXPLANATIONS: Mapping[FlagKind, str] = {
    FlagKind.EMPTY_CONTINUATION: "the continuation has no token, so it scores (0, True) and wins against every other",
    FlagKind.EMPTY_REQUEST: "context and continuation are both empty: there is nothing to score",
    FlagKind.EMPTY_TEXT: "the text is empty: its log-likelihood is 0 whatever the model",
    FlagKind.EMPTY_PROMPT: "the prompt has no token: there is nothing to continue",
    FlagKind.CONTINUATION_TRUNCATED: "the continuation is as long as the window or longer, so it is scored in part",
    FlagKind.PROMPT_FILLS_WINDOW: "the prompt fills the window, no room is left for a new token",
    FlagKind.BUDGET_EXCEEDS_WINDOW: "the budget of new tokens fills the window, no room is left for the prompt",
    FlagKind.NO_ANSWER: "the engine could not answer this request",
    FlagKind.CONTEXT_TRUNCATED: "the context was cut from the left to fit the window",
    FlagKind.BUDGET_CUT: "fewer new tokens than the task asks for fit the window beside the prompt",
    FlagKind.BLANK_CONTINUATION: "the continuation is white space only",
    FlagKind.DOUBLE_BOS: "the prompt begins with two begin-of-text tokens",
    FlagKind.MISSING_BOS: "the tokenizer has a begin-of-text token and the prompt does not begin with it",
    FlagKind.SAME_CHOICES: "two choices of the document are the same text, so the first always wins the tie",
    FlagKind.SPECIAL_TOKEN_IN_OUTPUT: "the generated text contains a special token's text",
    FlagKind.SAMPLED_BY_DEFAULT: "the task names neither do_sample nor temperature, so vLLM's default samples at 1.0",
}


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One finding about one request."""

    kind: FlagKind
    task: str
    doc_id: int
    choice: int
    """The request's index within its document."""
    detail: str

    @property
    def untrusted(self) -> bool:
        """Whether the document's verdict must not be believed."""
        return self.kind in UNTRUSTED

    def line(self) -> str:
        """One line naming task, document and choice."""
        return f"{self.task}: document {self.doc_id}, choice {self.choice}: {self.kind}: {self.detail}"

    def to_json(self) -> dict[str, Any]:
        """The shape of ``planaria.flags`` in the results."""
        return {
            "kind": self.kind.value,
            "task": self.task,
            "doc_id": self.doc_id,
            "choice": self.choice,
            "untrusted": self.untrusted,
            "detail": self.detail,
        }


def text_flags(request: Request) -> list[FlagKind]:
    """What a request's text alone tells."""
    if request.request_type == "loglikelihood":
        context, continuation = str(request.arguments[0]), str(request.arguments[1])
        if not continuation:
            return [FlagKind.EMPTY_CONTINUATION if context else FlagKind.EMPTY_REQUEST]
        return [FlagKind.BLANK_CONTINUATION] if not continuation.strip() else []
    if request.request_type == "loglikelihood_rolling":
        return [] if request.context else [FlagKind.EMPTY_TEXT]
    return [] if request.context else [FlagKind.EMPTY_PROMPT]


def scoring_flags(context_tokens: int, continuation_tokens: int, window: Window) -> list[FlagKind]:
    """What the token counts of a ``loglikelihood`` request tell (untruncated counts, special tokens included).

    vLLM needs one token of its window for generation, so ``max_length - 1`` are left for the prompt, and
    the first token of a prompt has no log-probability: a continuation must be shorter than that.
    """
    room = window.max_length - 1
    if continuation_tokens == 0:
        return [FlagKind.EMPTY_CONTINUATION]
    if continuation_tokens >= room:
        return [FlagKind.CONTINUATION_TRUNCATED]
    return [FlagKind.CONTEXT_TRUNCATED] if context_tokens + continuation_tokens > room else []


def generation_flags(prompt_tokens: int, budget: int, window: Window) -> list[FlagKind]:
    """What the token counts of a ``generate_until`` request tell."""
    if prompt_tokens == 0:
        return [FlagKind.EMPTY_PROMPT]
    if budget >= window.max_length:
        return [FlagKind.BUDGET_EXCEEDS_WINDOW]
    if prompt_tokens + budget > window.max_length:
        return [FlagKind.CONTEXT_TRUNCATED]
    return []


def bos_flags(ids: Sequence[int], bos: int | None, adds_bos: bool) -> list[FlagKind]:
    """What the first tokens of a prompt tell; ``adds_bos``: this tokenizer puts one before a text by itself."""
    if bos is None or not ids:
        return []
    if len(ids) > 1 and ids[0] == bos and ids[1] == bos:
        return [FlagKind.DOUBLE_BOS]
    return [FlagKind.MISSING_BOS] if adds_bos and ids[0] != bos else []


def choice_flags(requests: Iterable[Request]) -> list[tuple[RequestId, FlagKind]]:
    """Documents two of whose scored continuations (after the same context) are the same text."""
    seen: dict[tuple[str, int, int, str, str], int] = {}
    found: list[tuple[RequestId, FlagKind]] = []
    for request in requests:
        if request.request_type != "loglikelihood":
            continue
        key = (request.task, request.doc_id, request.occurrence, str(request.arguments[0]), str(request.arguments[1]))
        if seen.setdefault(key, request.idx) != request.idx:
            found.append((request.id, FlagKind.SAME_CHOICES))
    return found


def collect(requests: Sequence[Request], responses: Mapping[RequestId, Response]) -> list[Flag]:
    """All findings about the requests of a run, each once, in request order."""
    same = dict(choice_flags(requests))
    flags: list[Flag] = []
    for request in requests:
        kinds = dict.fromkeys(text_flags(request))
        if request.id in same:
            kinds[same[request.id]] = None
        response = responses.get(request.id)
        details: dict[FlagKind, str] = {}
        if response is not None:
            kinds.update(dict.fromkeys(FlagKind(name) for name in response.flags))
            if response.error is not None:
                kinds[FlagKind.NO_ANSWER] = None
                details[FlagKind.NO_ANSWER] = response.error
        flags.extend(_flag(kind, request, details.get(kind)) for kind in _strongest(kinds))
    return flags


def _strongest(kinds: Iterable[FlagKind]) -> list[FlagKind]:
    """Without the findings that a stronger one includes."""
    found = list(kinds)
    if FlagKind.EMPTY_REQUEST in found:
        found = [kind for kind in found if kind != FlagKind.EMPTY_CONTINUATION]
    if FlagKind.EMPTY_CONTINUATION in found:
        found = [kind for kind in found if kind != FlagKind.BLANK_CONTINUATION]
    return found


def _flag(kind: FlagKind, request: Request, detail: str | None) -> Flag:
    text = EXPLANATIONS[kind] + (f" ({detail})" if detail else "")
    return Flag(kind=kind, task=request.task, doc_id=request.doc_id, choice=request.idx, detail=text)


def untrusted_documents(flags: Iterable[Flag]) -> dict[str, list[int]]:
    """Documents per task whose verdict must not be believed, sorted."""
    found: dict[str, set[int]] = {}
    for flag in flags:
        if flag.untrusted:
            found.setdefault(flag.task, set()).add(flag.doc_id)
    return {task: sorted(ids) for task, ids in sorted(found.items())}
