"""A submitted job whose ``checkpoint.dir`` is an S3 URL, against a server that fails and damages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.events import JobState
from planner.manifest import verify
from pretrain.targets import ObjectTarget, open_target
from tests.support.cluster import Cluster, cluster, cluster_of_module
from tests.support.object_store import Faulty, access, server
from tests.support.ranks import tiny
from tests.support.redis import await_that, redis_of_session

__all__ = ["cluster", "cluster_of_module", "redis_of_session", "server"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
BUCKET = "training"


@pytest.fixture(scope="module", autouse=True)
def bucket(server: tuple[str, Faulty]) -> Iterator[Faulty]:
    """A bucket, and (before the cluster is there) an environment in which the cluster's processes find it."""
    import s3fs

    url, faulty = server
    with pytest.MonkeyPatch.context() as patch:
        for name, value in access(url).items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir(BUCKET)
        yield faulty
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.timeout(400)
def test_checkpoints_of_a_job_go_to_and_come_from_an_object_store(
    bucket: Faulty, cluster: Cluster, tmp_path: Path
) -> None:
    """C2, C4, C7: a refused upload is made again, a damaged object is refused by name, and the one before is used."""
    assert "AWS_ENDPOINT_URL" in os.environ
    where = f"s3://{BUCKET}/runs/tiny"
    cluster.start_agent("n1", 1, real=True)
    settings = {"dir": where, "every_steps": 4, "export": True}
    one = {"workers": {"min": 1, "max": 1}}
    refusals = iter([True])
    bucket.refuse = lambda method, path: method == "PUT" and path.endswith(".distcp") and next(refusals, False)
    cluster.submit(tiny(**one, steps=12, checkpoint=settings), "first")
    assert cluster.wait_state(job="first", seconds=180)["state"] == JobState.DONE
    target = open_target(where, tmp_path / "scratch")
    assert isinstance(target, ObjectTarget)
    assert target.steps() == [4, 8, 12]
    assert [event["step"] for event in cluster.events("checkpoint.published", "first")] == [4, 8, 12]
    failed = [
        event["reason"] for event in cluster.events("checkpoint.failed", "first") if "injected" in event["reason"]
    ]
    assert failed == ["try 1 of 3: injected"]  # others: a copy that found no free buffer, since the store is slow
    await_that(lambda: len(cluster.events("export.published", "first")) == 3, 90, "the exports are there")
    for event in cluster.events("export.published", "first"):
        assert not verify(Path(event["path"]))

    bucket.damage = lambda method, path: method == "GET" and path.endswith("step-00000012/megatron/common.pt")
    cluster.submit(tiny(**one, steps=12, checkpoint=settings), "second")
    await_that(
        lambda: "second" in cluster.store.jobs() and cluster.events("checkpoint.loaded", "second"), 180, "loaded"
    )
    bucket.damage = lambda method, path: False
    assert cluster.wait_state(job="second", seconds=180)["state"] == JobState.DONE
    (refused,) = cluster.events("checkpoint.refused", "second")
    assert refused["step"] == 12
    assert "megatron/common.pt" in refused["reason"]
    (loaded,) = cluster.events("checkpoint.loaded", "second")
    assert loaded["step"] == 8
    first, second = cluster.kept("first"), cluster.kept("second")
    assert sorted(second) == [9, 10, 11, 12]
    for step, (ids, loss) in second.items():
        assert ids == first[step][0]
        assert loss == pytest.approx(first[step][1], abs=1e-5)
