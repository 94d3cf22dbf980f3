"""A lock in a shared folder, with an owner and an expiry: who dies or hangs with it does not hold it for ever."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from planner.clock import Clock, SystemClock
from planner.files import write_json

POLL_SECONDS = 0.1


class LockLostError(RuntimeError):
    """The lock expired and somebody else took it."""


class FolderLock:
    """A lock file that names its owner and the time until which it holds.

    Nodes need clocks that agree within a fraction of ``lifetime``. A holder renews it in the background; who
    finds it expired takes it over. Looking and taking are one step under the kernel's lock on a file beside it.
    Where a file system keeps such locks per node, two may still take it at once; what it guards is therefore
    committed by one rename of the owner's own work (:mod:`pretrain.data`), so that costs work, never correctness.
    """

    def __init__(self, path: Path, owner: str, *, lifetime: float = 60.0, clock: Clock | None = None) -> None:
        """A lock at ``path`` for ``owner`` (unique in the cluster), held for ``lifetime`` seconds at a time."""
        self.path = path
        self.owner = owner
        self.lifetime = lifetime
        self._clock = clock or SystemClock()

    def try_acquire(self) -> bool:
        """Take the lock if it is free, expired, unreadable or ours."""
        with self._guarded():
            holder = self.holder()
            if holder is not None and holder[0] != self.owner and holder[1] > self._clock.time():
                return False
            self._write()
            return True

    def holder(self) -> tuple[str, float] | None:
        """(owner, expiry in seconds since the epoch), or None where the lock is free or unreadable."""
        try:
            value = json.loads(self.path.read_text())
            return str(value["owner"]), float(value["expires"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def renew(self) -> None:
        """Extend the lock.

        Raises:
            LockLostError: it is somebody else's by now.
        """
        with self._guarded():
            holder = self.holder()
            if holder is None or holder[0] != self.owner:
                raise LockLostError(f"{self.path}: the lock of {self.owner} is now {holder[0] if holder else 'free'}")
            self._write()

    def release(self) -> None:
        """Give the lock back if it is still ours."""
        with self._guarded():
            holder = self.holder()
            if holder is not None and holder[0] == self.owner:
                self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Keep an acquired lock alive in the background, and release it at the end."""
        stop = threading.Event()

        def keep() -> None:
            while not stop.wait(self.lifetime / 4):
                try:
                    self.renew()
                except (LockLostError, OSError):
                    return

        thread = threading.Thread(target=keep, name="folder-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.release()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        fd = os.open(self.path.with_name(f".{self.path.name}.guard"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self) -> None:
        write_json(self.path, {"owner": self.owner, "expires": self._clock.time() + self.lifetime})
