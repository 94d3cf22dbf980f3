"""``planaria`` with each of its processes on one core: ``python -m tests.support.pinned_eval CORES COMMAND...``.

Worker i runs on the i-th of the cores, everything else (the command, its Redis, the metric worker) on the first. With
one core the whole tree is on it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Pin this process, see to it that workers pin themselves, and be ``planaria``, which tells its progress often."""
    cores = [int(core) for core in arguments[0].split(",")]
    command = list(arguments[1:])
    os.sched_setaffinity(0, {cores[_number(command) % len(cores)]})
    from evalsched import commands, local

    commands.ProgressLine.PLAIN_SECONDS = 0.2
    program = (sys.executable, "-m", "tests.support.pinned_eval", arguments[0], "worker")
    local.LocalFleet = functools.partial(local.LocalFleet, program=program)  # type: ignore[assignment,misc]
    from planner.cli import main as planaria

    sys.argv = ["planaria", *command]
    planaria()


def _number(command: Sequence[str]) -> int:
    """The number of an infer worker (its name is ``local-<number>-<start>``), 0 for everything else."""
    name = command[command.index("--name") + 1] if "--name" in command else ""
    return int(name.split("-")[1]) if "infer" in command else 0


if __name__ == "__main__":
    main(sys.argv[1:])
