"""Forks a publisher per line on standard input; so that hundreds of publishers cost one import of torch.

Each line is a JSON object: ``memory`` and ``folder`` (persist the newest snapshot into the folder), ``wait``
(block on a pipe until a byte comes, so that a tracer can attach first). Answers with the child's pid and, when it
has ended, its wait status.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.messages import RankCheckpoint
from pretrain import device, megatron_format, snapshot_state  # noqa: F401 - loaded before the forks
from pretrain.persister import Persister, PersisterSpec
from pretrain.published import clear_debris, locked
from pretrain.targets import FolderTarget


def persist(memory: str, folder: str, keep: int) -> None:
    """What a restarted persister does: clear debris, persist what is marked, apply retention."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    place = Path(folder)
    with locked(place):
        clear_debris(place)
    said: list[RankCheckpoint] = []
    spec = PersisterSpec(job="job", memory_dir=memory, target=folder, keep=keep, failures=1, hash_threads=1)
    persister = Persister(spec, FolderTarget(place, hash_threads=1), said.append)
    for found in persister.waiting():
        persister.persist(found)
    os._exit(7 if any(message.what in ("failed", "refused") for message in said) else 0)  # clean-up takes a second


def main() -> None:
    """Serve until standard input ends."""
    device.prepare("cpu")
    torch.set_num_threads(1)
    gc.freeze()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        wait = command.pop("wait")
        gate, go = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(go)
            if wait:
                os.read(gate, 1)
            persist(**command)
        os.close(gate)
        print(json.dumps({"pid": child}), flush=True)
        if wait:
            sys.stdin.readline()
            os.write(go, b"x")
        os.close(go)
        _, status = os.waitpid(child, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
