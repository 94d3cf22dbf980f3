"""Priors: defaults first, then what was measured; shards add up; the spread is what it says."""

from __future__ import annotations

import math
import random

import pytest

from evalsched.costs import CostModel
from evalsched.ledger import Ledger
from evalsched.pace import Speeds
from evalsched.priors import COVERED, DEFAULT_SPREAD, LEAST, Observation, Priors, calibration
from evalsched.types import Request

COST = CostModel(read=1e-3, generate=1e-2, parameters=1e8)
TASKS = {"scored": 1.0, "short": 0.3, "long": 2.0}
"""What a generated token of each really costs, over the default."""


def request(task: str, rng: random.Random) -> Request:
    generated = task != "scored"
    return Request(
        request_type="generate_until" if generated else "loglikelihood", task=task, doc_id=0, idx=0, occurrence=0,
        arguments=("a", "b"), context_tokens=rng.randint(20, 200),
        continuation_tokens=rng.choice([64, 256]) if generated else 5,
    )  # fmt: skip


def real_seconds(requests: list[Request]) -> float:
    found = 0.0
    for one in requests:
        overhead, read, generate = COST.parts(one)
        found += 3 * overhead + 2 * read + TASKS[one.task] * generate
    return found


def shards(rng: random.Random, count: int) -> list[list[Request]]:
    """Each of one or two tasks, as the cutter makes them."""
    return [
        [request(task, rng) for task in rng.choices(rng.sample(list(TASKS), 2), k=30)] for _ in range(count)
    ]  # fmt: skip


def test_without_measurements_the_shipped_defaults_hold() -> None:
    predictor = Priors().predictor(COST, "cpu/vllm")
    one = request("long", random.Random(1))
    assert predictor.seconds(one) == COST.seconds(one)
    assert predictor.shard.spread({}) == DEFAULT_SPREAD
    assert predictor.shard_high(1.0, {}) is None


def test_every_finished_shard_makes_the_next_prediction_better_and_its_spread_honest() -> None:
    rng = random.Random(2)
    priors = Priors()
    found: list[Observation] = []
    for number, requests in enumerate(shards(rng, 150)):
        predictor = priors.predictor(COST, "cpu/vllm")
        facts = predictor.features(requests)
        predicted = sum(map(predictor.seconds, requests))
        measured = real_seconds(requests) * math.exp(rng.gauss(0, 0.15))
        found.append(predictor.observed(facts, predicted, measured))
        priors.note(found[-1])
        if number % 10 == 9:
            priors.learn()
    late = calibration(found[50:])
    assert late["error"] < 1.2 < late["default_error"]
    assert 0.9 < late["ratio"] < 1.1
    assert 0.7 <= late["covered"] <= 0.95
    predictor = priors.predictor(COST, "cpu/vllm")
    mixed = [request(task, rng) for task in TASKS for _ in range(10)]
    default, features = predictor.features(mixed)
    assert default * predictor.shard.factor(features) == pytest.approx(sum(map(predictor.seconds, mixed)))
    unseen = [request("scored", rng)]
    unseen = [Request(**{**{n: getattr(one, n) for n in one.__slots__}, "task": "new"}) for one in unseen]
    seen = predictor.shard.spread(predictor.features([request("scored", rng)])[1])
    assert predictor.shard.spread(predictor.features(unseen)[1]) > seen, "a new task is less certain"


def test_settings_do_not_teach_each_other_and_garbage_teaches_nothing() -> None:
    priors = Priors()
    slow = {"kind": "shard", "features": {"read": 1.0}, "default": 1.0, "predicted": 1.0, "spread": 1.0}
    for _ in range(10):
        priors.note(Observation(setting="cpu/vllm", measured=4.0, **slow))  # type: ignore[arg-type]
        priors.note(Observation(setting="cuda/vllm", measured=float("nan"), **slow))  # type: ignore[arg-type]
        priors.note(Observation(setting="cuda/vllm", measured=0.0, **slow))  # type: ignore[arg-type]
    priors.learn()
    assert priors.predictor(COST, "cpu/vllm").shard.factor({"read": 1.0}) == pytest.approx(4.0, rel=0.05)
    assert priors.predictor(COST, "cuda/vllm").shard.factor({"read": 1.0}) == 1.0


def test_metrics_loads_and_memory_are_learned_too() -> None:
    priors = Priors()
    predictor = priors.predictor(COST, "cpu/vllm")
    for _ in range(LEAST):
        priors.note(priors.metric_observed({"programs": (164, True)}, 20.0))
        priors.note(priors.metric_observed({"choices": (500, False)}, 0.5))
        priors.note(predictor.load_observed(40.0))
    priors.learn()
    assert priors.metric({"programs": (164, True)}).value > 5 * priors.metric({"choices": (500, False)}).value
    assert priors.metric({"programs": (164, True)}).value == pytest.approx(20.0, rel=0.4)
    assert priors.predictor(COST, "cpu/vllm").load_estimate().value == pytest.approx(40.0, rel=0.1)


def test_the_ledger_keeps_what_was_measured(tmp_path: object) -> None:
    with Ledger(f"sqlite:///{tmp_path}/l.sqlite", 1) as ledger:
        own = Observation(
            kind="shard", setting="cpu/vllm", default=1.0, features={"read": 0.5, "task:a": 1.0}, measured=2.0,
            predicted=1.5, spread=0.3,
        )  # fmt: skip
        ledger.put_observations([own] * 5)
        ledger.put_observations([])
        assert ledger.observations("shard", 3) == [own] * 3
        priors = Priors.of(ledger)
        priors.learn()
        assert priors.count == 5
        assert priors.predictor(COST, "cpu/vllm").shard.factor({"read": 0.5, "task:a": 1.0}) > 1.5
        (row,) = priors.calibration().values()
        assert row["count"] == 5
        assert row["covered"] == float(math.log(2.0 / 1.5) <= COVERED * 0.3)


def test_a_workers_speed_is_measured_against_the_others() -> None:
    speeds = Speeds()
    for _ in range(5):
        speeds.note("fast", 4.0, 1.0)
        speeds.note("middle", 4.0, 2.0)
        speeds.note("slow", 4.0, 8.0)
    assert speeds.of("fast") == pytest.approx(2.0)
    assert speeds.of("middle") == pytest.approx(1.0)
    assert speeds.of("slow") == pytest.approx(0.25)
    assert speeds.of("new") == 1.0
    speeds.forget("slow")
    assert speeds.of("slow") == 1.0
