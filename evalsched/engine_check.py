"""Proofs about an engine: that it holds the weights it should, and how far its answers depend on their batch.

The first runs after every load and swap; the second (case E10) re-runs a sample of requests one by one and
says by how much answers differ and whose verdict would flip.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evalsched.models import ModelFacts
from evalsched.types import Request, RequestId, Response

if TYPE_CHECKING:
    from evalsched.engine import VllmEngine

SMALL_MODEL = 400 << 20
"""Bytes of weights up to which a whole forward pass by transformers is the proof."""
PROBE = "Planaria regrows from any piece of itself."
_ROWS = 4
_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.3, "float16": 0.1}
"""Of one token's log-probability, absolute; errors of several tokens add up like a random walk."""
_RELATIVE = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.005}
"""Of the whole: a run that diverged has large logits, and rounding grows with them (some units of the type's last
place; a judgement, unverified beyond the models of the tests)."""


# ---------------------------------------------------------------------- the weights are the right ones


def verify_weights(engine: VllmEngine, *, probe: bool = True) -> None:
    """Compare the engine with the files it should hold, by a route that does not pass through it.

    Values of tensors are compared with the safetensors file itself, bit for bit; one known log-probability is
    compared with that of a forward pass by transformers where the model is small enough and ``probe`` is set, or no
    tensor could be compared.

    Raises:
        EngineError: they differ; the engine must not answer.
    """
    from evalsched.engine import EngineError

    compared, wrong = _compare_tensors(engine)
    if wrong:
        raise EngineError(f"{engine.facts.folder}: the engine holds other weights than the file: {wrong}")
    probed = False
    small = engine.facts.weight_bytes <= SMALL_MODEL and engine.settings.tensor_parallel == 1
    if small and (probe or not compared):
        _check_probe(engine)
        probed = True
    if not compared and not probed:
        raise EngineError(f"{engine.facts.folder}: nothing could be compared, so the swap is not proved")


def _compare_tensors(engine: VllmEngine) -> tuple[int, str | None]:
    """(how many tensors were compared, the first that differs), on up to 8 tensors spread over the model."""
    from safetensors import safe_open

    compared = 0
    for path in engine.facts.weight_files():
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, framework="pt") as stream:
            for name in _spread(sorted(stream.keys()), 24):
                held = engine.first_rows(name, _ROWS)
                slice_ = stream.get_slice(name)
                if held is None or list(held[0]) != list(slice_.get_shape()):
                    continue
                rows = held[1]
                if not bool((rows == slice_[: len(rows)].to(rows.dtype)).all()):
                    return compared, name
                compared += 1
                if compared >= 8:
                    return compared, None
    return compared, None


def _spread(names: Sequence[str], count: int) -> list[str]:
    step = max(1, len(names) // count)
    return list(names[::step])


def _check_probe(engine: VllmEngine) -> None:
    from evalsched.engine import EngineError

    tokens = _probe_tokens(engine)
    ours = sum(engine.score_tokens(tokens))
    theirs = reference_logprob(engine.facts, tokens, engine.dtype)
    tolerance = _TOLERANCE[engine.dtype] * math.sqrt(len(tokens)) + _RELATIVE[engine.dtype] * abs(theirs)
    if not math.isfinite(ours) or abs(ours - theirs) > tolerance:
        raise EngineError(
            f"{engine.facts.folder}: the probe's log-probability is {ours:.6f} in the engine and {theirs:.6f} by "
            f"transformers (tolerance {tolerance:.4f}): the engine does not hold this checkpoint"
        )


def _probe_tokens(engine: VllmEngine) -> list[int]:
    tokens = [engine.encoder.prefix_token, *engine.encoder.tokens(PROBE, special=False)]
    return tokens[: min(8, engine.window.max_length - 1)]


def reference_logprob(facts: ModelFacts, tokens: Sequence[int], dtype: str) -> float:
    """Log-probability of ``tokens[1:]`` by a forward pass of transformers on CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(facts.folder), dtype=getattr(torch, dtype), local_files_only=True
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([list(tokens)])).logits[0].float()
    table = torch.log_softmax(logits[:-1], dim=-1)
    return float(table.gather(1, torch.tensor(list(tokens[1:]))[:, None]).sum())


# ---------------------------------------------------------------------- dependence on the batch (E10)


@dataclass(frozen=True, kw_only=True)
class BatchCheck:
    """What a re-run of a sample of requests, one at a time, found."""

    checked: int
    largest_difference: float
    """Of log-probabilities, absolute."""
    different: int
    """Requests whose answer is not bitwise the same."""
    changed_texts: tuple[str, ...]
    flipped: tuple[str, ...]
    """Documents whose verdict would flip, as ``task/doc_id``."""

    def to_json(self) -> dict[str, Any]:
        """The shape of ``planaria.batch_check`` in the results."""
        return asdict(self)


def sample_documents(requests: Sequence[Request], count: int, seed: int = 0) -> list[Request]:
    """All requests of a random sample of documents, about ``count`` requests, so that verdicts can be compared."""
    order = sorted({(request.task, request.doc_id) for request in requests})
    random.Random(seed).shuffle(order)
    documents: dict[tuple[str, int], list[Request]] = {key: [] for key in order[:count]}  # each has one at least
    for request in requests:
        if (found := documents.get((request.task, request.doc_id))) is not None:
            found.append(request)
    chosen: list[Request] = []
    for found in documents.values():
        if len(chosen) >= count:
            break
        chosen.extend(found)
    return chosen


def choice_lengths(requests: Iterable[Request]) -> dict[RequestId, int]:
    """Letters of each scored continuation without its leading space: what ``acc_norm`` divides by."""
    return {one.id: len(str(one.arguments[1]).lstrip()) for one in requests if one.request_type == "loglikelihood"}


def compare_responses(
    first: Mapping[RequestId, Response], again: Iterable[Response], lengths: Mapping[RequestId, int] | None = None
) -> BatchCheck:
    """How the answers in ``again`` differ from those in ``first``.

    With ``lengths`` (:func:`choice_lengths`) a document flips too where only the choice that is best per letter does.
    """
    largest, different, texts = 0.0, 0, []
    before: dict[tuple[str, int], dict[int, Any]] = {}
    after: dict[tuple[str, int], dict[int, Any]] = {}
    letters: dict[tuple[str, int], dict[int, int]] = {}
    count = 0
    for response in again:
        old = first.get(response.id)
        if old is None:
            continue
        count += 1
        document = (response.id.task, response.id.doc_id)
        before.setdefault(document, {})[response.id.idx] = old.value
        after.setdefault(document, {})[response.id.idx] = response.value
        letters.setdefault(document, {})[response.id.idx] = max(1, (lengths or {}).get(response.id, 1))
        if old.value == response.value:
            continue
        different += 1
        if isinstance(response.value, str) or isinstance(old.value, str):
            texts.append(f"{response.id.task}/{response.id.doc_id}")
        else:
            largest = max(largest, abs(_number(response.value) - _number(old.value)))
    flipped = [
        f"{task}/{doc}" for task, doc in sorted(before) if _flips(*(one[task, doc] for one in (before, after, letters)))
    ]
    return BatchCheck(
        checked=count,
        largest_difference=largest,
        different=different,
        changed_texts=tuple(texts),
        flipped=tuple(flipped),
    )


def _number(value: Any) -> float:
    if value is None:
        return math.inf
    return float(value[0]) if isinstance(value, tuple) else float(value)


def _flips(before: Mapping[int, Any], after: Mapping[int, Any], letters: Mapping[int, int]) -> bool:
    """Whether the best choice, a greedy mark or a text of a document differs."""
    scores = [value for value in before.values() if isinstance(value, tuple)]
    if len(scores) == len(before) and len(before) > 1:
        ones = dict.fromkeys(letters, 1)
        return any(_best(before, size) != _best(after, size) for size in (ones, letters))
    if len(scores) == len(before):
        return any(before[idx][1] != after[idx][1] for idx in before if after.get(idx) is not None)
    return any(isinstance(value, str) and value != after.get(idx) for idx, value in before.items())


def _best(values: Mapping[int, Any], letters: Mapping[int, int]) -> int:
    return max(sorted(values), key=lambda idx: _number(values[idx]) / letters[idx])
