"""Who hands checkpoints over to whom, and what becomes of a rank's save when the persister fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from planner.clock import ManualClock
from planner.messages import Persisted
from pretrain import snapshot
from pretrain.channel import ListChannel
from pretrain.faults import Injector
from pretrain.handover import HandedOverCheckpoints, Place, Placement, placement
from pretrain.megatron_format import SaveFailedError
from pretrain.parallel import layout
from pretrain.published import Fence
from pretrain.snapshot_writer import Taken
from pretrain.state import TrainState
from tests.support import snapshots
from tests.support.ranks import tiny


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _placements(nodes: str, tensor: int, pipeline: int, **more: bool) -> list[Placement]:
    """Placements of ranks on nodes named by letters, in rank order."""
    layouts = [layout(rank, len(nodes), tensor, pipeline) for rank in range(len(nodes))]
    places = [
        Place(node, one.tensor_rank, one.pipeline_rank, one.data_rank) for node, one in zip(nodes, layouts, strict=True)
    ]
    return [placement(places, rank, one, **more) for rank, one in enumerate(layouts)]


def test_one_replica_per_node_copies_and_rank_0s_node_publishes() -> None:
    found = _placements("aabb", 1, 1)
    assert [one.copies for one in found] == [True, False, True, False]
    assert [one.first for one in found] == [True, False, True, False]
    assert [one.marks for one in found] == [True, True, False, False]
    assert all(one.whole for one in found)


def test_a_model_that_no_node_holds_whole_is_saved_by_the_ranks() -> None:
    assert not any(one.whole for one in _placements("ab", 1, 2))
    assert all(one.whole for one in _placements("aabb", 2, 1))
    assert all(one.copies for one in _placements("aaaa", 2, 2))


def test_optimizer_state_cut_over_replicas_needs_every_one_of_them() -> None:
    assert all(one.copies for one in _placements("aa", 1, 1, sharded=True))
    assert not any(one.whole for one in _placements("ab", 1, 1, sharded=True))
    assert all(one.whole for one in _placements("aa", 1, 1, sharded=True))


class _Memory:
    """A snapshot tier that copies small tensors instead of a model."""

    def __init__(self, memory: Path) -> None:
        self.writer = snapshots.writer(memory)
        self.refuse = ""

    def hand_over(self, state: TrainState, *, persist: bool) -> Taken:
        """Begin."""
        if self.refuse:
            return Taken(state.step, 0.0, skipped=self.refuse)
        return self.writer.begin(snapshots.source(state.step, persist=persist))

    def drain(self) -> None:
        """Commit."""
        self.writer.wait_committed()


class Bench:
    """A rank's durable tier without a model; the persister is the test."""

    def __init__(self, place: Path, **settings: Any) -> None:
        self.channel, self.memory = ListChannel(), _Memory(place)
        self.direct: list[int] = []
        config = tiny(checkpoint=settings)
        bench = self

        class Checkpoints(HandedOverCheckpoints):
            def _save_directly(self, state: TrainState) -> None:
                bench.direct.append(state.step)

        self.checkpoints = Checkpoints(
            folder=place / "checkpoints",
            fence=Fence("job", 1),
            parts=SimpleNamespace(config=config, state=TrainState(1)),  # type: ignore[arg-type]
            channel=self.channel,
            injector=Injector([], [], 0, self.channel.send),
            clock=ManualClock(),
            memory=snapshot.job_dir(place, "job"),
            snapshots=self.memory,  # type: ignore[arg-type]
            placement=Placement(copies=True, first=True, marks=True, whole=True),
        )
        self.checkpoints.heard(Persisted(step=0))

    def save(self, step: int) -> bool:
        """Hand over; the copy is committed afterwards."""
        handed = self.checkpoints.save(TrainState(1, step=step))
        self.memory.drain()
        return handed

    def end(self, step: int, published: bool) -> None:
        """What the persister says and notes in the end."""
        self.checkpoints.heard(Persisted(step=step, published=published, reason="" if published else "no such bucket"))
        for found in snapshot.find(self.checkpoints.memory or Path()):
            if found.step == step:
                snapshot.settle(self.checkpoints.memory or Path(), found)


def test_only_given_up_checkpoints_in_a_row_are_an_error(tmp_path: Path) -> None:
    """C2: one that comes through ends the row; the limit is the config's."""
    bench = Bench(tmp_path, failures=2)
    for step, published in ((1, False), (3, True), (4, False), (6, False)):
        while not bench.save(step):  # the hand-over that hears of a failure is that failure, and is made again
            pass
        bench.end(step, published)
        assert bench.checkpoints.failures <= 1
    with pytest.raises(SaveFailedError, match="step 6 was given up: no such bucket"):
        bench.save(7)


def test_a_leaving_rank_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.save(1)
    bench.end(1, published=True)
    bench.checkpoints.settle()
    bench.checkpoints.settle()
    assert bench.save(2)
    bench.end(2, published=False)
    with pytest.raises(SaveFailedError, match="no such bucket"):
        bench.checkpoints.settle()


def test_a_save_that_memory_refuses_is_made_by_the_ranks(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.memory.refuse = "no room"
    assert bench.save(1)
    assert bench.direct == [1]
    assert bench.checkpoints.pending is None


def test_a_copy_that_died_with_its_rank_is_noticed(tmp_path: Path) -> None:
    """After a re-form the last hand-over is in memory, whole, or published; otherwise it is made again."""
    bench = Bench(tmp_path)
    assert bench.save(4)
    bench.checkpoints.fence = Fence("job", 2)
    assert bench.checkpoints.take_over(5)
    (found,) = snapshot.find(bench.checkpoints.memory or Path())
    assert (found.step, found.incarnation) == (4, 2)
    found.shards[0].buffer.invalidate()
    assert not bench.checkpoints.take_over(5)
    assert bench.save(6)
    bench.end(6, published=True)
    for found in snapshot.find(bench.checkpoints.memory or Path()):
        found.shards[0].buffer.invalidate()
    assert bench.checkpoints.take_over(7), "what is published need not be in memory"
