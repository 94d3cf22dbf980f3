"""Random fault schedules: layouts, faults of all kinds in all phases, overlapping ones, growth; and how to check a run.

Every schedule leaves at least one replica whole at any moment, so that the job can heal in place.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.pretrain_config import PretrainConfig
from planner.rank_map import grid
from tests.support.fork_server import ForkServer
from tests.support.ranks import tiny
from tests.support.reform_cluster import ReformCluster

STEPS = 8
LAYOUTS = ((2, 1, 1), (3, 1, 1), (4, 1, 1), (4, 2, 1), (4, 1, 2), (6, 2, 1), (6, 1, 2))
"""(ranks, tensor, pipeline)"""
KINDS = ("sigkill", "sigkill", "exit", "exception", "sigstop", "hang", "nccl_error")
PHASES = ("forward", "backward", "reduce", "optimizer", "evaluate", "save")
LOSS_TOLERANCE = 1.0e-5


@dataclass(frozen=True)
class Schedule:
    """One run with faults."""

    world: int
    tensor: int
    pipeline: int
    replace: bool
    faults: tuple[dict[str, Any], ...]

    def config(self, *, calm: bool = False) -> PretrainConfig:
        """The job, or the same job without faults."""
        group = self.tensor * self.pipeline
        return tiny(
            steps=STEPS,
            workers={"min": group, "max": 8},
            parallel={"tensor": self.tensor, "pipeline": self.pipeline},
            checkpoint={"every_steps": 3, "keep": 10, "export": False},
            faults=[] if calm else list(self.faults),
        )


def draw(seed: int) -> Schedule:
    """A schedule from a seed: one to three faults on different replicas, some at the same moment or in the re-form."""
    chance = random.Random(seed)
    world, tensor, pipeline = chance.choice(LAYOUTS)
    now = grid(world, tensor, pipeline)
    count = chance.randint(1, max(1, now.data - 1))
    replicas = chance.sample(range(now.data), count)
    faults: list[dict[str, Any]] = []
    at_step = chance.randint(2, STEPS - 2)
    for replica in replicas:
        kind = chance.choice(KINDS)
        phase = chance.choice(PHASES)
        if faults and chance.random() < 0.3:
            phase, kind = "reform", chance.choice(("sigkill", "exit"))
        elif faults and chance.random() < 0.5:
            at_step = min(STEPS - 1, at_step + chance.randint(1, 3))
        rank = chance.choice(now.members(replica))
        fault = {"at_step": at_step, "kind": kind, "phase": phase, "rank": rank}
        if phase in ("forward", "backward"):
            fault["micro_batch"] = chance.randint(0, 2)
        faults.append(fault)
    return Schedule(world, tensor, pipeline, chance.random() < 0.5, tuple(faults))


def run(config: PretrainConfig, schedule: Schedule, folder: Path, server: ForkServer) -> ReformCluster:
    """Run the job to its end with real ranks."""
    cluster = ReformCluster(config, schedule.world, folder, server, replace=schedule.replace)
    cluster.run()
    return cluster


def compare(healed: ReformCluster, calm: ReformCluster) -> float:
    """Check a run with faults against the undisturbed one; the largest difference in loss.

    Raises:
        AssertionError: a step is missing, samples differ, losses differ by more than the tolerance.
    """
    steps = healed.config.steps
    assert sorted(healed.steps()) == list(range(1, steps + 1)), f"steps said: {sorted(healed.steps())}\n{healed.logs()}"
    assert healed.batches == calm.batches, "the samples of some step differ"
    worst = max(abs(one - other) for one, other in zip(healed.losses, calm.losses, strict=True))
    assert worst <= LOSS_TOLERANCE, f"losses differ by {worst}: {healed.losses} against {calm.losses}"
    return worst
