"""A job's scalars for TensorBoard, written by one rank into ``<job folder>/tensorboard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.messages import RankStep

FOLDER = "tensorboard"


def scalars(step: RankStep) -> dict[str, float]:
    """The scalars of one step by their TensorBoard names; what was not measured is left out."""
    values = {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/lr": step.lr,
        "valid/loss": step.valid_loss,
        "speed/step_seconds": step.seconds,
        "speed/tokens_per_second": step.tokens / step.seconds if step.seconds > 0 else None,
        "ranks/workers": float(step.workers),
    }
    return {name: value for name, value in values.items() if value is not None}


class ScalarWriter:
    """Appends to an event file of its own; after a rollback the reader purges the steps that are written again."""

    def __init__(self, job_folder: Path, first_step: int) -> None:
        """Write below ``job_folder``; steps from ``first_step`` on replace those of earlier incarnations."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(job_folder / FOLDER), purge_step=first_step, flush_secs=5)

    def write(self, step: RankStep) -> None:
        """Add one step's scalars."""
        for name, value in scalars(step).items():
            self._writer.add_scalar(name, value, step.step, walltime=step.time)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
