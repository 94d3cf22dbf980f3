"""The same loss curve and the same samples on every layout, and a resumed run equal to the uninterrupted one.

Real ranks over gloo; the reference is one rank without any interruption.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import ForkServer
from tests.support.ranks import RankRun, run_ranks, tiny

TOLERANCE = 1e-6
SHAPES = {
    "grouped": {"workers": {"min": 1, "max": 8}},
    "tied": {"model": {"tie_embeddings": True}},
}


def config(tensor: int = 1, pipeline: int = 1, **changes: Any) -> Any:
    return tiny(
        parallel={"tensor": tensor, "pipeline": pipeline}, workers={"min": tensor * pipeline, "max": 8}, **changes
    )


@pytest.fixture(scope="module")
def references(trainers: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankRun]:
    """One rank, uninterrupted, per shape of the model."""
    folder = tmp_path_factory.mktemp("reference")
    return {
        name: run_ranks(
            config(**{k: v for k, v in shape.items() if k != "workers"}), 1, folder / name, server=trainers
        )[0]
        for name, shape in SHAPES.items()
    }


def samples(runs: list[RankRun]) -> dict[int, list[int]]:
    """Sample ids of every step over all ranks, sorted."""
    ids: dict[int, list[int]] = {}
    for run in runs:
        for step in run.of("step"):
            ids.setdefault(step["step"], []).extend(step["ids"])
    return {step: sorted(drawn) for step, drawn in ids.items()}


def assert_same(runs: list[RankRun], reference: RankRun, steps: range) -> None:
    """Every rank of ``runs`` tells the reference's losses, norms and held-out losses; together they ran its samples."""
    expected = {step["step"]: step for step in reference.of("step")}
    for run in runs:
        told = {step["step"]: step for step in run.of("step")}
        assert list(told) == list(steps)
        for number, step in told.items():
            assert step["loss"] == pytest.approx(expected[number]["loss"], abs=TOLERANCE)
            assert step["grad_norm"] == pytest.approx(expected[number]["grad_norm"], rel=1e-5)
            assert step["lr"] == expected[number]["lr"]
            if expected[number]["valid_loss"] is None:
                assert step["valid_loss"] is None
            else:
                assert step["valid_loss"] == pytest.approx(expected[number]["valid_loss"], abs=TOLERANCE)
    assert samples(runs) == {step: ids for step, ids in samples([reference]).items() if step in steps}


@pytest.mark.parametrize(
    ("shape", "world", "tensor", "pipeline"),
    [
        ("grouped", 2, 1, 1),
        ("grouped", 3, 1, 1),
        ("grouped", 2, 2, 1),
        ("grouped", 2, 1, 2),
        ("grouped", 4, 2, 2),
        ("grouped", 4, 1, 2),
        ("tied", 2, 1, 2),
        ("tied", 4, 2, 1),
    ],
)
def test_every_layout_has_the_curve_of_one_rank(
    trainers: ForkServer,
    references: dict[str, RankRun],
    tmp_path: Path,
    shape: str,
    world: int,
    tensor: int,
    pipeline: int,
) -> None:
    changes = {key: value for key, value in SHAPES[shape].items() if key != "workers"}
    runs = run_ranks(config(tensor, pipeline, **changes), world, tmp_path, server=trainers)
    assert_same(runs, references[shape], range(1, 7))


def test_five_micro_batches_over_three_ranks_are_uneven(trainers: ForkServer, tmp_path: Path) -> None:
    runs = run_ranks(config(steps=2), 3, tmp_path, server=trainers)
    assert [len(run.of("step")[0]["ids"]) for run in runs] == [4, 4, 2]


def test_more_ranks_than_micro_batches_still_train(
    trainers: ForkServer, references: dict[str, RankRun], tmp_path: Path
) -> None:
    small: dict[str, Any] = {"batch": {"global": 2, "micro": 2}, "steps": 2}
    one = run_ranks(config(**small), 1, tmp_path / "one", server=trainers)
    three = run_ranks(config(**small), 3, tmp_path / "three", server=trainers)
    assert_same(three, one[0], range(1, 3))


def test_a_resumed_run_equals_the_uninterrupted_one_on_every_layout(
    trainers: ForkServer, references: dict[str, RankRun], tmp_path: Path
) -> None:
    first = run_ranks(config(), 2, tmp_path, server=trainers)
    published = next(item for item in first[0].of("checkpoint") if item["step"] == 3)
    assert published["what"] == "published"
    for number, (world, tensor, pipeline) in enumerate([(1, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2)], start=2):
        runs = run_ranks(
            config(tensor, pipeline), world, tmp_path, server=trainers, incarnation=number, resume=published["path"]
        )
        assert_same(runs, references["grouped"], range(4, 7))
        assert all(step["incarnation"] == number for step in runs[0].of("step"))


def test_bfloat16_resumes_exactly_too(trainers: ForkServer, tmp_path: Path) -> None:
    half = {"model": {"dtype": "bfloat16"}}
    whole = run_ranks(config(**half), 1, tmp_path, server=trainers)[0]
    path = str(tmp_path / "checkpoints" / "step-00000003")
    rest = run_ranks(config(**half), 1, tmp_path, server=trainers, incarnation=2, resume=path)[0]
    assert rest.losses == {step: loss for step, loss in whole.losses.items() if step > 3}
    assert whole.losses[6] < whole.losses[1] - 0.3


def test_epochs_follow_each_other_across_changes_of_size(trainers: ForkServer, tmp_path: Path) -> None:
    """D1, D2: a corpus of seven samples: a step of ten goes through more than one epoch, and no id comes twice."""
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 29)
    data = {"train": [str(text)]}
    first = run_ranks(config(data=data), 3, tmp_path / "job", server=trainers)
    path = str(tmp_path / "job" / "checkpoints" / "step-00000003")
    then = run_ranks(config(data=data), 2, tmp_path / "job", server=trainers, incarnation=2, resume=path)
    drawn = samples(first)
    assert samples(then) == {step: drawn[step] for step in (4, 5, 6)}
    assert sorted(sample for ids in drawn.values() for sample in ids)[:56] == list(range(56))
    assert len({sample for ids in drawn.values() for sample in ids}) == 60
    assert first[0].of("step")[0]["valid_loss"] is None, "a single file leaves nothing to hold out"
    smaller = config(data=data, batch={"global": 6})  # D4: in the middle of an epoch, the position alone decides
    other = samples(run_ranks(smaller, 1, tmp_path / "job", server=trainers, incarnation=3, resume=path))
    redrawn = [sample for step in (4, 5, 6) for sample in other[step]]
    assert len(set(redrawn)) == 18
    assert set(drawn[4]) <= set(redrawn) <= set(drawn[4]) | set(drawn[5])


def test_loss_starts_at_that_of_a_uniform_guess_and_falls(references: dict[str, RankRun]) -> None:
    losses = references["grouped"].losses
    assert losses[1] == pytest.approx(math.log(320), abs=0.1)
    assert losses[6] < losses[1] - 0.3
