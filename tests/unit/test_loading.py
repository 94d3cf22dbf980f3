"""Bad settings end in one line that names file, field and value."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import BadInputError
from planner.loading import load, read_yaml
from planner.pretrain_config import PretrainConfig

GOOD = """
name: tiny
workers: {min: 1, max: 2}
model: {layers: 4, hidden_size: 128, ffn_hidden_size: 384, heads: 4, kv_heads: 2, seq_length: 64}
data: {train: [stdlib]}
batch: {global: 16, micro: 2}
optimizer: {lr: 1.0e-3, min_lr: 1.0e-4, warmup_steps: 2}
steps: 30
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_good_config_survives_its_own_json(tmp_path: Path) -> None:
    config = load(PretrainConfig, write(tmp_path, GOOD))
    assert config.batch.micro_batches == 8
    assert config.model.groups == 2
    assert PretrainConfig.model_validate(config.to_json()) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("colour: red", ["colour", "unknown key", "red"]),
        ("steps: many", ["steps", "many"]),
        ("steps: 0", ["steps", "0"]),
        ("batch: {global: 15, micro: 2}", ["15", "micro 2"]),
        ("parallel: {pipeline: 3}", ["layers 4", "pipeline 3"]),
        ("parallel: {tensor: 3}", ["heads 4", "tensor 3"]),
        ("parallel: {tensor: 2}", ["workers.min 1", "= 2"]),
        ("workers: {min: 3, max: 2}", ["max 2", "min 3"]),
        ("name: No Spaces", ["name", "No Spaces"]),
        ("optimizer: {lr: 1.0e-4, min_lr: 1.0e-3}", ["min_lr 0.001", "lr 0.0001"]),
        ("faults: [{at_step: 5, kind: sigkill, rank: 7}]", ["faults.0.rank 7", "workers.max 2"]),
        ("faults: [{at_step: 99, kind: sigkill}]", ["faults.0.at_step 99", "30"]),
        ("faults: [{at_step: 5, kind: meteor}]", ["faults.0.kind", "meteor"]),
        ("evaluate: {tasks: [x]}\nmodel: {layers: 4, hidden_size: 96, ffn_hidden_size: 8, heads: 4, seq_length: 8}",
         ["head size of 24"]),
    ],
)  # fmt: skip
def test_bad_value_is_named(tmp_path: Path, change: str, words: list[str]) -> None:
    keys = {line.split(":")[0] for line in change.splitlines()}
    kept = "\n".join(line for line in GOOD.splitlines() if line.split(":")[0] not in keys)
    path = write(tmp_path, f"{kept}\n{change}\n")
    with pytest.raises(BadInputError) as caught:
        load(PretrainConfig, path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "word"),
    [("[1, 2]", "mapping"), ("a: 1\na: 2", "twice"), ("a: [", "YAML"), ("b: {x: 1, x: 2}", "twice"), ("", "mapping")],
)
def test_bad_yaml_is_one_line(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(BadInputError, match=word) as caught:
        read_yaml(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "raw.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="UTF-8"):
        read_yaml(tmp_path / "raw.yaml")
    with pytest.raises(BadInputError, match="cannot be read"):
        read_yaml(tmp_path)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    config = load(PretrainConfig, write(tmp_path, GOOD), ["batch.global=32", "checkpoint.keep=7", "steps=40"])
    assert (config.batch.global_, config.checkpoint.keep, config.steps) == (32, 7, 40)


@pytest.mark.parametrize(
    ("item", "word"), [("steps", "key=value"), ("steps.x=1", "not a mapping"), ("=3", "key=value")]
)
def test_bad_override(tmp_path: Path, item: str, word: str) -> None:
    with pytest.raises(BadInputError, match=word):
        load(PretrainConfig, write(tmp_path, GOOD), [item])
