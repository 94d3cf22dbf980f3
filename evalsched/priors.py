"""What is known beforehand of costs, and how well: learned from the ledger with every finished shard.

A shard's seconds, a scoring's CPU seconds, a load and a request's memory are all predicted alike: the shipped default
(:mod:`evalsched.costs`) times a factor that is linear in the shares of the default by which it came about: overhead,
reading, generating, each task (how long its generations really are), and the model's size:

    measured / default = s·(1 + Σ_part share·(w_part + v_part·log10(P / 1e9)) + Σ_task share·w_task) + noise

with s the middle of all measured / default. Shares add up, so a shard's prediction is the sum of its requests'. The
weights have a Gaussian prior around 0, so that a task that was never seen gets what all tasks have in common: Bayesian
ridge regression, which gives the spread of each prediction too. One regression per *setting* (device, engine).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log, log10, sqrt
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from evalsched.costs import CostModel, metric_seconds
from evalsched.types import Request

if TYPE_CHECKING:
    from evalsched.ledger import Ledger

Kind = Literal["shard", "metric", "load", "memory"]
KINDS: tuple[Kind, ...] = ("shard", "metric", "load", "memory")
KEPT = 2000
"""Newest observations of a kind that are learned from."""
LEAST = 4
"""Observations before which the defaults hold."""
DEFAULT_SPREAD = 1.0
"""Standard deviation of log(measured / default) where nothing was measured: a factor of e either way."""
SHORT_SECONDS = 0.1
"""Measurements of about this length are mostly jitter and count half."""
COVERED = 1.2816
"""Standard deviations to either side that 80% lie within."""
_LEAST_FACTOR, _MOST_FACTOR = 0.05, 5.0
"""Bounds of what one measurement, and one request's factor, may differ from s by."""
Facts: TypeAlias = tuple[float, dict[str, float]]
"""(default seconds of a shard, its shares by what they come from)."""
_PARTS = ("overhead", "read", "generate")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One measurement with what was predicted before it was made. Seconds, or bytes for ``memory``."""

    kind: Kind
    setting: str
    """Device and engine."""
    default: float
    """What :mod:`evalsched.costs` said."""
    features: Mapping[str, float]
    measured: float
    predicted: float
    spread: float
    """Of the prediction: standard deviation of its logarithm."""

    @property
    def usable(self) -> bool:
        """Whether anything can be learned from it."""
        return all(isfinite(one) and one > 0 for one in (self.default, self.measured))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A prediction: the middle and its spread."""

    value: float
    spread: float = DEFAULT_SPREAD

    @property
    def high(self) -> float:
        """Nine of ten are below it."""
        return self.value * exp(COVERED * self.spread)


class Regression:
    """The factor for one kind in one setting. Without observations it is 1 everywhere.

    Args:
        observations: of one kind and setting.
    """

    def __init__(self, observations: Sequence[Observation] = ()) -> None:
        used = [one for one in observations if one.usable]
        self.count = len(used)
        self.scale = 1.0
        """s."""
        self.weights: dict[str, float] = {}
        self._noise = DEFAULT_SPREAD**2
        self._columns: list[str] = []
        self._covariance: Any = None
        if self.count >= LEAST:
            self._fit(used)

    def _fit(self, used: Sequence[Observation]) -> None:
        import numpy as np
        from sklearn.linear_model import BayesianRidge

        self._columns = sorted({name for one in used for name in one.features})
        place = {name: number for number, name in enumerate(self._columns)}
        x = np.zeros((len(used), len(place)))
        for row, one in enumerate(used):
            for name, value in one.features.items():
                x[row, place[name]] = value
        ratios = np.array([one.measured / one.default for one in used])
        self.scale = float(np.median(ratios))
        y = np.clip(ratios / self.scale, _LEAST_FACTOR, _MOST_FACTOR) - 1.0
        trust = np.array([one.measured / (one.measured + SHORT_SECONDS) for one in used])
        # The gamma priors keep few measurements from being believed to the last digit: noise about 0.3, weights 1.
        model = BayesianRidge(
            fit_intercept=False, alpha_1=2.0, alpha_2=2.0 * 0.3**2, lambda_1=1.0, lambda_2=1.0, max_iter=100
        )
        model.fit(x, y, sample_weight=np.maximum(trust, 0.05))
        self.weights = dict(zip(self._columns, map(float, model.coef_), strict=True))
        self._covariance, self._noise = model.sigma_, 1.0 / float(model.alpha_)
        self._unseen = 1.0 / float(model.lambda_)

    def factor(self, features: Mapping[str, float]) -> float:
        """What the default is to be multiplied by."""
        return self.scale * self._relative(features)

    def _relative(self, features: Mapping[str, float]) -> float:
        return max(_LEAST_FACTOR, 1.0 + sum(self.weights.get(name, 0.0) * value for name, value in features.items()))

    def spread(self, features: Mapping[str, float]) -> float:
        """Standard deviation of log(measured / predicted)."""
        if self._covariance is None:
            return DEFAULT_SPREAD
        import numpy as np

        row = np.array([features.get(name, 0.0) for name in self._columns])
        unseen = sum(value**2 for name, value in features.items() if name not in self.weights)
        deviation = sqrt(float(row @ self._covariance @ row) + self._noise + unseen * self._unseen)
        return min(DEFAULT_SPREAD, deviation / self._relative(features))


@dataclass(frozen=True)
class Predictor:
    """Costs of one model in one setting."""

    cost: CostModel
    setting: str
    shard: Regression
    load: Regression
    held: Regression

    def seconds(self, request: Request) -> float:
        """Estimated seconds of one request on one slot."""
        if not self.shard.weights:
            return self.cost.seconds(request)
        parts = self.cost.parts(request)
        default = sum(parts)
        if default <= 0:
            return default
        size, weights = self._size(), self.shard.weights
        found = 0.0
        for name, value in zip(_PARTS, parts, strict=True):
            if value:
                found += value * (weights.get(name, 0.0) + size * weights.get(f"{name}*size", 0.0))
        found = found / default + weights.get(f"task:{request.task}", 0.0)
        return default * self.shard.scale * max(_LEAST_FACTOR, 1.0 + found)

    def _size(self) -> float:
        return log10(max(1.0, self.cost.parameters) / 1e9)

    def features(self, requests: Iterable[Request]) -> Facts:
        """(default seconds, shares) of a shard."""
        tokens: dict[str, list[int]] = {}  # per task: requests, tokens read, tokens that may be generated
        for request in requests:
            own = tokens.get(request.task) or tokens.setdefault(request.task, [0, 0, 0])
            own[0] += 1
            own[1] += max(0, request.context_tokens)
            own[2 if request.request_type == "generate_until" else 1] += max(0, request.continuation_tokens)
        by_task = {task: self.cost.of_tokens(*own) for task, own in tokens.items()}
        parts = [sum(column) for column in zip(*by_task.values(), strict=True)] or [0.0, 0.0, 0.0]
        tasks = {task: sum(own) for task, own in by_task.items()}
        default = sum(parts)
        found: dict[str, float] = {}
        for name, value in zip(_PARTS, parts, strict=True):
            if value > 0:
                found[name] = value / default
                found[f"{name}*size"] = self._size() * value / default
        return default, found | {f"task:{task}": value / default for task, value in tasks.items() if default > 0}

    def shard_high(self, seconds: float, features: Mapping[str, float]) -> float | None:
        """Twice the seconds that nine of ten such shards stay below; None where nothing was learned."""
        if not self.shard.weights:
            return None
        return 2 * Estimate(value=seconds, spread=self.shard.spread(features)).high

    def observed(self, facts: Facts, predicted: float, seconds: float) -> Observation:
        """A finished shard as an observation; ``facts`` are its :meth:`features`."""
        default, features = facts
        return Observation(
            kind="shard", setting=self.setting, default=default, features=features, measured=seconds,
            predicted=predicted, spread=self.shard.spread(features),
        )  # fmt: skip

    def load_estimate(self) -> Estimate:
        """Seconds until a slot without an engine answers its first request."""
        features = self._load_features()
        return Estimate(value=self.cost.load_seconds * self.load.factor(features), spread=self.load.spread(features))

    def _load_features(self) -> dict[str, float]:
        return {"load": 1.0, "load*size": self._size()}

    def load_observed(self, seconds: float) -> Observation:
        """An engine's start as an observation."""
        before = self.load_estimate()
        return Observation(
            kind="load", setting=self.setting, default=self.cost.load_seconds, features=self._load_features(),
            measured=seconds, predicted=before.value, spread=before.spread,
        )  # fmt: skip

    def memory(self, requests: Iterable[Request], at_once: int) -> Estimate:
        """Bytes that the largest ``at_once`` of these requests hold in the engine together."""
        sizes = sorted((self.cost.memory(request) for request in requests), reverse=True)[:at_once]
        features = {"memory": 1.0, "memory*size": self._size()}
        return Estimate(value=sum(sizes) * self.held.factor(features), spread=self.held.spread(features))

    def memory_observed(self, requests: Sequence[Request], at_once: int, grown: float) -> Observation:
        """What a shard really took, beyond the loaded engine."""
        before = self.memory(requests, at_once)
        default = sum(sorted((self.cost.memory(request) for request in requests), reverse=True)[:at_once])
        return Observation(
            kind="memory", setting=self.setting, default=default,
            features={"memory": 1.0, "memory*size": self._size()},
            measured=grown, predicted=before.value, spread=before.spread,
        )  # fmt: skip


class Priors:
    """All that was learned. Thread-safe: predictions are made from immutable regressions.

    Args:
        observations: what was measured before, oldest first.
    """

    def __init__(self, observations: Iterable[Observation] = ()) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[Kind, str], list[Observation]] = {}
        self._fitted: dict[tuple[Kind, str], Regression] = {}
        self._new = 0
        self.count = 0
        """Measurements so far."""
        for one in observations:
            self.note(one)

    @classmethod
    def of(cls, ledger: Ledger) -> Priors:
        """What a ledger's observations teach.

        Raises:
            MissingServiceError: the ledger is away.
        """
        found = [one for kind in KINDS for one in ledger.observations(kind, KEPT)]
        return cls(found)

    def note(self, one: Observation) -> None:
        """A new measurement; :meth:`learn` takes it in."""
        with self._lock:
            kept = self._seen.setdefault((one.kind, one.setting), [])
            kept.append(one)
            del kept[:-KEPT]
            self._new += 1
            self.count += 1

    @property
    def unlearned(self) -> int:
        """Measurements that no regression has seen."""
        return self._new

    def learn(self) -> None:
        """Fit again where there is something new. Costs milliseconds (the first time, scikit-learn's import)."""
        with self._lock:
            if not self._new:
                return
            seen = {key: list(kept) for key, kept in self._seen.items()}
            self._new = 0
        fitted = {key: Regression(kept) for key, kept in seen.items()}
        with self._lock:
            self._fitted = fitted

    def _regression(self, kind: Kind, setting: str) -> Regression:
        with self._lock:
            return self._fitted.get((kind, setting)) or Regression()

    def predictor(self, cost: CostModel, setting: str) -> Predictor:
        """Costs of a model in a setting, by what is known now."""
        return Predictor(cost, setting, *(self._regression(kind, setting) for kind in ("shard", "load", "memory")))

    # ------------------------------------------------------------------ metrics

    def metric(self, tasks: Mapping[str, tuple[int, bool]]) -> Estimate:
        """CPU seconds of scoring ``tasks``: name → (documents, whether its answers are programs)."""
        default, features = _metric_features(tasks)
        found = self._regression("metric", METRIC_SETTING)
        return Estimate(value=default * found.factor(features), spread=found.spread(features))

    def metric_observed(self, tasks: Mapping[str, tuple[int, bool]], seconds: float) -> Observation:
        """A scoring as an observation."""
        before = self.metric(tasks)
        default, features = _metric_features(tasks)
        return Observation(
            kind="metric", setting=METRIC_SETTING, default=default, features=features, measured=seconds,
            predicted=before.value, spread=before.spread,
        )  # fmt: skip

    # ------------------------------------------------------------------ calibration

    def calibration(self) -> dict[str, dict[str, Any]]:
        """Per kind and setting, how well the predictions held that were made before the measurement."""
        with self._lock:
            seen = {key: list(kept) for key, kept in self._seen.items()}
        return {f"{kind} on {setting}": calibration(kept) for (kind, setting), kept in sorted(seen.items())}


METRIC_SETTING = "cpu/lm_eval"


def _metric_features(tasks: Mapping[str, tuple[int, bool]]) -> tuple[float, dict[str, float]]:
    own = {task: metric_seconds(*facts) for task, facts in tasks.items()}
    default = sum(own.values())
    shares = {f"task:{task}": seconds / default for task, seconds in own.items()}
    return default, {"metric": 1.0} | shares


def calibration(observations: Sequence[Observation]) -> dict[str, Any]:
    """How predictions and measurements compare.

    ``ratio``: the middle measured / predicted; ``error``: the middle factor between the two, either way (1 is exact),
    and ``default_error`` the same for the shipped defaults; ``covered``: share of measurements within the interval
    that was to hold 80%.
    """
    used = [one for one in observations if one.usable and one.predicted > 0]
    if not used:
        return {"count": 0}
    logs = [log(one.measured / one.predicted) for one in used]
    defaults = [abs(log(one.measured / one.default)) for one in used]
    covered = sum(abs(found) <= COVERED * one.spread for found, one in zip(logs, used, strict=True))
    return {
        "count": len(used),
        "ratio": exp(median(logs)),
        "error": exp(median(map(abs, logs))),
        "default_error": exp(median(defaults)),
        "covered": covered / len(used),
    }
