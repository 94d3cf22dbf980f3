"""Megatron's AdamW over the model's chunks, and the cosine schedule with linear warm-up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from planner.pretrain_config import PretrainConfig
from pretrain import device


def build_optimizer(config: PretrainConfig, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """The optimizer: the distributed one on GPUs, the plain one on CPU (where only its state can be loaded again)."""
    settings = config.optimizer
    bf16 = config.model.dtype == "bfloat16"
    with device.emulation():
        return get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                clip_grad=settings.clip_grad,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=chunks[0].ddp_config.use_distributed_optimizer,
            ),
            list(chunks),
            use_gloo_process_groups=device.has_cuda(),
        )


def build_schedule(config: PretrainConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The learning rate per step: :func:`advance` it to step s before the s-th update; the last has ``min_lr``."""
    settings = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(config.steps, settings.warmup_steps + 1),
        lr_decay_style="cosine",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=config.steps,
        wd_incr_style="constant",
    )


def advance(schedule: OptimizerParamScheduler, step: int) -> float:
    """Set the rate of ``step`` (1-based) whatever was set before, and return it; repeating it changes nothing."""
    schedule.step(step - schedule.num_steps)
    return float(schedule.optimizer.param_groups[0]["lr"])
