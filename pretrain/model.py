"""A Llama-shaped Megatron-core GPT from a :class:`PretrainConfig`: RMSNorm, rotary positions, SwiGLU, grouped queries.

Weights are drawn per parameter from (seed, global name) and then cut, so that every tensor and pipeline layout
starts from the same model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from planner.pretrain_config import PretrainConfig
from pretrain import device

VOCABULARY_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, so that tensor parallelism divides it and matrices are regular."""

_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


def padded_vocabulary(size: int, tensor: int = 1) -> int:
    """The vocabulary of the model for a tokenizer of ``size`` tokens; the same for every power of two up to 64."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor)
    return -(-size // multiple) * multiple


def has_transformer_engine() -> bool:
    """Whether the Transformer Engine layers are to be used: on a GPU where it is installed."""
    if not device.has_cuda():
        return False
    try:
        import transformer_engine  # noqa: F401
    except ImportError:
        return False
    return True


def layer_spec() -> ModuleSpec:
    """Transformer Engine's layers on a GPU that has it, Megatron's own everywhere else."""
    if has_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec()
    return get_gpt_layer_local_spec(normalization="RMSNorm")


def transformer_config(config: PretrainConfig) -> TransformerConfig:
    """Megatron's view of ``config``. Needs no process group."""
    shape = config.model
    bf16 = shape.dtype == "bfloat16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=shape.init_std,
        tensor_model_parallel_size=config.parallel.tensor,
        pipeline_model_parallel_size=config.parallel.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        calculate_per_token_loss=True,  # gradients are summed over replicas; the loss carries the 1/tokens
        use_cpu_initialization=not device.has_cuda(),
        variable_seq_lengths=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def build(config: PretrainConfig, vocabulary: int) -> GPTModel:
    """This rank's part of the model with its initial weights. Process groups must be there.

    Args:
        config: the job.
        vocabulary: padded vocabulary (:func:`padded_vocabulary`).
    """
    shape = config.model
    with device.emulation():
        model = GPTModel(
            config=transformer_config(config),
            transformer_layer_spec=layer_spec(),
            vocab_size=vocabulary,
            max_sequence_length=shape.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=shape.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
        )
        if device.has_cuda():
            model.cuda(torch.cuda.current_device())
        if shape.dtype == "bfloat16":
            model.bfloat16()
    initialise(model, config)
    return model


def wrap(model: GPTModel, *, distributed_optimizer: bool | None = None) -> DistributedDataParallel:
    """``model`` with gradient buffers over the present data-parallel group; gradients are summed, not averaged.

    Called again over the same module after a re-form: parameters stay, buffers are new and zero.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=device.has_cuda() if distributed_optimizer is None else distributed_optimizer,
        check_for_nan_in_grad=False,  # the trainer's guard judges the summed gradient and says so
    )
    with device.emulation():
        return DistributedDataParallel(config=model.config, ddp_config=settings, module=model)


def unwrap(chunk: Any) -> GPTModel:
    """The Megatron model inside its wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def global_names(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with names that are the same in every pipeline layout (layers counted from 0 over all stages)."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        yield ".".join(parts), parameter


@torch.no_grad()
def initialise(model: GPTModel, config: PretrainConfig) -> None:
    """Draw every matrix from (seed, global name) and keep this tensor rank's part; norm weights stay 1.

    Matrices that write into the residual stream get a standard deviation smaller by √(2 · layers), as in GPT-2.
    """
    size = config.parallel.tensor
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in global_names(model):
        if parameter.dim() < 2:
            continue
        if name == "output_layer.weight" and config.model.tie_embeddings:
            name = "embedding.word_embeddings.weight"  # the last stage's copy starts equal to the first stage's
        std = config.model.init_std
        if name.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * config.model.layers)
        dimension = getattr(parameter, "partition_dim", -1)
        full_shape = list(parameter.shape)
        if size > 1 and dimension >= 0:
            full_shape[dimension] *= size
        generator = torch.Generator().manual_seed(_parameter_seed(config.seed, name))
        full = torch.empty(full_shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        if size > 1 and dimension >= 0:
            full = _tensor_part(full, dimension, 2 if name.endswith("linear_fc1.weight") else 1, rank, size)
        parameter.copy_(full.to(parameter.dtype))


def _tensor_part(full: torch.Tensor, dimension: int, blocks: int, rank: int, size: int) -> torch.Tensor:
    """Rank's part of a matrix; SwiGLU's first matrix is two blocks (gate, up), of each of which a rank holds a part."""
    parts = [block.chunk(size, dim=dimension)[rank] for block in full.chunk(blocks, dim=dimension)]
    return torch.cat(parts, dim=dimension)


def _parameter_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")


def count_parameters(config: PretrainConfig, vocabulary: int) -> int:
    """Parameters of the whole model."""
    shape = config.model
    attention = shape.hidden_size * shape.head_size * (2 * shape.heads + 2 * shape.groups)
    feed_forward = 3 * shape.hidden_size * shape.ffn_hidden_size
    embeddings = vocabulary * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    return shape.layers * (attention + feed_forward + 2 * shape.hidden_size) + embeddings + shape.hidden_size


def flop_per_token(config: PretrainConfig, vocabulary: int) -> float:
    """Floating-point operations of forward and backward per token: 6 per weight in a product, and attention's own."""
    weights = count_parameters(config, vocabulary)
    if not config.model.tie_embeddings:
        weights -= vocabulary * config.model.hidden_size  # looking an embedding up is no product
    return 6.0 * weights + 12.0 * config.model.layers * config.model.hidden_size * config.model.seq_length
