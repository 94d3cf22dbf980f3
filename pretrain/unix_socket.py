"""Unix sockets at paths of any length: the kernel takes 107 bytes, a state directory may be longer.

The folder is opened and the socket reached through ``/proc/self/fd/<n>/<name>``, which is always short.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def listen(path: Path, backlog: int = 128) -> socket.socket:
    """A listening stream socket at ``path`` (mode 0600), replacing a stale one of an earlier life."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path) as short:
            server.bind(short)
        os.chmod(path, 0o600)
        server.listen(backlog)
    except BaseException:
        server.close()
        raise
    return server


def connect(path: Path, timeout: float | None = None) -> socket.socket:
    """A stream socket connected to ``path``.

    Raises:
        OSError: nobody listens there, or not within ``timeout`` seconds.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(timeout)
        with _short(path) as short:
            client.connect(short)
        client.settimeout(None)
    except BaseException:
        client.close()
        raise
    return client
