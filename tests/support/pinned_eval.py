"""``planaria`` with each of its processes on one core: ``python -m tests.support.pinned_eval CORES COMMAND...``.

Infer worker i runs on the i-th of the cores, the metric worker and everything else on the first; with one core the
whole tree is on it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Pin this process, see to it that workers are pinned, and be ``planaria``, which tells its progress often."""
    cores = [int(core) for core in arguments[0].split(",")]
    os.sched_setaffinity(0, {cores[0]})
    from evalsched import commands, local

    commands.ProgressLine.PLAIN_SECONDS = 0.2
    local.LocalFleet = functools.partial(local.LocalFleet, cores=cores)  # type: ignore[assignment,misc]
    from planner.cli import main as planaria

    sys.argv = ["planaria", *arguments[1:]]
    planaria()


if __name__ == "__main__":
    main(sys.argv[1:])
