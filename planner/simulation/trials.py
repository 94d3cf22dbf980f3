"""One checkpoint on many datasets, to the second: loads over a shared NIC, preparation, inference, CPU metrics.

Three ways to run it, with the same parameters:

* ``one-job-per-dataset`` (Acme's baseline): each dataset is a job that loads the model from storage, prepares, infers
  and computes its metric, and holds its GPU throughout; jobs start in the order of submission.
* ``fixed-partition`` (Acme's own method): one load per node into memory, small datasets batched, large ones cut into a
  few trials, long CPU metrics first; each trial loads from memory and prepares; metrics run on CPU.
* ``planaria``: one load per node, a resident engine per slot, requests recorded on CPU meanwhile, shards of a few
  seconds by the conductor's own policy (:mod:`planner.packing`), metrics on CPU as soon as a dataset's last response is
  in.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp
from statistics import NormalDist
from typing import Any

import numpy as np

from planner.ettr import LOSSES
from planner.packing import PendingShard, RunView
from planner.simulation.engine import Engine, generator
from planner.simulation.packing import PlayedSlot, play
from planner.simulation.parameters import Parameters, Trial
from planner.simulation.scenario import TrialScenario


@dataclass(frozen=True, slots=True)
class Dataset:
    """Seconds of inference on one GPU and of metric on CPU."""

    name: str
    inference: float
    metric: float


@dataclass(kw_only=True)
class TrialOutcome:
    """Slot-seconds by what they were used for, and when each dataset's report was out."""

    makespan: float
    ready: list[float]
    used: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("inference", "load", "start", "metric"), 0.0))


def datasets(trial: Trial) -> list[Dataset]:
    """Log-normal inference seconds at the middle of equal shares of probability: no draw, no luck."""
    count = round(trial.datasets)
    found = []
    for index in range(count):
        z = NormalDist().inv_cdf((index + 0.5) / count)
        inference = trial.inference * exp(trial.inference_spread * z)
        found.append(Dataset(f"dataset-{index + 1:02d}", inference, trial.metric_share * inference))
    return found


class Loads:
    """Loads from storage that share their node's NIC and the storage, all at an equal pace within each."""

    def __init__(self, engine: Engine, trial: Trial) -> None:
        self.engine, self.trial = engine, trial
        self._active: list[list[Any]] = []
        self._since = 0.0
        self._version = 0

    def start(self, node: int, size: float, then: Any) -> None:
        """Load ``size`` bytes to a node, then call ``then``."""
        self._settle()
        self._active.append([size, node, then])
        self._schedule()

    def _rate(self, node: int) -> float:
        here = sum(1 for load in self._active if load[1] == node)
        return min(self.trial.nic_bytes_per_second / here, self.trial.storage_bytes_per_second / len(self._active))

    def _settle(self) -> None:
        seconds, self._since = self.engine.now - self._since, self.engine.now
        rates = [self._rate(load[1]) for load in self._active]
        for load, rate in zip(self._active, rates, strict=True):
            load[0] -= rate * seconds

    def _schedule(self) -> None:
        self._version += 1
        version = self._version
        if self._active:
            soonest = min(load[0] / self._rate(load[1]) for load in self._active)
            self.engine.after(max(0.0, soonest), lambda: self._step(version))

    def _step(self, version: int) -> None:
        if version != self._version:
            return
        self._settle()
        done = [load for load in self._active if load[0] <= 1.0]  # bytes
        self._active = [load for load in self._active if load[0] > 1.0]
        self._schedule()
        for load in done:
            load[2]()


def baseline(trial: Trial, order: Sequence[Dataset], nodes: int, per_node: int) -> TrialOutcome:
    """One job per dataset, first come first served."""
    engine = Engine()
    loads = Loads(engine, trial)
    outcome = TrialOutcome(makespan=0.0, ready=[])
    waiting = list(reversed(order))

    def begin(node: int) -> None:
        if not waiting:
            return
        dataset, started = waiting.pop(), engine.now

        def loaded() -> None:
            outcome.used["load"] += engine.now - started
            engine.after(trial.preparation + dataset.inference + dataset.metric, done)

        def done() -> None:
            outcome.used["start"] += trial.preparation
            outcome.used["inference"] += dataset.inference
            outcome.used["metric"] += dataset.metric
            outcome.ready.append(engine.now)
            begin(node)

        loads.start(node, trial.model_bytes, loaded)

    # Slots are filled node by node in turn, as a scheduler does that spreads jobs.
    for _ in range(per_node):
        for node in range(nodes):
            begin(node)
    engine.run(float("1e12"), lambda: len(outcome.ready) == len(order))
    outcome.makespan = max(outcome.ready)
    return outcome


def acme(trial: Trial, given: Sequence[Dataset], nodes: int, per_node: int) -> TrialOutcome:
    """Acme's trial coordinator."""
    slots = nodes * per_node
    share = sum(dataset.inference for dataset in given) / slots
    trials: list[tuple[float, list[tuple[Dataset, float]]]] = []
    batch: list[tuple[Dataset, float]] = []
    for dataset in sorted(given, key=lambda d: (d.inference, d.name)):
        if dataset.inference <= share / 2:
            if batch and sum(seconds for _, seconds in batch) + dataset.inference > share / 2:
                trials.append((sum(d.metric for d, _ in batch), batch))
                batch = []
            batch.append((dataset, dataset.inference))
        else:
            pieces = min(round(trial.acme_pieces), max(1, ceil(dataset.inference / share)))
            trials += [(dataset.metric, [(dataset, dataset.inference / pieces)]) for _ in range(pieces)]
    if batch:
        trials.append((sum(d.metric for d, _ in batch), batch))
    trials.sort(key=lambda entry: (-entry[0], entry[1][0][0].name))
    staged = _staging(trial, nodes)
    outcome = TrialOutcome(makespan=0.0, ready=[])
    outcome.used["load"] += staged * slots
    last: dict[str, float] = {}
    free = [(staged, slot) for slot in range(slots)]
    load = trial.model_bytes / trial.memory_bytes_per_second
    for _, parts in trials:
        time, slot = heapq.heappop(free)
        outcome.used["load"] += load
        outcome.used["start"] += trial.preparation
        time += load + trial.preparation
        for dataset, seconds in parts:
            time += seconds
            outcome.used["inference"] += seconds
            last[dataset.name] = max(last.get(dataset.name, 0.0), time)
        heapq.heappush(free, (time, slot))
    return _with_metrics(outcome, given, last)


def ours(trial: Trial, given: Sequence[Dataset], nodes: int, per_node: int) -> TrialOutcome:
    """Resident engines and fine shards."""
    slots = nodes * per_node
    begin = _begin(trial, nodes)
    pending = tuple(
        PendingShard(shard=dataset.name, seconds=dataset.inference, tail=dataset.metric) for dataset in given
    )
    run = RunView(run="checkpoint", created=0.0, model="m", pending=pending, usual=trial.shard_seconds)
    found = play(
        [run],
        [PlayedSlot(name=f"{slot:04d}", start=begin, model="m") for slot in range(slots)],
        overhead=trial.shard_overhead,
    )
    outcome = TrialOutcome(makespan=0.0, ready=[])
    outcome.used["load"] += slots * (begin - trial.engine_start)
    outcome.used["start"] += slots * trial.engine_start + found.pieces * trial.shard_overhead
    outcome.used["inference"] += found.work
    return _with_metrics(outcome, given, found.ends)


def _staging(trial: Trial, nodes: int) -> float:
    """One load per node, all at once."""
    return trial.model_bytes / min(trial.nic_bytes_per_second, trial.storage_bytes_per_second / nodes)


def _with_metrics(outcome: TrialOutcome, given: Sequence[Dataset], last: dict[str, float]) -> TrialOutcome:
    outcome.ready = [last[dataset.name] + dataset.metric for dataset in given]
    outcome.makespan = max(outcome.ready)
    return outcome


def _begin(trial: Trial, nodes: int) -> float:
    """Until resident engines answer: staged, started, loaded; requests are recorded meanwhile."""
    load = trial.model_bytes / trial.memory_bytes_per_second
    return max(_staging(trial, nodes) + trial.engine_start + load, trial.preparation)


def lower_bound(trial: Trial, nodes: int, per_node: int) -> float:
    """No schedule on engines that start once is shorter: for each k, the k datasets with the longest metrics need all
    slots for their inference, and the last of them still has a metric at least as long as the k-th."""
    bound = done = 0.0
    for dataset in sorted(datasets(trial), key=lambda d: -d.metric):
        done += dataset.inference
        bound = max(bound, done / (nodes * per_node) + dataset.metric)
    return _begin(trial, nodes) + bound


def run_trials(scenario: TrialScenario, parameters: Parameters, seed: int) -> dict[str, Any]:
    """All policies of an evaluation scenario."""
    trial, given = parameters.trial, datasets(parameters.trial)
    nodes, per_node = scenario.nodes, scenario.gpus_per_node
    policies: dict[str, Any] = {}
    for name in scenario.policies:
        if name == "one-job-per-dataset":
            rng = generator(seed, "trials.order")
            outcomes = [
                baseline(trial, [given[i] for i in rng.permutation(len(given))], nodes, per_node)
                for _ in range(scenario.orders)
            ]
        else:
            outcomes = [(acme if name == "fixed-partition" else ours)(trial, given, nodes, per_node)]
        policies[name] = _figures(outcomes, nodes * per_node, scenario.price_per_gpu_hour)
    document = {"scenario": scenario.name, "seed": seed, "datasets": len(given),
                "lower_bound_seconds": lower_bound(trial, nodes, per_node), "policies": policies}  # fmt: skip
    whole = policies.get("one-job-per-dataset")
    if whole:
        document["speedup"] = {
            name: whole["makespan_seconds"] / entry["makespan_seconds"] for name, entry in policies.items()
        }
    return document


def _figures(outcomes: Sequence[TrialOutcome], slots: int, price: float) -> dict[str, Any]:
    """The entry of the document: means over the orders; ``ettr`` is the share of slot time spent on inference."""
    makespan = float(np.mean([outcome.makespan for outcome in outcomes]))
    wall = sum(outcome.makespan for outcome in outcomes) * slots
    shares = {key: sum(outcome.used[key] for outcome in outcomes) / wall for key in outcomes[0].used}
    ready = np.concatenate([outcome.ready for outcome in outcomes])
    losses = dict.fromkeys(LOSSES, 0.0)
    losses["load"], losses["start"] = shares["load"] * makespan, shares["start"] * makespan
    losses["other"] = shares["metric"] * makespan
    losses["waiting"] = max(0.0, makespan * (1 - sum(shares.values())))
    hours = makespan * slots / 3600
    return {
        "accumulated_waf": 0.0,
        "useful_flop": 0.0,
        "ettr": shares["inference"],
        "gpu_hours": hours,
        "cost": hours * price,
        "makespan_seconds": makespan,
        "evaluation_latency": {f"p{p}": float(np.percentile(ready, p)) for p in (50, 95, 99)},
        "losses": losses,
        "utilisation": 1 - losses["waiting"] / makespan,
        "useful_flop_per_gpu_hour": 0.0,
    }
