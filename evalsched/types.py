"""What passes through the evaluation scheduler: settings, requests, responses, shards, trials and their keys.

Plain frozen dataclasses with a JSON form each; no lm-eval, no engine and no database here, so that every
part of the room (and the simulator) can import them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import xxhash

from planner.events import TrialState

RequestType = Literal["loglikelihood", "loglikelihood_rolling", "generate_until"]
REQUEST_TYPES: tuple[RequestType, ...] = ("loglikelihood", "loglikelihood_rolling", "generate_until")

Value: TypeAlias = tuple[float, bool] | float | str
"""An answer: ``(log-probability, is greedy)`` | log-probability of a whole text | generated text."""

UNKNOWN_TOKENS = -1


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no spaces, text as it is (surrogates escaped, so that it encodes)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def digest_of(value: Any) -> str:
    """xxh3-128 of a JSON value's canonical spelling, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value).encode())


# ---------------------------------------------------------------- what is asked for


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """How a set of tasks is evaluated: everything that decides requests and scores except the model.

    Field names are those of ``lm_eval.simple_evaluate`` where it has them, and mean the same.
    """

    tasks: tuple[str, ...]
    """Task, group and tag names, or paths of YAML files; a name given twice counts once."""
    limit: float | None = None
    """Documents per task: below 1 a fraction of each task, from 1 on a count; None: all."""
    samples: Mapping[str, tuple[int, ...]] | None = None
    """Document ids per task, instead of ``limit``."""
    num_fewshot: int | None = None
    include_path: tuple[str, ...] = ()
    """Folders with further task files, absolute. The tasks shipped and prepared are always found."""
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool = False
    gen_kwargs: Mapping[str, Any] | None = None
    random_seed: int = 0
    numpy_random_seed: int = 1234
    torch_random_seed: int = 1234
    fewshot_random_seed: int = 1234
    bootstrap_iters: int = 100_000
    predict_only: bool = False
    strict: bool = True
    """Flag what lm-eval scores wrongly in silence and keep it out of the results; False: lm-eval's number."""
    exact: bool = False
    """Responses bitwise independent of the batch that they were computed in."""
    allow_unsafe_code: bool = False
    """Accept code-execution metrics where the sandbox's kernel features are missing."""

    def __post_init__(self) -> None:
        # 6 and 6.0 are one limit: spelt alike, they lead to one key in the ledger, whoever asks.
        if isinstance(self.limit, int) and not isinstance(self.limit, bool):
            object.__setattr__(self, "limit", float(self.limit))

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal value."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EvalSettings:
        """The settings that :meth:`to_json` wrote."""
        own = dict(data)
        own["tasks"] = tuple(own["tasks"])
        own["include_path"] = tuple(own.get("include_path", ()))
        if own.get("samples") is not None:
            own["samples"] = {name: tuple(ids) for name, ids in own["samples"].items()}
        return cls(**own)


@dataclass(frozen=True, kw_only=True)
class Window:
    """The lengths an engine works with, in tokens."""

    max_length: int
    """Prompt and generated tokens together (vLLM's ``max_model_len``)."""
    max_gen_toks: int = 256
    """Tokens generated where the task names no number."""


# ---------------------------------------------------------------- requests and responses


class RequestId(NamedTuple):
    """The identity of a request within a recording; ``occurrence`` counts repeats of the first four."""

    request_type: str
    task: str
    doc_id: int
    idx: int
    occurrence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One lm-eval instance, as the model is to answer it."""

    request_type: RequestType
    task: str
    doc_id: int
    idx: int
    """Which of the document's requests (the choice, for multiple choice)."""
    occurrence: int
    """0 for the first of its (type, task, doc_id, idx); 1, 2, … for repeats."""
    arguments: tuple[Any, ...]
    """``(context, continuation)`` | ``(text,)`` | ``(context, generation settings)``, JSON values all."""
    context_tokens: int = UNKNOWN_TOKENS
    """Tokens of the context with its special tokens, untruncated (for rolling: of the whole text)."""
    continuation_tokens: int = UNKNOWN_TOKENS
    """Tokens of the continuation; for generation the budget of new tokens."""
    digest: str = ""
    """xxh3-128 of request type and arguments: equal for equal work, whatever task it stands in."""

    @property
    def id(self) -> RequestId:
        """The identity under which the answer is kept."""
        return RequestId(self.request_type, self.task, self.doc_id, self.idx, self.occurrence)

    @property
    def context(self) -> str:
        """The first argument: the prompt's text."""
        return str(self.arguments[0])

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal value."""
        return {  # spelled out: a million of them pass through here
            "request_type": self.request_type,
            "task": self.task,
            "doc_id": self.doc_id,
            "idx": self.idx,
            "occurrence": self.occurrence,
            "arguments": list(self.arguments),
            "context_tokens": self.context_tokens,
            "continuation_tokens": self.continuation_tokens,
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """The request that :meth:`to_json` wrote."""
        return cls(
            request_type=data["request_type"],
            task=data["task"],
            doc_id=data["doc_id"],
            idx=data["idx"],
            occurrence=data["occurrence"],
            arguments=tuple(data["arguments"]),
            context_tokens=data["context_tokens"],
            continuation_tokens=data["continuation_tokens"],
            digest=data["digest"],
        )


def request_digest(request_type: str, arguments: Iterable[Any]) -> str:
    """The digest of a request's work."""
    return digest_of([request_type, list(arguments)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The answer to one request.

    ``value`` is None only where ``error`` says why this request alone could not be answered.
    """

    id: RequestId
    value: Value | None
    prompt_tokens: int = 0
    """Tokens sent to the engine, after truncation (summed over windows for rolling)."""
    generated_tokens: int = 0
    flags: tuple[str, ...] = ()
    """Values of :class:`evalsched.strictness.FlagKind` that the engine saw for itself."""
    error: str | None = None
    seconds: float = 0.0
    """This request's share of its batch's time."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal value."""
        return {
            "id": list(self.id),
            "value": list(self.value) if isinstance(self.value, tuple) else self.value,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "flags": list(self.flags),
            "error": self.error,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Response:
        """The response that :meth:`to_json` wrote.

        Raises:
            ValueError: the value has not the shape that the request type needs.
        """
        identity = RequestId(*data["id"])
        value, error = checked_value(identity.request_type, data.get("value")), data.get("error")
        if value is None and not error:
            raise ValueError(f"{identity}: neither a value nor an error")
        return cls(
            id=identity,
            value=value,
            prompt_tokens=data.get("prompt_tokens", 0),
            generated_tokens=data.get("generated_tokens", 0),
            flags=tuple(data.get("flags", ())),
            error=error,
            seconds=data.get("seconds", 0.0),
        )


def _number(value: Any) -> float:
    """A number as it came: lm-eval's score of an empty continuation is the integer 0, and its samples say so."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number")
    return value


def checked_value(request_type: str, value: Any) -> Value | None:
    """``value`` in the shape that ``request_type`` needs (None passes).

    Raises:
        ValueError: it has another shape, or the request type is unknown.
    """
    if value is None:
        return None
    if request_type == "loglikelihood":
        if isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[1], bool):
            return (_number(value[0]), value[1])
    elif request_type == "loglikelihood_rolling":
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
    elif request_type == "generate_until" and isinstance(value, str):
        return value
    raise ValueError(f"{value!r} is no answer to a {request_type!r} request")


# ---------------------------------------------------------------- shards


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A group of requests of one checkpoint that one worker runs at one go; tasks may mix."""

    id: str
    """Digest of its requests' identities: the same cut gives the same ids, so attempts can be counted."""
    requests: tuple[Request, ...]
    seconds: float
    """Estimated run time on one slot, without loading the model."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that it has requests of, sorted."""
        return tuple(sorted({request.task for request in self.requests}))

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal value."""
        return {"id": self.id, "seconds": self.seconds, "requests": [request.to_json() for request in self.requests]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Shard:
        """The shard that :meth:`to_json` wrote."""
        requests = tuple(Request.from_json(request) for request in data["requests"])
        return cls(id=data["id"], seconds=data["seconds"], requests=requests)


# ---------------------------------------------------------------- trials


@dataclass(frozen=True, kw_only=True)
class TrialKey:
    """Everything that a trial's answers depend on. Equal keys: equal answers, so nothing is run again."""

    model: str
    """Digest of weights and model configuration (:func:`evalsched.digests.model_digest`)."""
    tokenizer: str
    task: str
    """The task's name."""
    requests: str
    """Digest of the task's recorded requests: configuration, data, few-shot seed, limit, chat template, all of it."""
    settings: str
    """Digest of what else decides scores (generation settings, seeds, strictness, task configuration)."""
    engine: Mapping[str, str] = field(default_factory=dict)
    """Name, versions and pins of the engine (dtype, exactness, window …)."""

    @property
    def digest(self) -> str:
        """The key in 32 hex digits."""
        return digest_of(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One checkpoint on one task."""

    id: int
    """Number in the ledger."""
    key: str
    """Digest of its :class:`TrialKey`."""
    task: str
    model_path: str
    job: str | None
    step: int | None
    state: TrialState
    reason: str
    requests: int
    """How many requests the task has."""
    responses: int
    """How many of them are answered."""
    created: float
    updated: float
