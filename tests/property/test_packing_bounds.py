"""The packing policy, played, against an exact solver on small cases and against lower bounds on large ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import mean

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from planner.packing import PendingShard, RunView, fluid_end
from planner.simulation.packing import PlayedSlot, play


def optimum(shards: Sequence[tuple[str, float]], slots: Sequence[PlayedSlot]) -> float:
    """The least makespan: min C with Σ_m x_jm = 1, Σ_j x_jm·s_j/speed_m + Σ_k load_m·y_mk ≤ C, x_jm ≤ y_mk(j)."""
    models = sorted({model for model, _ in shards})
    n, m, k = len(shards), len(slots), len(models)
    x = lambda j, i: j * m + i  # noqa: E731
    y = lambda i, model: n * m + i * k + models.index(model)  # noqa: E731
    size = n * m + m * k + 1
    rows, low, high = [], [], []

    def add(entries: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(size)
        for column, value in entries.items():
            row[column] = value
        rows.append(row)
        low.append(least)
        high.append(most)

    for j, (model, _) in enumerate(shards):
        add({x(j, i): 1.0 for i in range(m)}, 1, 1)
        for i, slot in enumerate(slots):
            if slot.model != model:
                add({x(j, i): 1.0, y(i, model): -1.0}, -np.inf, 0)
    for i, slot in enumerate(slots):
        entries = {x(j, i): seconds / slot.speed for j, (_, seconds) in enumerate(shards)}
        entries |= {y(i, model): slot.load_seconds for model in models if model != slot.model}
        add(entries | {size - 1: -1.0}, -np.inf, 0)
    goal = np.zeros(size)
    goal[-1] = 1
    found = milp(
        goal, constraints=LinearConstraint(np.array(rows), low, high), integrality=np.r_[np.ones(size - 1), 0],
        bounds=Bounds(0, np.r_[np.ones(size - 1), np.inf]),
    )  # fmt: skip
    return float(found.fun)


def views(shards: Sequence[tuple[str, float]], usual: float = float("inf")) -> list[RunView]:
    return [
        RunView(
            run=f"run {name}", created=0.0, model=name, usual=usual,
            pending=tuple(
                PendingShard(shard=f"{name}/{n}", seconds=s) for n, (model, s) in enumerate(shards) if model == name
            ),
        )
        for name in sorted({model for model, _ in shards})
    ]  # fmt: skip


@pytest.mark.parametrize("models", [1, 2])
def test_indivisible_shards_against_the_exact_solver(models: int) -> None:
    """Whole shards on slots of different speeds, one or two checkpoints with a price for changing between them."""
    ratios = []
    for seed in range(40):
        rng = random.Random(seed)
        slots = [
            PlayedSlot(name=f"s{n}", speed=rng.choice([0.5, 1.0, 1.0, 2.0]), model=rng.choice("ab"), load_seconds=1.0)
            for n in range(rng.randint(2, 3))
        ]
        shards = [("ab"[n % models], rng.uniform(1.0, 10.0)) for n in range(rng.randint(4, 8))]
        found = play(views(shards), slots)
        ratios.append(found.end / optimum(shards, slots))
    assert min(ratios) > 1 - 1e-6
    assert mean(ratios) < 1.10
    assert max(ratios) < 1.5


@pytest.mark.parametrize("count", [8, 32, 64])
def test_divisible_work_is_within_5_percent_of_the_lower_bound(count: int) -> None:
    """Slots of different speeds that come at different times; work in tasks of very different sizes."""
    rng = random.Random(count)
    slots = [PlayedSlot(name=f"{n:03d}", speed=rng.choice([0.6, 1.0, 1.4]), start=rng.uniform(0, 30), model="a")
             for n in range(count)]  # fmt: skip
    shards = [("a", rng.lognormvariate(4.0, 1.0)) for _ in range(2 * count)]
    found = play(views(shards, usual=5.0), slots)
    bound = fluid_end([(slot.start, slot.speed) for slot in slots], sum(seconds for _, seconds in shards))
    assert bound - 1e-6 <= found.end <= 1.05 * bound
    assert found.lost == 0


def test_slots_that_go_and_come_lose_only_what_was_in_hand() -> None:
    rng = random.Random(3)
    slots = [
        PlayedSlot(name=f"{n}", stop=rng.uniform(20, 60), model="a") if n < 6
        else PlayedSlot(name=f"{n}", start=rng.uniform(0, 60), model="a")
        for n in range(12)
    ]  # fmt: skip
    found = play(views([("a", 20.0)] * 30, usual=5.0), slots)
    assert found.work == pytest.approx(600.0)
    assert found.lost <= 6 * 5.0 + 1e-6
    fluid = 0.0
    for second in range(1000):
        fluid += sum(slot.speed for slot in slots if slot.start <= second < slot.stop)
        if fluid >= 600 + found.lost:
            break
    assert found.end <= 1.1 * (second + 1)


def test_a_worker_that_stands_still_holds_nobody_up() -> None:
    """One slot is a thousand times slower than it says: its shard is run a second time, and the first answer wins."""
    slots = [PlayedSlot(name=f"{n}", model="a") for n in range(8)]
    found = play(views([("a", 40.0)] * 8, usual=5.0), slots, actual=lambda name: 1000.0 if name == "3" else 1.0)
    assert found.copies >= 1
    assert found.end < 1.6 * 320 / 7


def test_work_without_a_slot_is_an_error() -> None:
    with pytest.raises(ValueError, match="no slot"):
        play(views([("a", 10.0)]), [PlayedSlot(name="s", stop=1.0)])
