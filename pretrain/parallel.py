"""Process groups of an incarnation: joined over a store that outlives any rank, left without ceremony."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from planner.errors import BadInputError, MissingServiceError
from pretrain import device

STORE_SECONDS = 120.0
"""Longest wait for the rendezvous store and for the other ranks to join."""
COLLECTIVE_SECONDS = 600.0
"""Last resort against a collective that never ends; detection acts long before."""


@dataclass(frozen=True)
class Layout:
    """Where this rank stands: sizes and coordinates in Megatron's order (tensor fastest, then data, then pipeline)."""

    rank: int
    world_size: int
    tensor: int
    pipeline: int
    data: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int

    @property
    def first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def reads_data(self) -> bool:
        """Whether this rank stands for its replica in the account of samples."""
        return self.first_stage and self.tensor_rank == 0


def layout(rank: int, world_size: int, tensor: int, pipeline: int) -> Layout:
    """The coordinates of ``rank``.

    Raises:
        BadInputError: the world does not divide into model replicas.
    """
    group = tensor * pipeline
    if world_size < group or world_size % group:
        raise BadInputError(
            f"parallel.tensor {tensor} × parallel.pipeline {pipeline} = {group} does not divide the {world_size} ranks "
            "granted; ask for a multiple with workers.min and workers.max"
        )
    data = world_size // group
    return Layout(
        rank=rank,
        world_size=world_size,
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        tensor_rank=rank % tensor,
        data_rank=rank // tensor % data,
        pipeline_rank=rank // (tensor * data),
    )


def interface_of(address: str) -> str | None:
    """Name of the network interface that holds ``address`` (any 127.x.y.z is the loopback's), or None."""
    wanted = ipaddress.ip_address(address)
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            try:
                held = ipaddress.ip_address(entry.address.partition("%")[0])
            except ValueError:
                continue
            if held == wanted or (held.is_loopback and wanted.is_loopback):
                return name
    return None


def join(
    where: Layout,
    *,
    store_host: str,
    store_port: int,
    prefix: str,
    bind_address: str = "127.0.0.1",
    store_seconds: float = STORE_SECONDS,
    collective_seconds: float = COLLECTIVE_SECONDS,
) -> None:
    """Join the incarnation's process groups: the world, then Megatron's tensor, pipeline and data groups.

    Args:
        where: this rank's coordinates.
        store_host: host of the rendezvous store.
        store_port: its port.
        prefix: ``<job>/<incarnation>``; keys of different incarnations never meet.
        bind_address: address whose interface gloo and NCCL use.
        store_seconds: longest wait for the store and the other ranks.
        collective_seconds: time-out of every collective.

    Raises:
        MissingServiceError: the store does not answer.
    """
    interface = interface_of(bind_address)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    try:
        store = TCPStore(store_host, store_port, is_master=False, timeout=timedelta(seconds=store_seconds))
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise MissingServiceError(
            f"rendezvous store {store_host}:{store_port} does not answer within {store_seconds:.0f} s"
        ) from error
    dist.init_process_group(
        "nccl" if device.has_cuda() else "gloo",
        store=PrefixStore(prefix, store),
        rank=where.rank,
        world_size=where.world_size,
        timeout=timedelta(seconds=collective_seconds),
    )
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=where.tensor,
        pipeline_model_parallel_size=where.pipeline,
        distributed_timeout_minutes=max(1, round(collective_seconds / 60)),
        create_gloo_process_groups=device.has_cuda(),
    )


def leave() -> None:
    """Drop every process group at once, without waiting for anybody; harmless when none is there.

    Also after a join that failed half-way, so that the next one starts from nothing: torch names groups by a
    counter that must be equal on all ranks, and Megatron refuses to set what is set.
    """
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    distributed_c10d._world.group_count = 0


def seed_generators(seed: int) -> None:
    """Seed torch's and Megatron's generators, the latter differently per tensor rank where Megatron needs that."""
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
