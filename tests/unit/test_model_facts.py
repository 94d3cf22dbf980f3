"""What a model directory says about itself, compared with what vLLM would derive; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evalsched.engine import EngineSettings, engine_key, is_out_of_memory
from evalsched.models import ModelFacts
from planner.errors import BadInputError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "max_position_embeddings": 512, "dtype": "float32",
}  # fmt: skip


def folder(tmp_path: Path, config: dict[str, Any], **files: str) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for name, text in {"model.safetensors": "weights", "tokenizer.json": "{}", **files}.items():
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize(
    ("more", "length"),
    [
        ({}, 512),
        ({"max_position_embeddings": None}, 2048),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 512),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 512),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}, "original_max_position_embeddings": 256}, 256),
    ],
)
def test_the_window_is_what_vllm_derives(tmp_path: Path, more: dict[str, Any], length: int) -> None:
    assert ModelFacts.read(folder(tmp_path, LLAMA | more)).window().max_length == length


def test_the_tokenizers_limit_counts(tmp_path: Path) -> None:
    path = folder(tmp_path, LLAMA, **{"tokenizer_config.json": json.dumps({"model_max_length": 300})})
    assert ModelFacts.read(path).max_length() == 300
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1e30}))
    assert ModelFacts.read(path).max_length() == 512


def test_shape_and_type(tmp_path: Path) -> None:
    facts = ModelFacts.read(folder(tmp_path, LLAMA))
    assert facts.head_size == 32
    assert facts.dtype() == "float32", "no silent downcast"
    assert facts.dtype("bfloat16") == "bfloat16"
    assert facts.cache_bytes_per_token("float32") == 2 * 3 * 2 * 32 * 4
    facts.check_cpu()
    with pytest.raises(BadInputError, match="dtype 'int3'"):
        facts.dtype("int3")


def test_a_head_size_that_no_cpu_kernel_has_is_refused_by_name(tmp_path: Path) -> None:
    facts = ModelFacts.read(folder(tmp_path, LLAMA | {"head_dim": 24}))
    with pytest.raises(BadInputError, match=r"config\.json: head size 24 cannot be served on CPU"):
        facts.check_cpu()


def test_incomplete_folders_are_refused_by_the_missing_file(tmp_path: Path) -> None:
    path = folder(tmp_path, LLAMA)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInputError, match=r"model-00001-of-00002\.safetensors is missing .and 1 more"):
        ModelFacts.read(path)
    (path / "config.json").write_text("[]")
    with pytest.raises(BadInputError, match="a JSON object is needed"):
        ModelFacts.read(path)
    (path / "config.json").write_text("{")
    with pytest.raises(BadInputError, match="cannot be read"):
        ModelFacts.read(path)
    with pytest.raises(BadInputError, match="no such directory"):
        ModelFacts.read(tmp_path / "none")


def test_the_engines_key_holds_what_decides_the_last_digits(tmp_path: Path) -> None:
    facts = ModelFacts.read(folder(tmp_path, LLAMA))
    key = engine_key(facts, EngineSettings())
    assert key["lm_eval"] == "0.4.13"
    assert "torch" in key
    for changed in (EngineSettings(exact=True), EngineSettings(dtype="bfloat16"), EngineSettings(max_gen_toks=7)):
        assert engine_key(facts, changed) != key
    assert engine_key(facts, EngineSettings(threads=7)) == key
    assert engine_key(facts, EngineSettings(), "cuda") != key


def test_what_out_of_memory_looks_like() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
