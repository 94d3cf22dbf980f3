"""What goes wrong and when: drawn once from the seed, the same for every policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gamma

import numpy as np

from planner.severity import TABLE, Severity
from planner.simulation.engine import generator
from planner.simulation.parameters import Parameters
from planner.simulation.scenario import ClusterSpec, FailureSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One thing that goes wrong at ``time`` on ``nodes``."""

    time: float
    nodes: tuple[int, ...]
    cause: str
    """A class of :data:`planner.severity.TABLE`, or ``straggler``."""
    away_seconds: float = 0.0
    """Seconds until the nodes are back; 0: they never left."""
    slowdown: float = 1.0
    """Step time from then on, relative, until somebody acts."""
    notice_seconds: float = 0.0
    """How long before ``time`` it was announced."""
    luck: float = 0.0
    """Uniform draw that decides whether a retry helps."""

    @property
    def severity(self) -> Severity:
        """By the severity table; a straggler's node is isolated."""
        return TABLE[self.cause].severity if self.cause in TABLE else Severity.SEV1

    @property
    def permanent(self) -> bool:
        """Whether the nodes are gone for a while."""
        return self.away_seconds > 0


def draw(
    spec: FailureSpec, cluster: ClusterSpec, horizon: float, parameters: Parameters, seed: int
) -> tuple[Failure, ...]:
    """All failures of a run in order of time."""
    found: list[Failure] = []
    for kind in ("permanent", "transient", "switch", "stragglers", "preemptions"):
        rng = generator(seed, f"failures.{kind}")
        for time in _times(rng, spec, getattr(spec, kind), horizon):
            found.append(_failure(rng, kind, float(time), spec, cluster, parameters))
    return tuple(sorted(found, key=lambda failure: (failure.time, failure.nodes, failure.cause)))


def _times(rng: np.random.Generator, spec: FailureSpec, expected: float, horizon: float) -> Iterator[float]:
    if expected <= 0:
        return
    if spec.process == "fixed":
        yield from np.sort(rng.uniform(0.0, horizon, round(expected)))
        return
    mean = horizon / expected
    shape = spec.shape if spec.process == "weibull" else 1.0
    scale = mean / gamma(1 + 1 / shape)
    time = scale * rng.weibull(shape)
    while time < horizon:
        yield time
        time += scale * rng.weibull(shape)


def _failure(
    rng: np.random.Generator, kind: str, time: float, spec: FailureSpec, cluster: ClusterSpec, parameters: Parameters
) -> Failure:
    node = int(rng.integers(cluster.nodes))
    if kind == "switch":
        first = node - node % cluster.nodes_per_switch
        nodes = tuple(range(first, min(first + cluster.nodes_per_switch, cluster.nodes)))
        return Failure(time=time, nodes=nodes, cause="lost_connection", away_seconds=spec.switch_seconds)
    if kind == "stragglers":
        return Failure(time=time, nodes=(node,), cause="straggler", slowdown=spec.slowdown,
                       away_seconds=_repair(rng, spec, parameters))  # fmt: skip
    if kind == "preemptions":
        return Failure(time=time, nodes=(node,), cause="preempted", away_seconds=spec.away_seconds,
                       notice_seconds=spec.notice_seconds)  # fmt: skip
    severe = kind == "permanent"
    mix = {name: share for name, share in (spec.mix or parameters.mix).items() if _is_severe(name) == severe}
    cause = _choose(rng, mix or {"lost_connection" if severe else "exited_abnormally": 1.0})
    return Failure(time=time, nodes=(node,), cause=cause, luck=float(rng.uniform()),
                   away_seconds=_repair(rng, spec, parameters) if severe else 0.0)  # fmt: skip


def _is_severe(name: str) -> bool:
    return TABLE[name].severity == Severity.SEV1


def _choose(rng: np.random.Generator, mix: Mapping[str, float]) -> str:
    names = sorted(mix)
    shares = np.array([mix[name] for name in names])
    return names[int(rng.choice(len(names), p=shares / shares.sum()))]


def _repair(rng: np.random.Generator, spec: FailureSpec, parameters: Parameters) -> float:
    low = spec.repair.low if spec.repair else parameters.failures.repair_low
    high = spec.repair.high if spec.repair else parameters.failures.repair_high
    return float(rng.uniform(low, high))
