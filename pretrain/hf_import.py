"""A Hugging Face Llama-type model as the start of pretraining; the exact inverse of :mod:`pretrain.export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from planner.errors import BadInputError
from planner.pretrain_config import Model
from pretrain import llama_names
from pretrain.export import read_config
from pretrain.safetensors_stream import INDEX, SINGLE


class HuggingFaceWeights:
    """The tensors of a safetensors folder by name, mapped and read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``.

        Raises:
            BadInputError: it holds no safetensors.
        """
        from safetensors import safe_open

        self._open = safe_open
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            try:
                where = json.loads(index.read_text())["weight_map"]
            except (ValueError, KeyError) as error:
                raise BadInputError(f"{index}: not a safetensors index ({error})") from error
            self._where = {str(name): folder / str(file) for name, file in where.items()}
        elif (folder / SINGLE).is_file():
            with safe_open(folder / SINGLE, framework="pt") as held:
                self._where = dict.fromkeys(held.keys(), folder / SINGLE)
        else:
            raise BadInputError(f"{folder}: no {SINGLE} and no {INDEX}; convert the model to safetensors first")

    def get(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            BadInputError: the model has no such tensor.
        """
        path = self._where.get(name)
        if path is None:
            raise BadInputError(f"{self.folder}: has no tensor {name}; only Llama-type models can be imported")
        with self._open(path, framework="pt") as held:
            return torch.as_tensor(held.get_tensor(name))


def model_settings(folder: Path) -> Model:
    """The ``model`` section of a pretraining config that the Hugging Face model in ``folder`` fits.

    Raises:
        BadInputError: the model computes something that this project's Llama does not; names the field.
    """
    config = read_config(folder)
    path = folder / "config.json"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    heads = _number(config, "num_attention_heads", path)
    wanted: list[tuple[str, Any, Any]] = [
        ("model_type", config.get("model_type"), "llama"),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(config.get("attention_bias", False)), False),
        ("mlp_bias", bool(config.get("mlp_bias", False)), False),
        ("rope type", kind, "default"),
        ("head_dim", config.get("head_dim") or config["hidden_size"] // heads, config["hidden_size"] // heads),
    ]
    for field, found, supported in wanted:
        if found != supported:
            raise BadInputError(f"{path}: {field} is {found!r}; only {supported!r} can be imported")
    return Model(
        layers=_number(config, "num_hidden_layers", path),
        hidden_size=_number(config, "hidden_size", path),
        ffn_hidden_size=_number(config, "intermediate_size", path),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        seq_length=_number(config, "max_position_embeddings", path),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype="bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float32",
    )


def _number(config: dict[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise BadInputError(f"{path}: {key}: {value!r} is no positive number")
    return value


def check_shape(folder: Path, model: Model) -> None:
    """Refuse a Hugging Face model whose shape is not that of the job.

    Raises:
        BadInputError: names the field and both values.
    """
    found = model_settings(folder)
    for field in ("layers", "hidden_size", "ffn_hidden_size", "heads", "groups", "tie_embeddings"):
        if getattr(found, field) != getattr(model, field):
            raise BadInputError(
                f"{folder}: model.{field} is {getattr(found, field)!r}, the job says {getattr(model, field)!r}"
            )
    for field in ("rope_theta", "norm_eps"):
        if abs(getattr(found, field) - getattr(model, field)) > 1e-12 * abs(getattr(model, field)):
            raise BadInputError(
                f"{folder}: model.{field} is {getattr(found, field)!r}, the job says {getattr(model, field)!r}"
            )


@torch.no_grad()
def load_weights(folder: Path, chunk: Any, model: Model) -> None:
    """Copy the weights of a Hugging Face model into this rank's part of a Megatron model, whatever its layout.

    No collective: each rank reads what it needs. Rows that padding adds to the vocabulary become zero. Call it
    before the optimizer is built, since half-precision optimizers copy the weights when they are made.

    Raises:
        BadInputError: another shape, or not a Llama-type model.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

    from pretrain import device
    from pretrain.checkpoint import unwrap

    check_shape(folder, model)
    weights = HuggingFaceWeights(folder)
    with device.emulation():
        sharded, _ = save_preprocess(unwrap(chunk).sharded_state_dict(), validate_access_integrity=False)
    for target in nested_values(sharded):
        if not isinstance(target, ShardedTensor):
            continue
        offset = tuple(target.global_offset)
        layer = offset[0] if target.prepend_axis_num else None
        whole = llama_names.megatron_tensor(target.key, layer, model, weights.get)
        offset, shape = offset[target.prepend_axis_num :], tuple(target.local_shape)
        if target.key in (llama_names.EMBEDDING, llama_names.OUTPUT):
            whole = _padded(whole, next(iter(target.global_shape)))
        part = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
        if tuple(part.shape) != shape:
            raise BadInputError(f"{folder}: {target.key} is {tuple(whole.shape)}, too small for {offset} + {shape}")
        target.data.detach().copy_(part)


def _padded(embedding: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - embedding.shape[0]
    if missing < 0:
        raise BadInputError(f"the imported vocabulary has {embedding.shape[0]} rows, the job's tokenizer only {rows}")
    return torch.cat([embedding, embedding.new_zeros(missing, embedding.shape[1])]) if missing else embedding
