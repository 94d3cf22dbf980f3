"""A first estimate of a request's seconds, from the model's size and token counts alone.

seconds = overhead + tokens read × read + tokens generated × generate, with read = 2·P / R (P parameters, R FLOP/s
reached while reading prompts) and generate = bytes of the weights / B (memory bandwidth, which bounds decoding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds per token read, per token generated and per request."""

    read: float
    generate: float
    overhead: float = OVERHEAD

    @classmethod
    def of(cls, facts: ModelFacts, device: str = "cpu") -> CostModel:
        """The estimate for a model on one slot."""
        flops, bandwidth = (CPU_FLOPS, CPU_BYTES) if device == "cpu" else (GPU_FLOPS, GPU_BYTES)
        size = 4 if facts.dtype() == "float32" else 2
        parameters = facts.weight_bytes / size
        return cls(
            read=2 * parameters / flops,
            generate=max(facts.weight_bytes / bandwidth / BATCH, 2 * parameters / flops),
            overhead=OVERHEAD if device == "cpu" else OVERHEAD / 10,
        )

    def seconds(self, request: Request) -> float:
        """Estimated seconds of one request."""
        context, more = max(0, request.context_tokens), max(0, request.continuation_tokens)
        if request.request_type == "generate_until":
            return self.overhead + context * self.read + EXPECTED_SHARE * more * self.generate
        return self.overhead + (context + more) * self.read

    @property
    def function(self) -> Callable[[Request], float]:
        """As the function that :func:`evalsched.shards.cut` takes."""
        return self.seconds
