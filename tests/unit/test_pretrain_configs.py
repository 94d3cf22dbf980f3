"""Every shipped pretraining config loads, its data is there, and the demo's shape is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.loading import load
from planner.pretrain_config import PretrainConfig
from planner.resources import configs_dir
from pretrain import data, device
from pretrain.parallel import layout

device.prepare()

from pretrain.model import count_parameters, padded_vocabulary  # noqa: E402
from pretrain.tokenizer import ByteTokenizer  # noqa: E402

FILES = sorted((configs_dir() / "pretrain").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_loads_and_could_start(path: Path) -> None:
    config = load(PretrainConfig, path)
    assert PretrainConfig.model_validate(config.to_json()) == config
    data.check(config.data)
    for ranks in (config.workers.min, config.workers.max):
        layout(0, ranks, config.parallel.tensor, config.parallel.pipeline)


def test_the_demo_is_as_large_as_it_says_and_publishes_often_enough() -> None:
    config = load(PretrainConfig, configs_dir() / "pretrain" / "demo.yaml")
    parameters = count_parameters(config, padded_vocabulary(ByteTokenizer.size))
    assert 1_000_000 <= parameters <= 3_000_000
    assert config.steps // config.checkpoint.every_steps >= 5
    assert config.checkpoint.keep >= config.steps // config.checkpoint.every_steps
    assert config.model.head_size in (32, 64)
