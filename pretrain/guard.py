"""What to do when a step's loss or gradient is Inf or NaN: a pure decision, never silently on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from planner.errors import WorkFailedError

RETRIES = 2
"""Times that the same samples are tried again before a retry counts as useless."""
SKIPS = 10
"""Batches in a row that may be left out before the model, not the data, must be at fault."""

Policy = Literal["retry_step", "skip_batch", "roll_back"]


class NonFiniteError(WorkFailedError):
    """The loss or the gradient stayed Inf or NaN, and the policy does not allow going on from here."""


class Verdict(StrEnum):
    """What becomes of a step."""

    APPLY = "apply"
    RETRY = "retry"
    SKIP = "skip"
    RAISE = "raise"


@dataclass(frozen=True)
class Decision:
    """A verdict and the reason for it."""

    verdict: Verdict
    reason: str


def decide(policy: Policy, loss: float, norm: float, *, retries: int, skips: int) -> Decision:
    """Judge one attempt of a step.

    Args:
        policy: ``health.on_bad_gradient``.
        loss: mean loss of the global batch.
        norm: norm of the summed gradient.
        retries: times that these samples were retried before.
        skips: batches left out in a row before this one.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return Decision(Verdict.APPLY, "")
    found = f"loss {loss}, gradient norm {norm}"
    if policy == "roll_back":
        return Decision(Verdict.RAISE, f"{found}; health.on_bad_gradient is roll_back")
    if policy == "retry_step":
        if retries < RETRIES:
            return Decision(Verdict.RETRY, f"{found}; retry {retries + 1} of {RETRIES} with the same samples")
        return Decision(Verdict.RAISE, f"{found}; still so after {RETRIES} retries with the same samples")
    if skips < SKIPS:
        return Decision(Verdict.SKIP, f"{found}; the batch is left out")
    return Decision(Verdict.RAISE, f"{found}; {SKIPS} batches in a row were left out already")
