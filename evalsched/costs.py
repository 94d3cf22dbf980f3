"""What a request, a metric and a load cost where nothing has been measured yet: the shipped defaults.

seconds = overhead + tokens read × read + tokens generated × generate, with read = 2·P / R (P parameters, R FLOP/s
reached while reading prompts) and generate = bytes of the weights / B (memory bandwidth, which bounds decoding).
:mod:`evalsched.priors` corrects them by what finished shards took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from evalsched.models import ModelFacts
from evalsched.types import Request

CPU_FLOPS = 2.0e10
"""Reached by one slot of a CPU host."""
CPU_BYTES = 5.0e9
"""Bytes per second that decoding reads on one slot of a CPU host, several sequences sharing a read."""
GPU_FLOPS = 2.0e14
GPU_BYTES = 2.0e12
BATCH = 16
"""Sequences that share one reading of the weights while decoding."""
OVERHEAD = 1.0e-3
EXPECTED_SHARE = 0.5
"""Share of a generation's budget that is used before a stop string, where nothing is known."""
METRIC_SECONDS = 2.0
"""CPU seconds of scoring a task, before its documents."""
METRIC_DOCUMENT_SECONDS = 1.0e-3
CODE_DOCUMENT_SECONDS = 0.3
"""The same per document whose answer is a program that is run."""
CPU_START_SECONDS = 15.0
GPU_START_SECONDS = 60.0
"""A worker's start and its engine's, without reading weights."""
READ_BYTES = 1.0e9
"""Bytes per second at which weights reach an engine."""
LOGIT_ROWS = 1024
"""Positions whose logits the engine holds at a time while it scores."""


class Parts(NamedTuple):
    """Seconds by what they are spent on."""

    overhead: float
    read: float
    generate: float


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds per token read, per token generated and per request; bytes per token."""

    read: float
    generate: float
    overhead: float = OVERHEAD
    parameters: float = 0.0
    load_seconds: float = CPU_START_SECONDS
    cache_bytes: int = 0
    """Of the engine's cache, per token."""
    logit_bytes: int = 0
    """Of logits, per scored position."""

    @classmethod
    def of(cls, facts: ModelFacts, device: str = "cpu") -> CostModel:
        """The estimate for a model on one slot."""
        flops, bandwidth = (CPU_FLOPS, CPU_BYTES) if device == "cpu" else (GPU_FLOPS, GPU_BYTES)
        dtype, weights = facts.dtype(), facts.weight_bytes
        size = 4 if dtype == "float32" else 2
        parameters = weights / size
        return cls(
            read=2 * parameters / flops,
            generate=max(weights / bandwidth / BATCH, 2 * parameters / flops),
            overhead=OVERHEAD if device == "cpu" else OVERHEAD / 10,
            parameters=parameters,
            load_seconds=(CPU_START_SECONDS if device == "cpu" else GPU_START_SECONDS) + weights / READ_BYTES,
            cache_bytes=facts.cache_bytes_per_token(dtype),
            logit_bytes=4 * int(facts.text.get("vocab_size", 0) or 0),
        )

    def parts(self, request: Request) -> Parts:
        """Estimated seconds of one request."""
        context, more = max(0, request.context_tokens), max(0, request.continuation_tokens)
        if request.request_type == "generate_until":
            return Parts(self.overhead, context * self.read, EXPECTED_SHARE * more * self.generate)
        return Parts(self.overhead, (context + more) * self.read, 0.0)

    def of_tokens(self, requests: int, read: int, generated: int) -> Parts:
        """Estimated seconds of several requests by their tokens together."""
        return Parts(requests * self.overhead, read * self.read, EXPECTED_SHARE * generated * self.generate)

    def seconds(self, request: Request) -> float:
        """Estimated seconds of one request: the sum of its parts."""
        context, more = max(0, request.context_tokens), max(0, request.continuation_tokens)
        if request.request_type == "generate_until":
            return self.overhead + context * self.read + EXPECTED_SHARE * more * self.generate
        return self.overhead + (context + more) * self.read

    def memory(self, request: Request) -> float:
        """Estimated bytes that one request holds in the engine: cache, and logits while it is scored."""
        tokens = max(0, request.context_tokens) + max(0, request.continuation_tokens)
        logits = 0 if request.request_type == "generate_until" else min(tokens, LOGIT_ROWS) * self.logit_bytes
        return float(tokens * self.cache_bytes + logits)

    @property
    def function(self) -> Callable[[Request], float]:
        """As the function that :func:`evalsched.shards.cut` takes."""
        return self.seconds


def metric_seconds(documents: int, runs_code: bool) -> float:
    """CPU seconds of scoring one task."""
    return METRIC_SECONDS + documents * (CODE_DOCUMENT_SECONDS if runs_code else METRIC_DOCUMENT_SECONDS)
