"""Which Megatron tensor is which Hugging Face Llama tensor, and how one is cut out of the other. Pure.

Megatron's checkpoint stacks the layers of a kind in one global tensor with the layer as first axis; query, key
and value of a group lie together in ``linear_qkv``, gate and up projection one after the other in
``linear_fc1``. Rotary positions are rotated by halves on both sides, so no row is permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from planner.errors import BadInputError
from planner.pretrain_config import Model

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
_LAYER = "decoder.layers."
QKV = f"{_LAYER}self_attention.linear_qkv.weight"
FC1 = f"{_LAYER}mlp.linear_fc1.weight"
_PLAIN = {
    "input_layernorm.weight": f"{_LAYER}self_attention.linear_qkv.layer_norm_weight",
    "self_attn.o_proj.weight": f"{_LAYER}self_attention.linear_proj.weight",
    "post_attention_layernorm.weight": f"{_LAYER}mlp.linear_fc1.layer_norm_weight",
    "mlp.down_proj.weight": f"{_LAYER}mlp.linear_fc2.weight",
}


@dataclass(frozen=True)
class Source:
    """Where a Hugging Face tensor comes from: a global Megatron tensor, a layer of it, and rows of that layer."""

    name: str
    """Name in the Hugging Face model."""
    key: str
    """Name of the global tensor in the Megatron checkpoint."""
    layer: int | None
    """Index into the stacked first axis; None where the tensor is not stacked."""
    shape: tuple[int, ...]
    """Shape in the Hugging Face model."""
    cut: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Takes the layer's tensor to the Hugging Face tensor; None: it is the same."""


def split_qkv(fused: torch.Tensor, model: Model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value matrices out of Megatron's fused one: [groups × (queries per group + 2) × head, hidden]."""
    per_group, head = model.heads // model.groups, model.head_size
    grouped = fused.reshape(model.groups, per_group + 2, head, model.hidden_size)
    query = grouped[:, :per_group].reshape(model.heads * head, model.hidden_size)
    key = grouped[:, per_group].reshape(model.groups * head, model.hidden_size)
    value = grouped[:, per_group + 1].reshape(model.groups * head, model.hidden_size)
    return query, key, value


def fuse_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, model: Model) -> torch.Tensor:
    """The inverse of :func:`split_qkv`."""
    per_group, head = model.heads // model.groups, model.head_size
    parts = [
        query.reshape(model.groups, per_group, head, model.hidden_size),
        key.reshape(model.groups, 1, head, model.hidden_size),
        value.reshape(model.groups, 1, head, model.hidden_size),
    ]
    return torch.cat(parts, dim=1).reshape(-1, model.hidden_size)


def sources(model: Model, vocabulary: int) -> Iterator[Source]:
    """Every tensor of the Hugging Face model in its order, with where it comes from.

    Args:
        model: shape of the model.
        vocabulary: rows of the embedding, padding included.
    """
    hidden, ffn, head = model.hidden_size, model.ffn_hidden_size, model.head_size
    yield Source("model.embed_tokens.weight", EMBEDDING, None, (vocabulary, hidden))
    shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, model.heads * head),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        for index, (part, heads) in enumerate((("q", model.heads), ("k", model.groups), ("v", model.groups))):
            yield Source(
                f"{prefix}self_attn.{part}_proj.weight",
                QKV,
                layer,
                (heads * head, hidden),
                lambda fused, index=index: split_qkv(fused, model)[index],  # type: ignore[misc]
            )
        yield Source(f"{prefix}mlp.gate_proj.weight", FC1, layer, (ffn, hidden), lambda fused: fused[:ffn])
        yield Source(f"{prefix}mlp.up_proj.weight", FC1, layer, (ffn, hidden), lambda fused: fused[ffn:])
        for name, key in _PLAIN.items():
            yield Source(prefix + name, key, layer, shapes[name])
    yield Source("model.norm.weight", FINAL_NORM, None, (hidden,))
    if not model.tie_embeddings:
        yield Source("lm_head.weight", OUTPUT, None, (vocabulary, hidden))


def megatron_tensor(key: str, layer: int | None, model: Model, get: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The Megatron tensor ``key`` (of ``layer``, where stacked) made from Hugging Face tensors that ``get`` fetches.

    Raises:
        BadInputError: the Hugging Face Llama has nothing that belongs there.
    """
    if layer is None:
        names = {EMBEDDING: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", OUTPUT: "lm_head.weight"}
        if key in names:
            return get(names[key])
    else:
        prefix = f"model.layers.{layer}."
        if key == QKV:
            query, keys, values = (get(f"{prefix}self_attn.{part}_proj.weight") for part in "qkv")
            return fuse_qkv(query, keys, values, model)
        if key == FC1:
            return torch.cat([get(f"{prefix}mlp.gate_proj.weight"), get(f"{prefix}mlp.up_proj.weight")])
        for name, plain in _PLAIN.items():
            if key == plain:
                return get(prefix + name)
    raise BadInputError(f"a Llama model has no tensor for Megatron's {key}")
