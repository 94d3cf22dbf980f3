"""The baseline of the healing figures: the same model under ``torchrun --max-restarts``, a checkpoint each 10 steps.

Run by torchrun with one argument, a JSON object: ``{"folder", "config", "kill": {"<step>": <rank>}}``. Each rank
appends ``{"step", "time", "seconds"}`` lines (rank 0) and kills itself once per entry of ``kill``. What a careful
user writes without this project: state saved atomically by rank 0, loaded by all after a restart.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

EVERY_STEPS = 10


def main() -> None:
    """Train to the end of the config, from the newest checkpoint."""
    asked = json.loads(sys.argv[1])
    folder = Path(asked["folder"])
    torch.set_num_threads(1)
    trainer = build(asked["config"], folder)
    kill = {int(step): int(rank) for step, rank in asked["kill"].items()}
    while trainer.state.step < trainer.config.steps:
        started = time.monotonic()
        step = trainer.state.step + 1
        marker = folder / f"killed-{step}"
        if kill.get(step) == dist.get_rank() and not marker.exists():
            marker.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        while trainer.state.step < step:
            trainer.advance()
        if step % EVERY_STEPS == 0:
            save(trainer, folder)
        if dist.get_rank() == 0:
            line = {"step": step, "time": time.time(), "seconds": time.monotonic() - started}
            with (folder / "steps.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")
    os._exit(0)


def build(raw: dict[str, Any], folder: Path) -> Any:
    """A trainer without healing, its groups made from torchrun's environment."""
    from megatron.core import parallel_state

    from planner.messages import RankSpec
    from planner.pretrain_config import PretrainConfig
    from pretrain import assembly, device, parallel

    config = PretrainConfig.model_validate(raw)
    device.prepare("cpu")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def join(*_: Any, **__: Any) -> None:
        # With torchrun's own store gloo meets the keys of the last attempt and waits for ever (torch 2.13).
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=world
        )
        parallel_state.initialize_model_parallel(1, 1)

    parallel.join = join
    spec = RankSpec(
        job="baseline", incarnation=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1, rank=rank,
        origin_rank=rank, world_size=world, store_host="127.0.0.1", store_port=0, token="", agent_socket=None,
        job_folder=str(folder), config=config,
    )  # fmt: skip
    with (folder / f"said-{rank}").open("w") as stream:
        from pretrain.channel import StreamChannel

        trainer = assembly.assemble(spec, StreamChannel(stream))
    trainer.channel = Silent()
    load(trainer, folder)
    return trainer


class Silent:
    """Nobody listens."""

    def send(self, message: Any) -> None:
        """Nothing."""

    def unheard(self) -> list[Any]:
        """Nobody confirms anything, and nobody is missed."""
        return []


def save(trainer: Any, folder: Path) -> None:
    """Rank 0 writes the whole state; replicas are equal."""
    if dist.get_rank() == 0:
        state = {
            "model": trainer.machine.chunk.state_dict(),
            "optimizer": trainer.machine.optimizer.state_dict(),
            "train": trainer.state.to_json(),
        }
        torch.save(state, folder / ".checkpoint.pt")
        os.replace(folder / ".checkpoint.pt", folder / "checkpoint.pt")
    dist.barrier()


def load(trainer: Any, folder: Path) -> None:
    """Every rank reads the newest checkpoint, if there is one."""
    from pretrain.state import TrainState

    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt", weights_only=False)
        trainer.machine.chunk.load_state_dict(state["model"])
        trainer.machine.optimizer.load_state_dict(state["optimizer"])
        trainer.state = TrainState.from_json(state["train"])


if __name__ == "__main__":
    main()
