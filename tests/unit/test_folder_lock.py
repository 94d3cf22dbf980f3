"""The lock with an owner and an expiry."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from planner.clock import ManualClock
from pretrain.folder_lock import FolderLock, LockLostError


def lock(path: Path, owner: str, clock: ManualClock) -> FolderLock:
    return FolderLock(path / "lock", owner, lifetime=10.0, clock=clock)


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    clock = ManualClock(100.0)
    first, second = lock(tmp_path, "a", clock), lock(tmp_path, "b", clock)
    assert first.try_acquire()
    assert not second.try_acquire()
    assert first.try_acquire(), "it is ours already"
    assert second.holder() == ("a", 110.0)
    first.release()
    assert second.try_acquire()


def test_an_expired_lock_is_taken_over_and_its_owner_notices(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    first, second = lock(tmp_path, "a", clock), lock(tmp_path, "b", clock)
    assert first.try_acquire()
    clock.advance(10.0)
    assert second.try_acquire()
    with pytest.raises(LockLostError, match="is now b"):
        first.renew()
    first.release()
    assert second.holder() == ("b", 20.0), "a late release leaves the new owner's lock alone"


def test_renewing_extends_it(tmp_path: Path) -> None:
    clock = ManualClock(0.0)
    first, second = lock(tmp_path, "a", clock), lock(tmp_path, "b", clock)
    assert first.try_acquire()
    clock.advance(9.0)
    first.renew()
    clock.advance(9.0)
    assert not second.try_acquire()


@pytest.mark.parametrize("content", ["", "no json", "[]", '{"owner": "a"}', '{"owner": "a", "expires": null}'])
def test_a_broken_lock_file_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    own = lock(tmp_path, "b", ManualClock(5.0))
    assert own.try_acquire()
    assert own.holder() == ("b", 15.0)


def _contend(own: FolderLock, gate: threading.Barrier, winners: list[str]) -> None:
    gate.wait()
    if own.try_acquire():
        winners.append(own.owner)


def test_of_many_contenders_for_an_expired_lock_one_wins(tmp_path: Path) -> None:
    for _ in range(20):
        clock = ManualClock(0.0)
        assert lock(tmp_path, "dead", clock).try_acquire()
        clock.advance(11.0)
        barrier = threading.Barrier(8)
        winners: list[str] = []

        threads = [
            threading.Thread(target=_contend, args=(lock(tmp_path, f"t{i}", clock), barrier, winners)) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        holder = lock(tmp_path, "nobody", clock).holder()
        assert holder is not None
        assert winners == [holder[0]]
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock.guard", "lock"]
        (tmp_path / "lock").unlink()


def test_renewed_in_the_background_until_the_end(tmp_path: Path) -> None:
    own = FolderLock(tmp_path / "lock", "a", lifetime=0.4)
    assert own.try_acquire()
    with own.renewed():
        first = own.holder()
        assert first is not None
        waited = threading.Event()
        while (own.holder() or first)[1] == first[1]:
            assert not waited.wait(0.02)
        other = FolderLock(tmp_path / "lock", "b", lifetime=0.4)
        assert not other.try_acquire()
    assert not (tmp_path / "lock").exists()
