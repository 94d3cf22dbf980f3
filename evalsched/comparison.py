"""Two checkpoints on the same documents: differences in standard errors, and the gate. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

Verdict = Literal["better", "worse", "same"]
GATE_LEVEL = 0.05
"""Two-sided level of the gate, shared out over all tasks (Bonferroni), so that many tasks raise no false alarm."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """How a metric moved from one checkpoint to the next."""

    task: str
    metric: str
    difference: float
    stderr: float | None
    z: float | None
    """The difference in its standard errors, above 0 where it is an improvement; None without a standard error."""
    paired: bool
    """Computed document by document, which takes the documents' own difficulty out."""
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """The shape of the JSON report."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Whether a checkpoint may follow its predecessor."""

    verdict: Literal["pass", "regress", "none"]
    threshold: float
    """Standard errors that a metric may fall before it counts."""
    reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The shape of the JSON report."""
        return {"verdict": self.verdict, "threshold": self.threshold, "reasons": list(self.reasons)}


def paired_stderr(old: Sequence[Any], new: Sequence[Any]) -> float | None:
    """Standard error of the difference of two means (numbers) or two ratios (pairs), over the same documents.

    For ratios the document's share of the difference is linearised, as in :func:`evalsched.intervals.of_ratio`.
    None where the values are neither, or fewer than two.
    """
    n = len(old)
    if n < 2 or n != len(new):
        return None
    try:
        if all(isinstance(v, (list, tuple)) for v in (*old, *new)):
            shares = _ratio_shares(old, new)
        else:
            shares = [(float(b) - float(a)) / n for a, b in zip(old, new, strict=True)]
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    mean = math.fsum(shares) / n
    variance = n / (n - 1) * math.fsum((share - mean) ** 2 for share in shares)
    return math.sqrt(variance) if math.isfinite(variance) else None


def _ratio_shares(old: Sequence[Any], new: Sequence[Any]) -> list[float]:
    first, second = [(float(a), float(b)) for a, b in old], [(float(a), float(b)) for a, b in new]
    weights = [math.fsum(b for _, b in pairs) for pairs in (first, second)]
    ratios = [math.fsum(a for a, _ in p) / w for p, w in zip((first, second), weights, strict=True)]
    return [
        (a2 - ratios[1] * b2) / weights[1] - (a1 - ratios[0] * b1) / weights[0]
        for (a1, b1), (a2, b2) in zip(first, second, strict=True)
    ]


def delta(
    task: str,
    metric: str,
    old: float,
    new: float,
    *,
    higher_is_better: bool | None,
    stderr: float | None,
    paired: bool,
    threshold: float = 2.0,
) -> Delta:
    """The move of one metric; ``stderr`` is that of the difference."""
    difference = new - old
    sign = -1.0 if higher_is_better is False else 1.0
    z: float | None = None
    if stderr is not None and stderr > 0:
        z = sign * difference / stderr
    elif stderr == 0 and difference == 0:
        z = 0.0
    verdict: Verdict = "same"
    if z is not None and abs(z) >= threshold:
        verdict = "better" if z > 0 else "worse"
    return Delta(
        task=task, metric=metric, difference=difference, stderr=stderr, z=z, paired=paired, verdict=verdict
    )  # fmt: skip


def independent_stderr(old: float | None, new: float | None) -> float | None:
    """Standard error of a difference of two independent estimates."""
    return None if old is None or new is None else math.hypot(old, new)


def size_in_errors(z: float) -> str:
    """How many standard errors a move is, in figures that mean something: beyond 99 the error itself is in doubt."""
    return f"{abs(z):.1f}" if abs(z) <= 99 else "over 99"


def decide_gate(deltas: Iterable[Delta], broken: Mapping[str, str], level: float = GATE_LEVEL) -> Gate:
    """Regress where a metric fell by more than chance explains, or a task that had a number has none any more."""
    found = [d for d in deltas if d.z is not None]
    tests = max(1, len(found))
    threshold = NormalDist().inv_cdf(1 - level / 2 / tests)
    reasons = [
        f"{d.task} {d.metric}: {d.difference:+.4g}, {size_in_errors(d.z or 0)} standard errors worse"
        for d in found
        if (d.z or 0) < -threshold
    ]
    reasons += [f"{task}: {reason}" for task, reason in sorted(broken.items())]
    if not found and not reasons:
        return Gate(verdict="none", threshold=threshold, reasons=("nothing to compare with",))
    return Gate(verdict="regress" if reasons else "pass", threshold=threshold, reasons=tuple(reasons))
