"""Intervals beside lm-eval's standard errors: ones that stay honest for 0 of N, and ones that it does not give.

Pure. ``z`` defaults to the 95% point of the normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Z95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate's interval: ``low`` to ``high``, by ``method``, from ``n`` documents."""

    low: float
    high: float
    stderr: float
    n: int
    method: str

    def to_json(self) -> dict[str, Any]:
        """The shape of ``planaria.intervals`` in the results."""
        return asdict(self)


def wilson(successes: int, n: int, z: float = Z95) -> Interval:
    """Wilson's score interval of a proportion (Wilson 1927): centre ``(p + z²/2n) / (1 + z²/n)``."""
    if n <= 0 or not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n}: no proportion")
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(low=low, high=high, stderr=math.sqrt(p * (1 - p) / n), n=n, method="wilson")


def of_mean(values: Sequence[float], z: float = Z95) -> Interval | None:
    """The normal interval of a mean; None below two values."""
    n = len(values)
    if n < 2:
        return None
    mean = math.fsum(values) / n
    stderr = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Interval(low=mean - z * stderr, high=mean + z * stderr, stderr=stderr, n=n, method="normal")


def of_ratio(pairs: Sequence[tuple[float, float]], z: float = Z95) -> Interval | None:
    """The interval of ``sum(a) / sum(b)`` over documents (ratio estimator, linearised); None below two documents.

    ``Var ≈ n / (n - 1) · Σ (a - r·b)² / (Σ b)²`` (Cochran, Sampling Techniques, chapter 6).
    """
    n = len(pairs)
    weight = math.fsum(b for _, b in pairs)
    if n < 2 or weight <= 0:
        return None
    ratio = math.fsum(a for a, _ in pairs) / weight
    stderr = math.sqrt(n / (n - 1) * math.fsum((a - ratio * b) ** 2 for a, b in pairs)) / weight
    return Interval(low=ratio - z * stderr, high=ratio + z * stderr, stderr=stderr, n=n, method="ratio")


def scaled(interval: Interval, factor: float) -> Interval:
    """The interval of ``factor`` times the estimate."""
    ends = sorted((interval.low * factor, interval.high * factor))
    stderr = interval.stderr * abs(factor)
    return Interval(low=ends[0], high=ends[1], stderr=stderr, n=interval.n, method=interval.method)


def exponentiated(interval: Interval, estimate: float) -> Interval:
    """The interval of ``exp(x)``, given the interval of ``x`` and its estimate (delta method for the stderr)."""
    stderr = math.exp(estimate) * interval.stderr
    return Interval(
        low=math.exp(interval.low), high=math.exp(interval.high), stderr=stderr, n=interval.n, method=interval.method
    )


def of_metric(aggregation: str, values: Sequence[Any]) -> Interval | None:
    """The interval of a metric from its per-document values, by the name of its aggregation.

    None where there is none to be given honestly (corpus-level scores, too few documents, odd values).
    """
    if aggregation == "mean":
        if not values or not all(isinstance(v, (bool, int, float)) and math.isfinite(v) for v in values):
            return None
        numbers = [float(v) for v in values]
        if all(v in (0.0, 1.0) for v in numbers):
            return wilson(sum(v == 1.0 for v in numbers), len(numbers))
        return of_mean(numbers)
    if aggregation in ("bits_per_byte", "weighted_perplexity"):
        try:
            pairs = [(float(a), float(b)) for a, b in values]
        except (TypeError, ValueError):
            return None
        if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
            return None
        interval = of_ratio(pairs)
        if interval is None:
            return None
        if aggregation == "bits_per_byte":
            return scaled(interval, -1 / math.log(2))
        estimate = -math.fsum(a for a, _ in pairs) / math.fsum(b for _, b in pairs)
        return exponentiated(scaled(interval, -1.0), estimate)
    return None
