"""What may go wrong between a snapshot and its publication, and what must not be lost by it (cases C1 to C9)."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from planner import manifest
from planner.clock import ManualClock
from planner.messages import RankCheckpoint
from pretrain import published, readback, snapshot
from pretrain.persister import Persister, PersisterSpec
from pretrain.persister_keeper import PersisterKeeper
from pretrain.published import Fence
from pretrain.snapshot_writer import SnapshotWriter
from pretrain.targets import FolderTarget
from tests.support import snapshots
from tests.support.waiting import wait_until


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """The persister's process group of one, in the test's own process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Bench:
    """A persister in this process, with its messages and a clock that moves when it pauses."""

    def __init__(self, place: Path, folder: Path | None = None, **settings: object) -> None:
        self.memory, self.folder = place / "memory", folder or place / "checkpoints"
        self.said: list[RankCheckpoint] = []
        self.clock = ManualClock()
        spec = PersisterSpec(job="job", memory_dir=str(self.memory), target=str(self.folder), **settings)  # type: ignore[arg-type]
        self.persister = Persister(spec, FolderTarget(self.folder), self.said.append, self.clock)

    def save(self, step: int, **fields: object) -> list[str]:
        """Take a marked snapshot and persist what waits; what was said about it."""
        snapshots.take(self.memory, step, persist=True, **fields).close()
        before = len(self.said)
        for found in self.persister.waiting():
            self.persister.persist(found)
        return [message.what for message in self.said[before:]]

    @property
    def steps(self) -> list[int]:
        """Published steps."""
        return [step for step, _ in published.published(self.folder)]


def test_a_hiccup_of_storage_is_retried_with_growing_pauses(tmp_path: Path) -> None:
    """C2: the folder is away for two tries; training hears of it and nothing is lost."""
    bench = Bench(tmp_path, failures=3, back_off_seconds=1.0)
    bench.folder.write_text("not a folder yet")
    pauses: list[float] = []

    class Mending(ManualClock):
        def sleep(self, seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 2:
                bench.folder.unlink()
            self.advance(seconds)

    bench.persister.clock = Mending()
    assert bench.save(1) == ["failed", "failed", "published"]
    assert pauses == [1.0, 2.0]
    assert "checkpoints" in bench.said[0].reason
    assert bench.steps == [1]


def test_a_save_that_never_works_is_given_up_and_the_next_one_is_taken_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, failures=2)
    bench.folder.write_text("not a folder")
    assert bench.save(1) == ["failed", "failed"]
    bench.folder.unlink()
    assert bench.save(2) == ["published"]
    assert bench.steps == [2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_costs_the_new_checkpoint_alone(tmp_path: Path, small_disk: Path) -> None:
    """C8: nothing half-written stays, the older checkpoint does, and with room again the next save works."""
    bench = Bench(tmp_path, small_disk / "checkpoints", failures=1)
    assert bench.save(1, rows=20_000) == ["published"]
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 100_000))
    assert bench.save(2, rows=20_000) == ["failed"]
    assert "No space left on device" in bench.said[-1].reason
    assert bench.steps == [1]
    assert {entry.name for entry in bench.folder.iterdir()} == {"step-00000001", "latest", ".lock"}
    assert published.newest_verified(bench.folder)[0] == bench.folder / "step-00000001"
    filler.unlink()
    assert bench.save(3, rows=20_000) == ["published"]


def test_data_that_did_not_reach_the_disk_is_not_published(tmp_path: Path) -> None:
    """C4: what is read back is compared with what was written, file by file."""
    folder = tmp_path / "work"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "__0_0.distcp").write_bytes(b"\0" * 1000)
    described = manifest.Described(job="job", step=1, consumed_samples=0, incarnation=1, created=0.0)
    target = FolderTarget(tmp_path / "checkpoints")
    target.folder.mkdir()
    with pytest.raises(readback.NotWhatWasWrittenError, match=r"__0_0\.distcp"):
        target.publish(folder, described, Fence("job", 1), {"megatron/__0_0.distcp": "0" * 32})
    assert target.steps() == []


def test_retention_runs_after_publication_and_keeps_what_verifies(tmp_path: Path) -> None:
    """C5, C9: a bounded number stays, multiples stay, and a failed save deletes nothing."""
    bench = Bench(tmp_path, keep=2, keep_every=4, failures=1)
    for step in range(1, 8):
        bench.save(step)
    assert bench.steps == [4, 6, 7]
    place = bench.folder.with_name("away")
    bench.folder.rename(place)
    bench.folder.write_text("in the way")
    assert bench.save(8) == ["failed"]
    bench.folder.unlink()
    place.rename(bench.folder)
    assert bench.steps == [4, 6, 7]


def test_a_damaged_snapshot_is_not_written(tmp_path: Path) -> None:
    """A bit that flips in memory between the copy and the save must not become a checkpoint."""
    bench = Bench(tmp_path)
    snapshots.take(bench.memory, 1, persist=True).close()
    (found,) = bench.persister.waiting()
    path = found.shards[0].buffer.data_path
    raw = bytearray(path.read_bytes())
    raw[3] ^= 4
    path.write_bytes(raw)
    bench.persister.persist(found)
    assert [message.what for message in bench.said] == ["failed"]
    assert "hash" in bench.said[0].reason
    assert bench.steps == []


def test_a_restarted_persister_does_not_publish_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.save(1) == ["published"]
    before = (bench.folder / "step-00000001" / manifest.NAME).stat().st_mtime_ns
    bench.persister.done.clear()
    bench.persister.persist(bench.persister.waiting()[0])
    assert [message.what for message in bench.said] == ["published", "published"], "whoever waits for it hears it again"
    assert (bench.folder / "step-00000001" / manifest.NAME).stat().st_mtime_ns == before
    assert bench.persister.waiting() == []


def test_an_older_incarnation_is_refused_and_not_retried(tmp_path: Path) -> None:
    """R10: fencing at publication."""
    bench = Bench(tmp_path, fence_patience=0.0)
    published.claim(bench.folder, Fence("job", 7))
    assert bench.save(1, incarnation=6) == ["refused"]
    assert "taken over" in bench.said[0].reason
    assert bench.save(2, incarnation=7) == ["published"]
    assert bench.steps == [2]


def test_the_next_incarnation_takes_over_what_waits_to_be_published(tmp_path: Path) -> None:
    """The right is gone with the rank that handed over; the successor goes on from that very state and publishes it."""
    bench = Bench(tmp_path)
    published.claim(bench.folder, Fence("job", 7))
    assert bench.save(3, incarnation=6) == [], "no word before the successor has had time to come"
    snapshots.take(bench.memory, 5, incarnation=6).close()
    snapshot.relabel(bench.persister.folder, incarnation=7, token=0, at_most=3)
    assert [found.step for found in snapshot.find(bench.persister.folder)] == [3], "what it did not go on from is gone"
    for found in bench.persister.waiting():
        bench.persister.persist(found)
    assert [message.what for message in bench.said] == ["published"]
    assert published.newest_verified(bench.folder)[0] == bench.folder / "step-00000003"


def test_what_waits_to_be_published_is_not_overwritten(tmp_path: Path) -> None:
    """A slow persister: both buffers wait for it, so the next snapshot is left out until one is done."""
    bench = Bench(tmp_path)
    for step in (1, 2):
        snapshots.take(bench.memory, step, persist=True).close()
    writer = snapshots.writer(bench.memory)
    assert "waits to be published" in writer.begin(snapshots.source(3)).skipped
    bench.persister.persist(bench.persister.waiting()[0])
    assert not writer.begin(snapshots.source(3)).skipped
    writer.close()
    assert [found.step for found in snapshot.find(bench.persister.folder)] == [3, 2]


def test_every_shard_of_a_published_snapshot_may_be_overwritten(tmp_path: Path) -> None:
    """Tensor-parallel ranks copy at moments of their own; what is published is so for all of them."""
    bench = Bench(tmp_path)
    writers = [snapshots.writer(bench.memory, shard=shard, shards=2) for shard in (0, 1)]
    for step in range(1, 6):
        for shard, one in enumerate(writers):
            taken = one.begin(snapshots.source(step, persist=True, part=(shard, 2)))
            assert not taken.skipped, taken.skipped
            one.wait_committed()
        (found,) = bench.persister.waiting()
        bench.persister.persist(found)
        assert bench.said[-1].what in ("published", "deleted")
        assert step in bench.steps
    for one in writers:
        one.close()


def test_of_two_snapshots_of_one_step_the_one_handed_over_last_is_published(tmp_path: Path) -> None:
    """A rank that is told to leave after a step that it has just copied hands the same step over."""
    bench = Bench(tmp_path)
    snapshots.take(bench.memory, 1).close()
    snapshots.take(bench.memory, 2).close()
    assert bench.save(2) == ["published"], "in the first buffer"
    snapshots.take(bench.memory, 3).close()
    assert bench.save(3) == ["published"], "in the second"


def test_a_late_publication_does_not_move_latest_back(tmp_path: Path) -> None:
    """Ranks that leave may publish a later step by themselves while the persister is at an earlier one."""
    bench = Bench(tmp_path)
    assert bench.save(2) == ["published"]
    assert bench.save(1) == ["published"]
    assert published.read_latest(bench.folder) == bench.folder / "step-00000002"
    assert bench.steps == [1, 2]


def test_the_buffer_being_saved_is_not_overwritten(tmp_path: Path) -> None:
    """While one buffer is read, snapshots go to the other; with both being read one is left out, with the reason."""
    memory = tmp_path / "memory"
    writer = snapshots.take(memory, 1)
    (first,) = snapshot.find(writer.folder)
    with snapshot.opened(first.shards[0]):
        for step in (2, 3):
            assert not writer.begin(snapshots.source(step)).skipped
            writer.finish()
            writer.wait_committed()
            assert [one.step for one in snapshot.find(writer.folder)] == [step, 1]
        second = snapshot.find(writer.folder)[0]
        with snapshot.opened(second.shards[0]):
            assert "being read" in writer.begin(snapshots.source(4)).skipped
    assert not writer.begin(snapshots.source(5)).skipped
    writer.close()
    assert [one.step for one in snapshot.find(writer.folder)] == [5, 3]


def test_no_room_in_memory_is_said_and_training_goes_on(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path, snapshot.Coordinate(1, 1, 0, 0), clock=lambda: 0.0, memory_bytes=1000)
    assert "no room" in writer.begin(snapshots.source(1, rows=1000)).skipped
    assert writer.finish() == 0.0
    writer.close()


def test_a_copy_that_fails_halfway_does_not_stop_training(tmp_path: Path) -> None:
    """Memory may be used up by others between the check and the copy; the next snapshot works again."""
    writer = snapshots.take(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        taken = writer.begin(snapshots.source(2, rows=1000))
        writer.finish()
        writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step 2" in taken.skipped
    assert [one.step for one in snapshot.find(writer.folder)] == [1]
    assert not writer.begin(snapshots.source(3)).skipped
    writer.close()
    assert snapshot.find(writer.folder)[0].step == 3


@pytest.mark.slow
def test_a_killed_writer_is_started_again_and_the_save_is_made_anew(tmp_path: Path) -> None:
    """C1: SIGKILL with a save in hand; the death is told at once and the checkpoint is published by the next one."""
    memory, folder = tmp_path / "memory", tmp_path / "checkpoints"
    said: list[RankCheckpoint] = []
    spec = PersisterSpec(job="job", memory_dir=str(memory), target=str(folder))
    keeper = PersisterKeeper(spec, tmp_path / "run", said.append)
    keeper.start()
    try:
        snapshots.take(memory, 1, rows=100_000, persist=True).close()
        wait_until(
            lambda: (
                keeper.poll(0.0) or (folder.is_dir() and any(one.name.startswith(".step") for one in folder.iterdir()))
            ),
            what="the save begins",
            pause=0.0005,
        )
        first = keeper.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: keeper.poll(0.05) or any(one.what == "failed" for one in said), what="the death", seconds=5)
        assert "the persister died (exit -9)" in said[0].reason or said[0].what == "published"
        wait_until(lambda: keeper.poll(0.05) or any(one.what == "published" for one in said), what="publication")
        assert keeper.pid != first
    finally:
        assert keeper.stop()
    newest, refused = published.newest_verified(folder)
    assert newest == folder / "step-00000001"
    assert not refused
