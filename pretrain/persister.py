"""The persister: a long-lived process beside the ranks that turns snapshots into published checkpoints.

``python -m pretrain.persister SPEC.json`` watches a job's snapshots on its node. For each complete one that is
marked for it: Megatron's distributed format is written from the shared memory, read back from the disk, hashed,
compared, published under the fence of the incarnation that took it, ``latest`` moved, retention applied. A save
that fails is tried again with pauses; training never waits for it. Messages (:class:`planner.messages.RankCheckpoint`
for the event log, :class:`planner.messages.Persisted` for the ranks) go to standard output, one JSON document per
line.

SIGTERM: finish what is marked, then leave. Whoever starts it (:class:`PersisterKeeper`) starts it again when it
dies, and the save in hand is done anew from the snapshot, which lives in memory that belongs to neither.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from pydantic import BaseModel, ConfigDict

from planner import manifest
from planner.clock import Clock, SystemClock
from planner.errors import BadInputError, FencedError, one_line
from planner.messages import Persisted, RankCheckpoint
from planner.pretrain_config import FaultKind
from planner.processes import die_with_parent
from pretrain import published, snapshot
from pretrain.faults import corrupt
from pretrain.published import Fence
from pretrain.snapshot import SnapshotError, SnapshotSet
from pretrain.targets import Target, open_target

MEGATRON = "megatron"
Key = tuple[int, int, float]
"""(incarnation, step, time of its making): one snapshot under one right."""


class PersisterSpec(BaseModel):
    """What a persister is started with, as a JSON file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    job: str
    memory_dir: str
    """Folder of snapshots in memory, ``/dev/shm`` as a rule."""
    target: str
    """Folder or fsspec URL of the published checkpoints."""
    keep: int = 3
    keep_every: int | None = None
    failures: int = 3
    """Tries of one save before it is given up and the next snapshot is taken up."""
    back_off_seconds: float = 1.0
    """Pause after the first failed try; doubles with each."""
    poll_seconds: float = 0.1
    hash_threads: int = 2
    fence_patience: float = 60.0
    """Seconds that a snapshot whose incarnation has lost its right may wait for the next one to take it over."""
    parent: int | None = None
    """Process that it dies with (its own parent); None: stay until told."""


@dataclass
class Persister:
    """The loop, with everything it needs from outside given to it."""

    spec: PersisterSpec
    target: Target
    tell: Callable[[RankCheckpoint], None]
    clock: Clock = field(default_factory=SystemClock)
    settled: Callable[[Persisted], None] = lambda word: None
    """Takes the last word about each snapshot."""
    done: set[Key] = field(default_factory=set)
    """What needs no more work: published, fenced or given up."""
    fenced: dict[Key, float] = field(default_factory=dict)
    """What may not be published by its own right, and since when (monotonic)."""
    stopping: bool = False

    @property
    def folder(self) -> Path:
        """The job's snapshots."""
        return snapshot.job_dir(Path(self.spec.memory_dir), self.spec.job)

    def run(self) -> None:
        """Persist marked snapshots until told to stop (then the marked ones that are there are still done)."""
        while True:
            leaving = self.stopping
            waiting = self.waiting()
            for found in waiting:
                self.persist(found)
            if leaving and not self.waiting():
                return
            if not waiting:
                self.clock.sleep(self.spec.poll_seconds)

    def waiting(self) -> list[SnapshotSet]:
        """Complete, marked snapshots that are not done, oldest first."""
        return [
            found
            for found in reversed(snapshot.find(self.folder))
            if found.complete and found.shards[0].description.persist and key_of(found) not in self.done
        ]

    def persist(self, found: SnapshotSet) -> None:
        """Make one snapshot durable, with retries; says what became of it.

        One whose incarnation has lost its right is left alone for a while: the next one on this node takes it over
        under its own (:func:`pretrain.snapshot.relabel`), and then it is another one to this loop.
        """
        key = key_of(found)
        since = self.fenced.get(key)
        if since is not None and self.clock.monotonic() - since < self.spec.fence_patience and not self.stopping:
            self.clock.sleep(self.spec.poll_seconds)
            return
        if (path := self._published_before(found)) is not None:
            self._settle(found, path, 0.0)
            return
        reason = ""
        for attempt in range(self.spec.failures):
            started = self.clock.monotonic()
            try:
                path = self._publish(found)
            except Exception as error:  # any failure of storage or format: say so, try again, go on
                if not self._current(found):
                    return  # another incarnation took it over meanwhile, or it is no more
                reason = one_line(error)
                if isinstance(error, FencedError):
                    if since is None and self.spec.fence_patience > 0:
                        self.fenced[key] = self.clock.monotonic()
                        return
                    self._say("refused", found.step, reason=reason)
                    break
                self._say("failed", found.step, reason=f"try {attempt + 1} of {self.spec.failures}: {reason}")
                if isinstance(error, SnapshotError):
                    break  # overwritten or damaged in memory: there is nothing left to write
                self.clock.sleep(self.spec.back_off_seconds * 2**attempt)
                continue
            self._settle(found, path, self.clock.monotonic() - started)
            return
        self._close(found, Persisted(step=found.step, published=False, reason=reason))

    def _settle(self, found: SnapshotSet, path: str, seconds: float) -> None:
        """It is published: say so to the log and to the ranks, then count what may go."""
        self._say("published", found.step, path=path, seconds=seconds)
        self._close(found, Persisted(step=found.step, published=True))
        if snapshot.take_drill(self.folder, found.step, FaultKind.CORRUPT_CHECKPOINT.value):
            corrupt(Path(path))
        self._retain(found.step)

    def _close(self, found: SnapshotSet, word: Persisted) -> None:
        """Nothing more is done with this snapshot; its memory may be used again."""
        self.done.add(key_of(found))
        self.settled(word)
        with contextlib.suppress(OSError):
            snapshot.settle(self.folder, found)

    def _current(self, found: SnapshotSet) -> bool:
        """Whether memory still holds this snapshot under this right."""
        said = found.shards[0].buffer.describe()
        return said is not None and (said.incarnation, said.step, said.created) == key_of(found)

    def _published_before(self, found: SnapshotSet) -> str | None:
        """Where an earlier process published exactly this snapshot before it died; then ``latest`` is seen to."""
        try:
            if self.target.incarnation_of(found.step) != found.incarnation:
                return None
            if found.step == max(self.target.steps()):
                self.target.point_latest(found.step)
            return self.target.location(found.step)
        except Exception:  # a target that cannot be asked is the save's to complain about
            return None

    def _publish(self, found: SnapshotSet) -> str:
        from pretrain import megatron_format, snapshot_state

        if snapshot.take_drill(self.folder, found.step, FaultKind.DISK_FULL.value):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected at step {found.step}, save)")
        said = found.shards[0].description
        fence = Fence(said.job, said.incarnation, said.token)
        work = self.target.work_dir(found.step, fence)
        try:
            with contextlib.ExitStack() as stack:
                opened = []
                for shard in found.shards:
                    mapping = stack.enter_context(snapshot.opened(shard))
                    snapshot.verify(shard, mapping)
                    opened.append((shard.description, mapping))
                sharded, common = snapshot_state.to_megatron(opened)
                (work / MEGATRON).mkdir()
                written = megatron_format.write_parts(sharded, common, work / MEGATRON)
                del sharded, opened
            described = manifest.Described(
                job=said.job,
                step=said.step,
                consumed_samples=said.consumed_samples,
                incarnation=said.incarnation,
                created=self.clock.time(),
                description=said.description,
            )
            hashes = {f"{MEGATRON}/{name}": digest for name, digest in written.items()}
            return self.target.publish(work, described, fence, hashes)
        finally:
            with contextlib.suppress(OSError):
                published.remove_tree(work)

    def _retain(self, step: int) -> None:
        """Retention counts after publication only, with the step just read back as the one known to verify."""
        try:
            gone = self.target.retain(keep=self.spec.keep, keep_every=self.spec.keep_every, newest_verified=step)
        except Exception as error:  # what cannot be deleted now is deleted after the next publication
            self._say("failed", step, reason=f"retention: {one_line(error)}")
            return
        for old in gone:
            self._say("deleted", old)

    def _say(
        self, what: str, step: int, path: str | None = None, seconds: float | None = None, reason: str = ""
    ) -> None:
        self.tell(
            RankCheckpoint(
                what=what,
                step=step,
                path=path,
                seconds=seconds,
                reason=reason,
                time=self.clock.time(),
            )
        )


def key_of(found: SnapshotSet) -> Key:
    return found.incarnation, found.step, found.shards[0].description.created


def _print(message: RankCheckpoint | Persisted) -> None:
    sys.stdout.write(message.model_dump_json() + "\n")
    sys.stdout.flush()


def read_spec(path: Path) -> PersisterSpec:
    """The spec in a JSON file.

    Raises:
        BadInputError: unreadable, or not a spec.
    """
    from planner.loading import validate

    try:
        import json

        return validate(PersisterSpec, json.loads(path.read_text()), str(path))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read ({error})") from error


def scratch_of(spec: Path) -> Path:
    """The folder where the persister of that spec prepares steps for an object store."""
    return spec.with_suffix(".scratch")


@contextlib.contextmanager
def scratch_beside(spec: Path) -> Iterator[Path]:
    """The scratch folder, empty, and gone afterwards."""
    folder = scratch_of(spec)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(path: str) -> None:
    """Run until SIGTERM."""
    import torch
    import torch.distributed as dist

    from pretrain import device

    spec = read_spec(Path(path))
    if spec.parent is not None:
        die_with_parent(spec.parent)  # a kill is harmless at any point; two persisters of one job would only disturb
    device.prepare("cpu")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    with scratch_beside(Path(path)) as scratch:
        target = open_target(spec.target, scratch, hash_threads=spec.hash_threads)
        persister = Persister(spec, target, _print, settled=_print)

        def leave(number: int, frame: FrameType | None) -> None:
            persister.stopping = True

        signal.signal(signal.SIGTERM, leave)
        print('{"kind":"ready"}', flush=True)
        persister.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
