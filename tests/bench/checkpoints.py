"""Figures of the checkpoint tiers on a model of 50 million parameters: stall of a save, copy, hash, read-back, load.

The baseline is Megatron's own ``dist_checkpointing.save``, called in the same process after a first call that does
not count (it starts helper processes). Slow storage is one that returns no sooner than its bytes take at 200 MB/s:
the same rule for baseline and persister.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure

SLOW_BYTES_PER_SECOND = 200e6
SAVE_EVERY_SECONDS = 30.0
_MB = 1e6


def measure(quick: bool) -> list[Figure]:
    """All figures; a child process trains, since Megatron's own save needs a guarded main module."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    place = Path(tempfile.mkdtemp(prefix="planaria-bench-"))
    shm = Path(tempfile.mkdtemp(prefix="planaria-bench-", dir=memory))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.checkpoints", str(place), str(shm), "2" if quick else "5"],
            capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=1200,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-3000:])
        return figures(json.loads(done.stdout.splitlines()[-1])) + _disk(place, quick)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def figures(found: dict[str, Any]) -> list[Figure]:
    """The child's measurements against their bars."""
    stalls, saves = found["stalls"], found["saves"]
    stall, save = statistics.median(stalls), statistics.median(saves)
    slow = max(save, found["bytes"] / SLOW_BYTES_PER_SECOND)
    copy = found["bytes"] / statistics.median(found["copies"]) / 1e9
    memcpy = found["bytes"] / statistics.median(found["memcpy"]) / 1e9
    loads, snaps = statistics.median(found["disk_loads"]), statistics.median(found["snapshot_loads"])
    share = stall / SAVE_EVERY_SECONDS
    return [
        _spread("synchronous dist_checkpointing.save, steady state", saves, "s"),
        _spread("stall of a save through the snapshot tier", stalls, "s"),
        Figure(name="stall less than synchronous, local disk", value=save / stall, unit="×", bar="at least 10 ×",
               reached=save / stall >= 10),
        Figure(name="stall less than synchronous, storage of 200 MB/s", value=slow / stall, unit="×",
               bar="at least 60 ×", reached=slow / stall >= 60),
        Figure(name="share of training time, a save each 30 s", value=100 * share, unit="%", bar="under 2%",
               reached=share < 0.02),
        Figure(name="snapshot copy", value=copy, unit="GB/s", bar=f"half of memcpy ({memcpy:.2f} GB/s)",
               reached=copy >= memcpy / 2),
        _spread("publication by the persister, beside training", found["publications"], "s"),
        Figure(name="load from snapshot sooner than from disk", value=loads / snaps, unit="×", bar="at least 5 ×",
               reached=loads / snaps >= 5, note=f"{snaps:.2f} s against {loads:.2f} s, both verified"),
        Figure(name="parameters", value=found["parameters"] / 1e6, unit="million",
               note=f"{found['bytes'] / _MB:.0f} MB of state"),
    ]  # fmt: skip


def _spread(name: str, values: list[float], unit: str) -> Figure:
    middle = statistics.median(values)
    return Figure(name=name, value=middle, unit=unit, runs=len(values), low=min(values), high=max(values))


def _disk(place: Path, quick: bool) -> list[Figure]:
    """Hashing alone, and hashing with the read from disk against what ``dd`` reads."""
    import xxhash

    from pretrain import readback

    data = os.urandom(64 << 20)
    began = time.perf_counter()
    rounds = 4 if quick else 16
    for _ in range(rounds):
        xxhash.xxh3_128(data).digest()
    alone = rounds * len(data) / (time.perf_counter() - began) / 1e9
    path = place / "file"
    with path.open("wb") as stream:
        for _ in range(8 if quick else 16):
            stream.write(data)
    size = path.stat().st_size

    def by_dd() -> float:
        readback.drop_cache(path)
        return _timed(
            lambda: subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M"], check=True, capture_output=True)
        )

    def by_us() -> float:
        return _timed(lambda: readback.hash_from_disk(path))

    pairs = [(by_dd(), by_us()) for _ in range(2 if quick else 5)]
    dd, ours = (size / statistics.median(side) / 1e9 for side in zip(*pairs, strict=True))
    return [
        Figure(name="hashing alone (xxh3-128, one core)", value=alone, unit="GB/s", bar="at least 1 GB/s",
               reached=alone >= 1),
        Figure(name="hashing with read-back after the cache is dropped", value=ours, unit="GB/s",
               bar=f"80% of dd ({dd:.2f} GB/s)", reached=ours >= 0.8 * dd),
    ]  # fmt: skip


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---------------------------------------------------------------- the child: one rank that trains


def _child(place: Path, shm: Path, rounds: int) -> dict[str, Any]:
    import torch
    from megatron.core import dist_checkpointing

    from pretrain import checkpoint, device, published, snapshot, snapshot_state
    from pretrain.megatron_format import quiet_torch
    from pretrain.persister import PersisterSpec
    from pretrain.persister_keeper import PersisterKeeper
    from tests.support.checkpoint_rank import Rank

    device.prepare("cpu")
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Rank()
    shape = {"layers": 10, "hidden_size": 640, "ffn_hidden_size": 1728, "heads": 10, "kv_heads": 10, "seq_length": 32}
    rank.join(0, 1, 1, 1, store.port, "bench", model=shape)
    assert rank.parts is not None
    parts = rank.parts
    found: dict[str, Any] = {
        name: [] for name in ("saves", "stalls", "copies", "memcpy", "disk_loads", "snapshot_loads")
    }
    found["parameters"] = sum(parameter.numel() for parameter in parts.model.parameters())
    rank.train(1)
    for number in range(rounds + 1):
        target = place / f"sync-{number}"
        target.mkdir()
        with quiet_torch(), device.emulation():
            seconds = _timed(lambda: dist_checkpointing.save(checkpoint.collect(parts), str(target)))  # noqa: B023
        os.sync()
        shutil.rmtree(target)
        found["saves"] += [seconds] if number else []
    said: list[Any] = []
    keeper = PersisterKeeper(
        PersisterSpec(job="pool", memory_dir=str(shm), target=str(place / "checkpoints"), keep=2), place, said.append
    )
    keeper.start()
    rank.open_snapshots(str(shm))
    assert rank.writer is not None
    for number in range(rounds + 2):
        rank.snapshot(persist=True, wait=False)
        rank.train(2)
        taken = rank.writer.taken[-1]
        if number > 1:  # the first two fill the buffers' pages
            found["stalls"].append(taken.stall_seconds)
            found["copies"].append(taken.copy_seconds)
        _publication(keeper, said, parts.state.step - 2)
    found["bytes"] = rank.writer.taken[-1].nbytes
    keeper.stop()
    found["publications"] = [one.seconds for one in said if one.what == "published"][1:]
    rank.writer.begin(snapshot_state.source(parts, fence=published.Fence("pool", 1), created=0.0, persist=False))
    rank.writer.finish()
    found["copies"] += [rank.writer.taken[-1].copy_seconds]
    rank.writer.wait_committed()
    source, sink = (
        torch.empty(found["bytes"], dtype=torch.uint8).fill_(1),
        torch.empty(found["bytes"], dtype=torch.uint8),
    )
    sink.fill_(0)
    found["memcpy"] = [_timed(lambda: sink.copy_(source)) for _ in range(rounds)]
    newest = published.published(place / "checkpoints")[-1][1]
    for _ in range(rounds):

        def from_disk() -> None:
            assert not published.examine(newest, int(newest.name[5:]))
            checkpoint.load(newest, parts)

        found["disk_loads"].append(_timed(from_disk))
        sets = snapshot.find(snapshot.job_dir(shm, "pool"))
        found["snapshot_loads"].append(_timed(lambda: snapshot_state.load(sets[0], parts)))  # noqa: B023
    return found


def _publication(keeper: Any, said: list[Any], step: int) -> None:
    end = time.monotonic() + 120
    while not any(one.what == "published" and one.step == step for one in said):
        keeper.poll(0.05)
        if time.monotonic() > end or any(one.what == "failed" for one in said):
            raise RuntimeError(f"step {step} was not published: {said[-2:]}")


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
