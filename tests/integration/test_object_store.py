"""Checkpoints in an S3 server (moto's), with errors injected into its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from planner.errors import FencedError
from planner.messages import RankCheckpoint
from pretrain.persister import Persister, PersisterSpec, key_of
from pretrain.published import Fence
from pretrain.targets import ObjectTarget, open_target
from tests.support import snapshots
from tests.support.object_store import Faulty, access, server

__all__ = ["server"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture
def store(
    server: tuple[str, Faulty], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ObjectTarget, Faulty]]:
    import s3fs

    url, faulty = server
    for name, value in access(url).items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = f"bucket-{abs(hash(tmp_path))}"
    s3fs.S3FileSystem().mkdir(bucket)
    target = open_target(f"s3://{bucket}/job/checkpoints", tmp_path / "scratch")
    assert isinstance(target, ObjectTarget)
    yield target, faulty
    faulty.refuse = faulty.damage = lambda method, path: False
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _persist(target: ObjectTarget, memory: Path, step: int, **settings: Any) -> list[RankCheckpoint]:
    said: list[RankCheckpoint] = []
    incarnation = settings.pop("incarnation", 1)
    spec = PersisterSpec(job="job", memory_dir=str(memory), target=target.url, back_off_seconds=0.01, **settings)
    snapshots.take(memory, step, incarnation=incarnation, persist=True).close()
    persister = Persister(spec, target, said.append)
    persister.done = {key_of(found) for found in persister.waiting() if found.step != step}
    for found in persister.waiting():
        persister.persist(found)
    return said


def test_publish_list_retain_and_fetch(store: tuple[ObjectTarget, Faulty], tmp_path: Path) -> None:
    target, _ = store
    for step in (1, 2, 3):
        said = _persist(target, tmp_path / "m", step, keep=2)
        assert said[0].what == "published", said
    assert target.steps() == [2, 3]
    path, refused = target.newest_verified(tmp_path / "cache")
    assert path is not None
    assert path.name == "step-00000003"
    assert not refused
    assert sorted(one.name for one in (path / "megatron").iterdir()) == [
        ".metadata", "__0_0.distcp", "common.pt", "metadata.json",
    ]  # fmt: skip


def test_an_upload_that_fails_is_never_listed_and_is_tried_again(
    store: tuple[ObjectTarget, Faulty], tmp_path: Path
) -> None:
    target, faulty = store
    _persist(target, tmp_path / "m", 1)
    refusals = iter([True])
    faulty.refuse = lambda method, path: method == "PUT" and path.endswith(".distcp") and next(refusals, False)
    said = _persist(target, tmp_path / "m", 2)
    assert [one.what for one in said] == ["failed", "published"]
    faulty.refuse = lambda method, path: method == "PUT" and path.endswith("manifest.json")
    said = _persist(target, tmp_path / "m", 3, failures=2)
    assert [one.what for one in said] == ["failed", "failed"]
    faulty.refuse = lambda method, path: False
    assert target.steps() == [1, 2]
    path, _ = target.newest_verified(tmp_path / "cache")
    assert path is not None
    assert path.name == "step-00000002"


def test_what_comes_back_different_is_not_published(store: tuple[ObjectTarget, Faulty], tmp_path: Path) -> None:
    """C4 on an object store, and C7 when the damage comes later: refused by the file's name, the older one is used."""
    target, faulty = store
    _persist(target, tmp_path / "m", 1)
    damages = iter([True])
    faulty.damage = lambda method, path: method == "GET" and path.endswith(".distcp") and next(damages, False)
    said = _persist(target, tmp_path / "m", 2)
    assert [one.what for one in said] == ["failed", "published"]
    assert "came back" in said[0].reason or "checksum" in said[0].reason, "the client library may notice it first"
    faulty.damage = lambda method, path: method == "GET" and path.endswith("step-00000002/megatron/common.pt")
    path, refused = target.newest_verified(tmp_path / "cache")
    assert path is not None
    assert path.name == "step-00000001"
    assert [(one.step, one.problems[0].file) for one in refused] == [(2, "megatron/common.pt")]


def test_fencing_on_an_object_store(store: tuple[ObjectTarget, Faulty], tmp_path: Path) -> None:
    target, _ = store
    target.claim(Fence("job", 5))
    assert [one.what for one in _persist(target, tmp_path / "m", 1, incarnation=4, fence_patience=0.0)] == ["refused"]
    with pytest.raises(FencedError, match="has taken over"):
        target.claim(Fence("job", 4))
    assert target.steps() == []
    assert [one.what for one in _persist(target, tmp_path / "m", 2, incarnation=5)] == ["published"]
