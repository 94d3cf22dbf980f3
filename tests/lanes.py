"""Lanes for ``make test``: clusters of real processes in one, everything else beside it.

Tests of a whole cluster mostly wait, but what they wait for has time limits (leases, heartbeats). Tests of engines,
trainers and pure functions compute all the time and have none. So the first worker takes the cluster files, one after
the other, with all cores; each further one takes the rest, bound to a core and with a lower priority, the second to
the last core. A worker whose own files are done takes from the others', but for cluster files, which never run two at
once.
"""

from __future__ import annotations

import os

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

CLUSTER_FILES = frozenset({
    "tests/fault/test_conductor_faults.py",
    "tests/fault/test_fleet_chaos.py",
    "tests/fault/test_handover.py",
    "tests/fault/test_jobs_on_a_cluster.py",
    "tests/fault/test_redis_away.py",
    "tests/fault/test_reform.py",
    "tests/fault/test_unique_shards.py",
    "tests/integration/test_agent_processes.py",
    "tests/integration/test_allocator_service.py",
    "tests/integration/test_coordinator.py",
    "tests/integration/test_checkpoint_tiers.py",
    "tests/integration/test_job_commands.py",
    "tests/integration/test_job_on_object_store.py",
    "tests/integration/test_nodecheck.py",
    "tests/integration/test_peer_staging.py",
    "tests/integration/test_real_job.py",
    "tests/integration/test_scheduler.py",
    "tests/integration/test_simulator_against_reality.py",
    "tests/integration/test_stack.py",
    "tests/integration/test_supervised_job.py",
})  # fmt: skip
"""Files whose tests have time limits, or compare seconds."""
LONG_FILES = frozenset({
    "tests/integration/test_checkpoint_layouts.py",
    "tests/integration/test_eval_command.py",
    "tests/integration/test_stock_vllm_equality.py",
})  # fmt: skip
"""Files that take minutes: begun last, one of them would keep a lane busy while the other has nothing to do."""
NICENESS = 10


class Lanes(LoadFileScheduling):
    """Whole files to workers: cluster files only to the first one."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        mine = self._next(node)
        if mine is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(mine, last=False)
        super()._assign_work_unit(node)

    def _next(self, node: WorkerController) -> str | None:
        """The file that a worker takes next; None when what is left is for the other."""
        cluster = [file for file in self.workqueue if file in CLUSTER_FILES]
        rest = sorted(self.workqueue.keys() - CLUSTER_FILES, key=lambda file: (file not in LONG_FILES, file))
        if _number(node) == min(map(_number, self.nodes)):  # the second one, should the first crash
            return cluster[0] if cluster else rest[-1]
        return rest[0] if rest else None


def _number(node: WorkerController) -> int:
    return int(node.gateway.id.removeprefix("gw"))


def take_lane() -> None:
    """Bind this process and all that it starts to a core when it is not the first worker."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    if number:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[-number % len(cores)]})
        os.nice(NICENESS)
