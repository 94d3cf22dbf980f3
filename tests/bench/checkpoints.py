"""Figures of the checkpoint tiers on a model of 50 million parameters: stall of a save, copy, hash, read-back, load.

The baseline is Megatron's own ``dist_checkpointing.save``, called in the same process after a first call that does
not count (it starts helper processes). Slow storage is really slow: a small library is preloaded into the rank, the
baseline's helpers and the persister, and lets what they read and write below one folder take as long as 200 MB/s
allow for all of them together (``tests/support/throttle.c``; without a C compiler these figures are left out).
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
    """All figures; child processes train, since Megatron's own save needs a guarded main module."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    place = Path(tempfile.mkdtemp(prefix="planaria-bench-"))
    shm = Path(tempfile.mkdtemp(prefix="planaria-bench-", dir=memory))
    try:
        found = figures(_in_child("local", place, shm, 2 if quick else 5))
        library = _throttle(place)
        if library is not None:
            slow = place / "slow"
            slow.mkdir()
            limits = {
                "LD_PRELOAD": str(library), "THROTTLE_DIR": str(slow), "THROTTLE_STATE": str(place / "state"),
                "THROTTLE_BYTES_PER_SECOND": str(SLOW_BYTES_PER_SECOND),
            }  # fmt: skip
            rest = shm / "slow"
            rest.mkdir()
            seconds = 8.0 if quick else 2.5 * SAVE_EVERY_SECONDS
            found += slow_figures(_in_child("slow", slow, rest, 1 if quick else 3, str(seconds), **limits))
        return found + _disk(place, quick)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(shm, ignore_errors=True)


def _in_child(what: str, place: Path, shm: Path, rounds: int, *more: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.checkpoints", what, str(place), str(shm), str(rounds), *more],
        capture_output=True, text=True, check=False, timeout=1200,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _throttle(place: Path) -> Path | None:
    """The library that slows storage down; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    source, library = Path(__file__).parents[1] / "support" / "throttle.c", place / "throttle.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    return library if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None


def figures(found: dict[str, Any]) -> list[Figure]:
    """The child's measurements on the local disk against their bars."""
    stalls, saves = found["stalls"], found["saves"]
    stall, save = statistics.median(stalls), statistics.median(saves)
    copy = found["bytes"] / statistics.median(found["copies_alone"]) / 1e9
    beside = found["bytes"] / statistics.median(found["copies"]) / 1e9
    cached = statistics.median(found["cached_loads"])
    memcpy = found["bytes"] / statistics.median(found["memcpy"]) / 1e9
    loads, snaps = statistics.median(found["disk_loads"]), statistics.median(found["snapshot_loads"])
    return [
        _spread("synchronous dist_checkpointing.save, steady state", saves, "s"),
        _spread("stall of a save through the snapshot tier", stalls, "s"),
        Figure(name="stall less than synchronous, local disk", value=save / stall, unit="×", bar="at least 10 ×",
               reached=save / stall >= 10),
        Figure(name="snapshot copy", value=copy, unit="GB/s", bar=f"half of memcpy ({memcpy:.2f} GB/s)",
               reached=copy >= memcpy / 2, runs=len(found["copies_alone"]), note=f"beside training {beside:.2f} GB/s"),
        _spread("publication by the persister, beside training", found["publications"], "s"),
        Figure(name="load from snapshot sooner than from disk", value=loads / snaps, unit="×", bar="at least 5 ×",
               reached=loads / snaps >= 5, note=f"{snaps:.2f} s against {loads:.2f} s, both "
               f"verified; {cached:.2f} s where the page cache still holds the files"),
        Figure(name="parameters", value=found["parameters"] / 1e6, unit="million",
               note=f"{found['bytes'] / _MB:.0f} MB of state"),
    ]  # fmt: skip


def slow_figures(found: dict[str, Any]) -> list[Figure]:
    """The same saves on storage of 200 MB/s, and a run that saves in between."""
    stall, save = statistics.median(found["stalls"]), statistics.median(found["saves"])
    share = 100 * found["run_stall"] / found["run_seconds"]
    return [
        _spread("synchronous dist_checkpointing.save to 200 MB/s", found["saves"], "s"),
        _spread("stall of a save through the snapshot tier, 200 MB/s", found["stalls"], "s"),
        _spread("publication by the persister to 200 MB/s", found["publications"], "s"),
        Figure(name="stall less than synchronous, storage of 200 MB/s", value=save / stall, unit="×",
               bar="at least 60 ×", reached=save / stall >= 60),
        Figure(name="share of training time, a save each 30 s", value=share, unit="%", bar="under 2%",
               reached=share < 2, note=f"{found['run_saves']} saves in {found['run_seconds']:.0f} s of training, "
               f"{found['run_published']} of them published by its end"),
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

    pairs = [(by_dd(), by_us()) for _ in range(2 if quick else 12)]
    dd, ours = (size / statistics.median(side) / 1e9 for side in zip(*pairs, strict=True))
    return [
        Figure(name="hashing alone (xxh3-128, one core)", value=alone, unit="GB/s", bar="at least 1 GB/s",
               reached=alone >= 1),
        Figure(name="hashing with read-back after the cache is dropped", value=ours, unit="GB/s", runs=len(pairs),
               low=size / max(one for _, one in pairs) / 1e9, high=size / min(one for _, one in pairs) / 1e9,
               bar=f"80% of dd ({dd:.2f} GB/s)", reached=ours >= 0.8 * dd,
               note=f"dd in between: {size / max(one for one, _ in pairs) / 1e9:.2f} to "
               f"{size / min(one for one, _ in pairs) / 1e9:.2f} GB/s"),
    ]  # fmt: skip


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# ---------------------------------------------------------------- the child: one rank that trains


class _Child:
    """One rank with a persister beside it, and what was measured."""

    def __init__(self, place: Path, shm: Path) -> None:
        import torch

        from pretrain import device
        from pretrain.persister import PersisterSpec
        from pretrain.persister_keeper import PersisterKeeper
        from tests.support.checkpoint_rank import Rank

        device.prepare("cpu")
        torch.set_num_threads(1)
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.place, self.shm, self.rank = place, shm, Rank()
        shape = {
            "layers": 10, "hidden_size": 640, "ffn_hidden_size": 1728, "heads": 10, "kv_heads": 10, "seq_length": 32,
        }  # fmt: skip
        self.rank.join(0, 1, 1, 1, self.store.port, "bench", model=shape)
        assert self.rank.parts is not None
        self.parts = self.rank.parts
        self.said: list[Any] = []
        spec = PersisterSpec(job="pool", memory_dir=str(shm), target=str(place / "checkpoints"), keep=2)
        self.keeper = PersisterKeeper(spec, shm, self.said.append)
        self.found: dict[str, Any] = {
            name: []
            for name in ("saves", "stalls", "copies", "copies_alone", "memcpy", "disk_loads", "cached_loads",
                         "snapshot_loads")
        }  # fmt: skip

    def save_synchronously(self, rounds: int) -> None:
        """Megatron's own way; the first round does not count."""
        from megatron.core import dist_checkpointing

        from pretrain import checkpoint, device
        from pretrain.megatron_format import quiet_torch

        self.rank.train(1)
        for number in range(rounds + 1):
            target = self.place / f"sync-{number}"
            target.mkdir()
            with quiet_torch(), device.emulation():
                seconds = _timed(
                    lambda: dist_checkpointing.save(checkpoint.collect(self.parts), str(target))  # noqa: B023
                )
            os.sync()
            shutil.rmtree(target)
            self.found["saves"] += [seconds] if number else []

    def hand_over(self, rounds: int) -> None:
        """Snapshots beside training, each published before the next."""
        self.keeper.start()
        self.rank.open_snapshots(str(self.shm))
        writer = self.rank.writer
        assert writer is not None
        for number in range(rounds + 2):
            self.rank.snapshot(persist=True, wait=False)
            self.rank.train(2)
            if number > 1:  # the first two fill the buffers' pages
                self.found["stalls"].append(writer.taken[-1].stall_seconds)
                self.found["copies"].append(writer.taken[-1].copy_seconds)
            _publication(self.keeper, self.said, self.parts.state.step - 2)
        self.found["bytes"] = writer.taken[-1].nbytes
        self.found["publications"] = [one.seconds for one in self.said if one.what == "published"][1:]

    def run(self, seconds: float) -> None:
        """Train for so long with a save each 30 s; the training time that all saves together cost."""
        writer = self.rank.writer
        assert writer is not None
        before, published = len(writer.taken), self._published()
        began = time.monotonic()
        every = min(SAVE_EVERY_SECONDS, seconds / 2.5)
        saves = 0
        while (now := time.monotonic() - began) < seconds:
            if now >= every * (saves + 1) - every / 2:
                self.rank.snapshot(persist=True, wait=False)
                saves += 1
            self.rank.train(1)
            self.keeper.poll(0.0)
        self.found["run_seconds"] = time.monotonic() - began
        taken = writer.taken[before:]
        if any(one.skipped for one in taken):
            raise RuntimeError(f"a save was left out: {[one.skipped for one in taken]}")
        self.found["run_stall"] = sum(one.stall_seconds for one in taken)
        self.found["run_saves"], self.found["run_published"] = saves, self._published() - published

    def _published(self) -> int:
        return sum(one.what == "published" for one in self.said)

    def copy_and_load(self, rounds: int) -> None:
        """A copy beside nothing, plain memory copies, loads from snapshot and disk."""
        import torch

        from pretrain import checkpoint, published, readback, snapshot, snapshot_state

        writer, found = self.rank.writer, self.found
        assert writer is not None
        fence = published.Fence("pool", 1)
        for _ in range(rounds):
            writer.begin(snapshot_state.source(self.parts, fence=fence, created=0.0, persist=False))
            writer.finish()
            found["copies_alone"].append(writer.taken[-1].copy_seconds)
            writer.wait_committed()
        source = torch.empty(found["bytes"], dtype=torch.uint8).fill_(1)
        sink = torch.empty(found["bytes"], dtype=torch.uint8).fill_(0)
        found["memcpy"] = [_timed(lambda: sink.copy_(source)) for _ in range(rounds)]
        newest = published.published(self.place / "checkpoints")[-1][1]

        def forget() -> None:
            for path in newest.rglob("*"):
                if path.is_file():
                    readback.drop_cache(path)

        def from_disk() -> None:
            assert not published.examine(newest, int(newest.name[5:]))
            checkpoint.load(newest, self.parts)

        for _ in range(rounds):
            found["cached_loads"].append(_timed(from_disk))
            forget()
            found["disk_loads"].append(_timed(from_disk))
            sets = snapshot.find(snapshot.job_dir(self.shm, "pool"))
            found["snapshot_loads"].append(_timed(lambda: snapshot_state.load(sets[0], self.parts)))  # noqa: B023


def _child(what: str, place: Path, shm: Path, rounds: int, seconds: float) -> dict[str, Any]:
    child = _Child(place, shm)
    child.found["parameters"] = sum(parameter.numel() for parameter in child.parts.model.parameters())
    child.save_synchronously(rounds)
    child.hand_over(rounds)
    if what == "slow":
        child.run(seconds)
        child.keeper.stop()
    else:
        child.keeper.stop()
        child.copy_and_load(rounds)
    return child.found


def _publication(keeper: Any, said: list[Any], step: int) -> None:
    end = time.monotonic() + 120
    while not any(one.what == "published" and one.step == step for one in said):
        keeper.poll(0.05)
        if time.monotonic() > end or any(one.what == "failed" for one in said):
            raise RuntimeError(f"step {step} was not published: {said[-2:]}")


if __name__ == "__main__":
    seconds = float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
    print(json.dumps(_child(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), seconds)))
