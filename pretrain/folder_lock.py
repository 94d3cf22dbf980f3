"""A lock in a shared folder, with an owner and an expiry: who dies or hangs with it does not hold it for ever."""

from __future__ import annotations

import contextlib
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
    finds it expired takes it over. Taking over is not atomic with the old holder's last write, so what it guards
    must be committed by one rename of the owner's own work, as :mod:`pretrain.data` does: then two holders at
    once cost work, never correctness.
    """

    def __init__(self, path: Path, owner: str, *, lifetime: float = 60.0, clock: Clock | None = None) -> None:
        """A lock at ``path`` for ``owner`` (unique in the cluster), held for ``lifetime`` seconds at a time."""
        self.path = path
        self.owner = owner
        self.lifetime = lifetime
        self._clock = clock or SystemClock()

    def try_acquire(self) -> bool:
        """Take the lock if it is free or expired."""
        holder = self.holder()
        if holder is not None and holder[1] > self._clock.time():
            return holder[0] == self.owner
        if holder is not None or self.path.exists():
            self._remove_expired()
        content = json.dumps(self._content()).encode()
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{threading.get_ident()}")
        temporary.write_bytes(content)
        try:
            os.link(temporary, self.path)  # atomic and complete: a reader never sees an empty lock
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
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
        holder = self.holder()
        if holder is None or holder[0] != self.owner:
            raise LockLostError(f"{self.path}: the lock of {self.owner} was taken over by {holder and holder[0]}")
        write_json(self.path, self._content())

    def release(self) -> None:
        """Give the lock back if it is still ours."""
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

    def _content(self) -> dict[str, object]:
        return {"owner": self.owner, "expires": self._clock.time() + self.lifetime}

    def _remove_expired(self) -> None:
        """Move an expired or unreadable lock aside by a rename that only one contender can do.

        Between the look and the rename a third may have taken the lock anew; then what was moved is alive, and
        it is put back unless yet another lock stands there already.
        """
        aside = self.path.with_name(f".{self.path.name}.expired.{os.getpid()}.{threading.get_ident()}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        moved = FolderLock(aside, self.owner, clock=self._clock).holder()
        if moved is not None and moved[1] > self._clock.time():
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)
