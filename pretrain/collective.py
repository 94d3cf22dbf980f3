"""Leaving the collective: whatever a rank is blocked in, it is out within milliseconds, and so are its peers.

What bites (gloo): only the neighbours of a dead rank see its sockets close; ranks further away stay blocked until
the time-out, and *nobody* notices a stopped rank or a cut link. ``ProcessGroupGloo.abort()`` does not unblock a
waiting thread; shutting down the group's connected sockets does, from any thread. So whoever learns first (its own
exception, or a word from its agent) tears its part down with :func:`leave_collective`, which makes its peers raise
in turn; agreement about what to do comes afterwards.

On NCCL the communicators are aborted instead; same interface, unverified where there is no GPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
import traceback
from collections.abc import Iterator

from planner.errors import PlanariaError

SWEEP_SECONDS = 0.02
"""Pause between two looks for new connections of a rank that was told to leave while it joins."""


class CollectiveLeftError(PlanariaError):
    """This rank has left its collective: nothing of this incarnation may be sent or received any more."""


class Membership:
    """This process's part in one incarnation's collectives: which sockets belong to it, and whether it has left.

    Wrap everything that opens connections (joining the store, building groups) in :meth:`joining`. Thread-safe:
    the main thread computes, any other thread may call :func:`leave_collective`.
    """

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.left = threading.Event()
        self.reason = ""
        self._lock = threading.Lock()
        self._foreign: frozenset[int] | None = None
        self._own: frozenset[int] = frozenset()
        self._private = False
        self.deferred = False
        """True where it was left without shutting anything down, since this rank was blocked in nothing."""

    @contextlib.contextmanager
    def joining(self) -> Iterator[None]:
        """The region in which this incarnation's connections are made; it can be left from another thread too.

        Raises:
            CollectiveLeftError: at once or at the end, if the collective was left before or meanwhile.
        """
        with self._lock:
            self.check()
            self._foreign = frozenset(_connected())
        try:
            yield
        finally:
            with self._lock:
                self._own = frozenset(_connected()) - (self._foreign or frozenset())
                self._foreign = None
            if self.left.is_set():
                # Connections that were made after the shut-down must not keep anybody waiting.
                self._shut_down()
        self.check()

    @contextlib.contextmanager
    def private(self) -> Iterator[None]:
        """A region that talks to nobody outside this rank's replica: a deferred :meth:`leave` lets it end first.

        Raises:
            CollectiveLeftError: at once or at the end, if the collective was left.
        """
        with self._lock:
            self.check()
            self._private = True
        try:
            yield
        finally:
            with self._lock:
                self._private = False
        self.check()

    def check(self) -> None:
        """Raise if the collective was left; call it between the parts of a step that run no collective.

        Raises:
            CollectiveLeftError: it was.
        """
        if self.left.is_set():
            raise CollectiveLeftError(f"incarnation {self.incarnation} was left: {self.reason}")

    def leave(self, reason: str, *, defer: bool = False) -> bool:
        """See :func:`leave_collective`; with ``defer`` a region :meth:`private` is not disturbed.

        What was deferred is left in earnest by the next call without ``defer``.
        """
        with self._lock:
            first = not self.left.is_set()
            if first:
                self.reason = reason
                self.left.set()
            if defer and (self._private or self.deferred):
                self.deferred = True
                return first
            in_earnest = first or self.deferred
            self.deferred = False
        if self._shut_down() and in_earnest:
            threading.Thread(target=self._sweep, name="leave-collective", daemon=True).start()
        return first

    def _sweep(self) -> None:
        """While this rank still joins it makes new connections, and may block on each: shut them down as they come."""
        while self._shut_down():
            time.sleep(SWEEP_SECONDS)

    def _shut_down(self) -> bool:
        """Shut down what belongs to this incarnation now; True while it is still joining."""
        _abort_nccl()
        with self._lock:
            joining = self._foreign is not None
            # While joining, connections appear one by one: all that were not there before are ours.
            own = frozenset(_connected()) - self._foreign if self._foreign is not None else self._own
            shut_down_sockets(own)
        return joining


def leave_collective(membership: Membership, reason: str, *, defer: bool = False) -> bool:
    """Get this rank out of every collective of its incarnation, at once, and make its peers raise.

    Callable from any thread, any number of times; it waits for nobody. Whatever the main thread is blocked in (a
    collective, a point-to-point transfer, the rendezvous) raises there; the main thread then drops the groups with
    :func:`pretrain.parallel.leave`, which nobody else may do.

    Args:
        membership: the incarnation to leave.
        reason: for the error that the main thread sees.
        defer: the broken ranks are not of this replica: let a region :meth:`Membership.private` come to its end.

    Returns:
        True for the call that came first.
    """
    return membership.leave(reason, defer=defer)


def shut_down_sockets(inodes: frozenset[int]) -> int:
    """Shut down the connected TCP sockets with these inodes, both directions; how many there were.

    A file descriptor is duplicated before its inode is compared, since the owner may close it (and the number be
    given to something else) at any moment.
    """
    count = 0
    for fd in _descriptors():
        try:
            copy = os.dup(fd)
        except OSError:
            continue
        try:
            found = os.fstat(copy)
            if not stat.S_ISSOCK(found.st_mode) or found.st_ino not in inodes:
                continue
            with socket.socket(fileno=os.dup(copy)) as sock:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
        except OSError:
            continue  # the peer was faster
        finally:
            os.close(copy)
    return count


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _connected() -> Iterator[int]:
    """Inodes of this process's connected TCP sockets. Listening ones are left alone: gloo's loop aborts on them."""
    for fd in _descriptors():
        try:
            copy = os.dup(fd)
        except OSError:
            continue
        try:
            found = os.fstat(copy)
            if not stat.S_ISSOCK(found.st_mode):
                continue
            with socket.socket(fileno=os.dup(copy)) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    sock.getpeername()
                    yield found.st_ino
        except OSError:
            continue
        finally:
            os.close(copy)


def _abort_nccl() -> None:
    """Abort every NCCL communicator of this process, so that kernels and waits of any thread end."""
    import torch

    if not torch.cuda.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    for group in list(c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(torch.device("cuda"))
            if hasattr(backend, "abort"):
                backend.abort()


_COLLECTIVES = {
    "all_reduce": "reduce",
    "reduce_scatter": "reduce",
    "broadcast": "broadcast",
    "broadcast_object_list": "broadcast",
    "all_gather": "gather",
    "all_gather_object": "gather",
    "barrier": "barrier",
    "batch_isend_irecv": "pipeline",
    "send": "pipeline",
    "recv": "pipeline",
}


def collective_of(error: BaseException) -> str | None:
    """Which collective an exception came out of: the outermost frame inside torch.distributed's operations, if any."""
    for frame in traceback.extract_tb(error.__traceback__):
        if "distributed_c10d" in frame.filename and frame.name in _COLLECTIVES:
            return _COLLECTIVES[frame.name]
    return None
