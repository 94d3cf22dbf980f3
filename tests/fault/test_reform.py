"""Real ranks re-form in place after faults in every phase; samples and losses are those of the undisturbed run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import ForkServer
from tests.support.reform_cluster import ReformCluster
from tests.support.schedules import Schedule, compare, draw, run

RANDOM = int(os.environ.get("PLANARIA_FAULT_SCHEDULES", "2"))
"""Random schedules of a test run; the benchmark runs forty."""


@pytest.fixture(scope="module")
def calm(trainers: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The undisturbed run of a layout, once per layout."""
    known: dict[tuple[int, int, int], ReformCluster] = {}

    def of(schedule: Schedule) -> ReformCluster:
        key = (schedule.world, schedule.tensor, schedule.pipeline)
        if key not in known:
            config = schedule.config(calm=True)
            known[key] = run(config, schedule, tmp_path_factory.mktemp("calm"), trainers)
        return known[key]

    return of


def fault(kind: str, at_step: int, rank: int, phase: str, **more: int) -> dict[str, Any]:
    return {"kind": kind, "at_step": at_step, "rank": rank, "phase": phase, **more}


def schedule(
    world: int, *faults: dict[str, Any], tensor: int = 1, pipeline: int = 1, replace: bool = False
) -> Schedule:
    return Schedule(world, tensor, pipeline, replace, faults)


def heal(case: Schedule, folder: Path, trainers: ForkServer, calm: Any) -> ReformCluster:
    """Run and compare; all faults must have fired."""
    healed = run(case.config(), case, folder, trainers)
    assert sorted(set(healed.fired)) == list(range(len(case.faults))), f"fired: {healed.fired}\n{healed.logs()}"
    compare(healed, calm(case))
    return healed


def redone(cluster: ReformCluster, incarnation: int) -> list[int]:
    """Micro-batches that ranks ran for others when this incarnation began, each as often as it was run."""
    messages = [m for m in cluster.of("reformed") if m["incarnation"] == incarnation]
    return sorted(batch for message in messages for batch in message["redone"])


def test_one_after_another_in_forward_reduce_and_optimizer(trainers: ForkServer, calm: Any, tmp_path: Path) -> None:
    case = schedule(
        4,
        fault("sigkill", 2, 2, "forward", micro_batch=0),
        fault("exit", 4, 0, "reduce"),
        fault("exception", 6, 3, "optimizer"),
    )
    healed = heal(case, tmp_path, trainers, calm)
    # Of five micro-batches rank 0 has two: where it had done neither, its second is shared out as well.
    assert redone(healed, 2) in ([3], [1, 3]), "the dead rank's own micro-batch, and nothing that anybody had done"
    assert redone(healed, 3) == [0, 1]
    assert redone(healed, 4) == [], "in the optimizer all gradients are there"
    assert [m["workers"] for _, m in sorted(healed.steps().items())] == [4, 3, 3, 2, 2, 2, 1, 1]


def test_silent_ranks_and_errors_that_can_be_retried(trainers: ForkServer, calm: Any, tmp_path: Path) -> None:
    case = schedule(
        3,
        fault("sigstop", 2, 1, "reduce"),
        fault("nccl_error", 4, 0, "backward", micro_batch=1),
        fault("nccl_error", 6, 2, "optimizer"),
    )
    healed = heal(case, tmp_path, trainers, calm)
    assert [m["workers"] for _, m in sorted(healed.steps().items())] == [3] + [2] * 7, "a retry loses nobody"


def test_validation_and_saving(trainers: ForkServer, calm: Any, tmp_path: Path) -> None:
    case = schedule(3, fault("sigkill", 3, 1, "evaluate"), fault("sigkill", 6, 0, "save"))
    healed = heal(case, tmp_path, trainers, calm)
    published = {m["step"] for m in healed.of("checkpoint") if m["what"] == "published"}
    assert {3, 6, 8} <= published


def test_at_the_same_moment_and_while_re_forming(trainers: ForkServer, calm: Any, tmp_path: Path) -> None:
    case = schedule(
        4,
        fault("sigkill", 3, 0, "forward"),
        fault("sigkill", 3, 2, "forward"),
        fault("sigkill", 3, 1, "reform"),
    )
    healed = heal(case, tmp_path, trainers, calm)
    assert healed.incarnation >= 3


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_model_parallel_group_is_lost_and_its_replica_goes_on(
    trainers: ForkServer, calm: Any, tmp_path: Path, tensor: int, pipeline: int
) -> None:
    case = schedule(4, fault("sigkill", 3, 1, "backward", micro_batch=1), tensor=tensor, pipeline=pipeline)
    healed = heal(case, tmp_path, trainers, calm)
    assert len(set(redone(healed, 2))) in (2, 3), "the lost replica's micro-batches"
    assert healed.grid.data == 1


@pytest.mark.parametrize("seed", range(RANDOM))
def test_random_schedules(trainers: ForkServer, calm: Any, tmp_path: Path, seed: int) -> None:
    case = draw(seed)
    compare(run(case.config(), case, tmp_path, trainers), calm(case))


def test_replacements_join_with_the_state_of_a_peer(trainers: ForkServer, tmp_path: Path) -> None:
    """Long enough for the replacement to get ready; the curve is compared with a run of one rank."""
    case = Schedule(2, 1, 1, True, (fault("sigkill", 3, 0, "forward"),))
    config = case.config().model_copy(update={"steps": 400})
    cluster = ReformCluster(config, 2, tmp_path / "healed", trainers, replace=True)
    cluster.run_until(lambda: any(message["joined"] for message in cluster.of("reformed")))
    joined = next(message for message in cluster.of("reformed") if message["joined"])
    last = joined["step"] + 3
    cluster.run_until(lambda: max(cluster.steps(), default=0) >= last)
    cluster.close()
    assert joined["state_bytes"] > 100_000
    assert cluster.steps()[last]["workers"] == 2
    calm = ReformCluster(case.config(calm=True).model_copy(update={"steps": 400}), 2, tmp_path / "calm", trainers)
    calm.run_until(lambda: max(calm.steps(), default=0) >= last)
    calm.close()
    for step in range(1, last + 1):
        assert cluster.steps()[step]["batch"] == calm.steps()[step]["batch"]
        assert abs(cluster.steps()[step]["loss"] - calm.steps()[step]["loss"]) <= 1e-5
