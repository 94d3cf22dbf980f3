"""What becomes of a step whose loss or gradient is not finite."""

from __future__ import annotations

import math

import pytest

from pretrain.guard import RETRIES, SKIPS, Policy, Verdict, decide


@pytest.mark.parametrize("policy", ["retry_step", "skip_batch", "roll_back"])
def test_a_finite_step_is_applied(policy: Policy) -> None:
    assert decide(policy, 5.0, 1e30, retries=RETRIES, skips=SKIPS).verdict == Verdict.APPLY


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)])
@pytest.mark.parametrize(
    ("policy", "retries", "skips", "verdict"),
    [
        ("retry_step", 0, 0, Verdict.RETRY),
        ("retry_step", RETRIES - 1, 0, Verdict.RETRY),
        ("retry_step", RETRIES, 0, Verdict.RAISE),
        ("skip_batch", 0, 0, Verdict.SKIP),
        ("skip_batch", 0, SKIPS - 1, Verdict.SKIP),
        ("skip_batch", 0, SKIPS, Verdict.RAISE),
        ("roll_back", 0, 0, Verdict.RAISE),
    ],
)
def test_a_bad_step_is_never_applied(
    policy: Policy, retries: int, skips: int, verdict: Verdict, loss: float, norm: float
) -> None:
    decision = decide(policy, loss, norm, retries=retries, skips=skips)
    assert decision.verdict == verdict
    assert str(loss) in decision.reason
    assert str(norm) in decision.reason
