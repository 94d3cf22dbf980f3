"""The training state's JSON, the seeds of steps, and the scalars of a step."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.messages import RankStep
from pretrain.metrics import scalars
from pretrain.state import TrainState, step_seed
from pretrain.trainer import SaveRetry

STATE = TrainState(seed=3, step=7, consumed_samples=70, incarnation=2, skipped=[5, 6], data_digest="ab")


def test_state_comes_back() -> None:
    assert TrainState.from_json(STATE.to_json()) == STATE


def test_steps_that_nobody_confirmed_go_with_the_state() -> None:
    said = RankStep(step=7, loss=2.5, grad_norm=1.0, tokens=64, seconds=0.1, lr=0.1, workers=1, ids=[3], batch=[3, 1],
                    incarnation=2, time=9.0)  # fmt: skip
    state = TrainState(seed=3, step=7, unheard=[said.model_dump(mode="json")])
    (back,) = TrainState.from_json(json.loads(json.dumps(state.to_json()))).unheard
    assert RankStep.model_validate(back) == said
    assert TrainState.from_json({key: value for key, value in STATE.to_json().items() if key != "unheard"}) == STATE


def test_who_goes_on_says_them_for_its_own_job_alone(tmp_path: Path) -> None:
    from pretrain import device

    device.prepare("cpu")
    from pretrain.assembly import _say_unheard
    from pretrain.channel import ListChannel

    said = RankStep(step=7, loss=2.5, grad_norm=1.0, tokens=64, seconds=0.1, lr=0.1, workers=1, ids=[3], batch=[3, 1],
                    incarnation=2, time=9.0)  # fmt: skip
    for job, expected in (("mine", [said.model_copy(update={"late": True})]), ("another", [])):
        state = TrainState(seed=3, step=7, unheard=[said.model_dump(mode="json") | {"job": job}])
        channel = ListChannel()
        spec: Any = SimpleNamespace(rank=0, job_folder=str(tmp_path / "jobs" / "mine"))
        _say_unheard(spec, state, channel)
        assert channel.sent == expected
        assert state.unheard == []


def test_a_state_is_not_shared_with_its_json() -> None:
    value = STATE.to_json()
    value["skipped"].append(9)
    assert STATE.skipped == [5, 6]


@pytest.mark.parametrize("change", [{"format": 99}, {"format": None}])
def test_another_format_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="format"):
        TrainState.from_json(STATE.to_json() | change)


def test_a_missing_key_is_named() -> None:
    value = STATE.to_json()
    del value["consumed_samples"]
    with pytest.raises(ValueError, match="consumed_samples"):
        TrainState.from_json(value)


def test_every_step_has_a_seed_of_its_own() -> None:
    seeds = {step_seed(seed, step) for seed in range(30) for step in range(100)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_failed_save_is_retried_after_1_2_4_steps() -> None:
    retry = SaveRetry()
    assert not retry.due(10)
    retry = retry.after_failure(10)
    assert (retry.due(10), retry.due(11)) == (False, True)
    retry = retry.after_failure(11)
    assert (retry.due(12), retry.due(13)) == (False, True)
    retry = retry.after_failure(13)
    assert (retry.due(16), retry.due(17)) == (False, True)


def test_scalars_leave_out_what_was_not_measured() -> None:
    step = RankStep(
        step=3, loss=2.0, grad_norm=0.5, tokens=100, seconds=0.25, lr=1e-3, workers=2, ids=[], incarnation=1, time=9.0
    )
    assert scalars(step) == {
        "train/loss": 2.0,
        "train/grad_norm": 0.5,
        "train/lr": 1e-3,
        "speed/step_seconds": 0.25,
        "speed/tokens_per_second": 400.0,
        "ranks/workers": 2.0,
    }
    assert scalars(step.model_copy(update={"valid_loss": 1.5}))["valid/loss"] == 1.5
