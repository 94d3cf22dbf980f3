"""A training rank that obeys JSON lines on standard input: join, train, save, load, snapshot, leave.

One process serves many layouts (it leaves and joins again), because importing torch and Megatron is what
takes the time. Answers are JSON lines on the descriptor that it was given.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.pretrain_config import PretrainConfig
from pretrain import checkpoint, device, hf_import, optimizer, parallel, snapshot, snapshot_state
from pretrain import model as model_module
from pretrain.published import Fence
from pretrain.snapshot_writer import SnapshotWriter
from pretrain.state import TrainState
from tests.support.fork_server import KEPT

BASE = {
    "name": "pool",
    "model": {"layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "heads": 4, "kv_heads": 2, "seq_length": 32},
    "data": {"train": ["unused"]},
    "batch": {"global": 4, "micro": 2},
    "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2},
    "steps": 100,
}
VOCABULARY = 320


class Rank:
    """One rank: its model and optimizer in the present layout."""

    def __init__(self) -> None:
        self.parts: checkpoint.Parts | None = None
        self.config: PretrainConfig | None = None
        self.layout: parallel.Layout | None = None
        self.writer: SnapshotWriter | None = None

    def join(self, rank: int, world: int, tensor: int, pipeline: int, port: int, prefix: str, **overrides: Any) -> None:
        """Join a fresh incarnation and build model and optimizer from the seed."""
        self.leave()
        data = json.loads(json.dumps(BASE))
        data["parallel"] = {"tensor": tensor, "pipeline": pipeline}
        data["workers"] = {"min": tensor * pipeline, "max": world}
        data["model"] |= overrides.get("model", {})
        self.config = PretrainConfig.model_validate(data)
        self.layout = parallel.layout(rank, world, tensor, pipeline)
        parallel.join(self.layout, store_host="127.0.0.1", store_port=port, prefix=prefix, collective_seconds=60)
        parallel.seed_generators(self.config.seed)
        self.fresh()

    def leave(self) -> None:
        """Drop the process groups and what holds them: each has threads, which end with its last reference."""
        self.parts = self.writer = None
        parallel.leave()
        gc.collect()

    def fresh(self) -> None:
        """Model and optimizer from the seed, in the present layout."""
        assert self.config is not None
        chunk = model_module.wrap(model_module.build(self.config, VOCABULARY))
        adam = optimizer.build_optimizer(self.config, [chunk])
        schedule = optimizer.build_schedule(self.config, adam)
        self.parts = checkpoint.Parts(
            model=chunk,
            optimizer=adam,
            schedule=schedule,
            state=TrainState(seed=1234),
            config=self.config,
            vocabulary=VOCABULARY,
        )

    def train(self, steps: int) -> list[float]:
        """Train on tokens that depend on the step alone; the losses, known on the last stage (else zeros)."""
        return [self._step() for _ in range(steps)]

    def _step(self) -> float:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        assert self.parts is not None
        assert self.config is not None
        assert self.layout is not None
        parts, length = self.parts, self.config.model.seq_length
        optimizer.advance(parts.schedule, parts.state.step + 1)
        parts.model.zero_grad_buffer()
        parts.optimizer.zero_grad()
        count = self.config.batch.micro_batches // self.layout.data
        first = self.layout.data_rank * count
        batches = iter([self._tokens(parts.state.step, first + index) for index in range(count)])

        def forward(_: Any, chunk: Any) -> Any:
            tokens = next(batches)
            positions = torch.arange(length).unsqueeze(0).expand(tokens.shape[0], -1)
            mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
            out = chunk(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous())

            def loss(values: torch.Tensor) -> Any:
                mean = values.float().mean()
                total = self.config.batch.micro_batches
                return mean / total, torch.tensor(1, dtype=torch.int), {"loss": mean.detach()}

            return out, loss

        with device.emulation():
            results = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter([None] * count),
                model=[parts.model],
                num_microbatches=count,
                seq_length=length,
                micro_batch_size=self.config.batch.micro,
            )
            finalize_model_grads([parts.model], None)
            if self.writer is not None:
                self.writer.finish()
            parts.optimizer.step()
        parts.state.step += 1
        parts.state.consumed_samples += self.config.batch.global_
        total = torch.tensor(sum(float(item["loss"]) for item in results) if results else 0.0, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.config.batch.micro_batches / self.layout.tensor

    def _tokens(self, step: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * 1000 + micro)
        assert self.config is not None
        shape = (self.config.batch.micro, self.config.model.seq_length + 1)
        return torch.randint(0, 256, shape, generator=generator)

    def logits(self, tokens: list[int]) -> list[list[float]]:
        """Logits of one sequence (gathered over tensor ranks), from a single pipeline stage."""
        assert self.parts is not None
        sequence = torch.tensor([tokens])
        positions = torch.arange(len(tokens)).unsqueeze(0)
        mask = torch.triu(torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool), 1)
        with torch.no_grad(), device.emulation():
            out = checkpoint.unwrap(self.parts.model)(sequence, positions, mask)
        return [[float(value) for value in row] for row in out[0]]

    def import_weights(self, path: str) -> None:
        """Start from a Hugging Face model's weights."""
        assert self.parts is not None
        assert self.config is not None
        hf_import.load_weights(Path(path), self.parts.model, self.config.model)

    def save(self, folder: str, incarnation: int = 1, token: int = 0, job: str = "pool") -> dict[str, Any]:
        """A synchronous save; its seconds."""
        assert self.parts is not None
        began = time.perf_counter()
        path = checkpoint.save(self.parts, Path(folder), fence=Fence(job, incarnation, token), created=1.0)
        return {"path": str(path), "seconds": time.perf_counter() - began}

    def open_snapshots(self, memory: str, job: str = "pool") -> bool:
        """Get ready to take snapshots of this rank's shard; whether this rank takes any (the first replica does)."""
        assert self.layout is not None
        where = self.layout
        self.writer = None
        if where.data_rank == 0:
            coordinate = snapshot.Coordinate(where.tensor, where.pipeline, where.tensor_rank, where.pipeline_rank)
            folder = snapshot.job_dir(Path(memory), job)
            self.writer = SnapshotWriter(folder, coordinate, clock=time.monotonic)
        return self.writer is not None

    def snapshot(self, persist: bool = False, incarnation: int = 1, wait: bool = True) -> dict[str, Any]:
        """Take a snapshot now and, if asked, wait until it is committed."""
        assert self.parts is not None
        if self.writer is None:
            return {}
        fence = Fence("pool", incarnation)
        source = snapshot_state.source(self.parts, fence=fence, created=time.time(), persist=persist)
        taken = self.writer.begin(source)
        if wait:
            self.writer.finish()
            self.writer.wait_committed()
        return vars(taken)

    def load_snapshot(self, memory: str, job: str = "pool", step: int | None = None) -> dict[str, Any]:
        """Load the newest snapshot (or that of ``step``)."""
        assert self.parts is not None
        sets = snapshot.find(snapshot.job_dir(Path(memory), job))
        chosen = next(found for found in sets if step in (None, found.step))
        began = time.perf_counter()
        state = snapshot_state.load(chosen, self.parts)
        return {"state": state.to_json(), "seconds": time.perf_counter() - began}

    def load(self, path: str) -> dict[str, Any]:
        """Load a published checkpoint; its state."""
        assert self.parts is not None
        return checkpoint.load(Path(path), self.parts).to_json()


def main() -> None:
    """Serve commands until standard input ends."""
    device.prepare("cpu")
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not walked through at every leave
    rank = Rank()
    with os.fdopen(KEPT, "w", buffering=1) as out:
        out.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            command = json.loads(line)
            try:
                value = getattr(rank, command.pop("do"))(**command)
                out.write(json.dumps({"value": value}) + "\n")
            except Exception as error:
                kind = type(error).__name__
                text = {"error": f"{kind}: {error}", "traceback": traceback.format_exc()}
                out.write(json.dumps(text) + "\n")
    parallel.leave()
