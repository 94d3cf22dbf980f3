"""A private PostgreSQL server on a Unix socket, where its programs are installed; else None."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PLACES = ("/usr/local/bin", *(str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)))


def programs() -> Path | None:
    """The folder of ``initdb`` and ``postgres``."""
    found = shutil.which("initdb")
    for folder in ([str(Path(found).parent)] if found else []) + list(_PLACES):
        if (Path(folder) / "initdb").exists() and (Path(folder) / "postgres").exists():
            return Path(folder)
    return None


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """A running server with its data below ``folder``; the URL of its database. As root it runs as ``nobody``."""
    found = programs()
    assert found is not None
    data, socket = folder / "data", folder / "socket"
    socket.mkdir(parents=True)
    demote: dict[str, object] = {}
    if os.geteuid() == 0:
        other = pwd.getpwnam("nobody")
        os.chown(folder, other.pw_uid, other.pw_gid)
        os.chown(socket, other.pw_uid, other.pw_gid)
        for parent in folder.parents:  # pytest's own folders are closed to others
            if parent.stat().st_uid == 0 and str(parent) not in ("/", "/tmp"):
                parent.chmod(parent.stat().st_mode | 0o011)
        demote = {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []}
    quiet = {"check": True, "capture_output": True, "timeout": 60, **demote}
    subprocess.run([found / "initdb", "-D", data, "-U", "planaria", "--auth=trust", "-N"], **quiet)  # type: ignore[call-overload]
    options = f"-c listen_addresses='' -k {socket} -c fsync=off"
    with (folder / "log").open("wb") as log:
        command = [found / "pg_ctl", "-D", data, "-o", options, "-w", "-t", "30", "start"]
        subprocess.run(command, check=True, stdout=log, stderr=log, timeout=60, **demote)  # type: ignore[call-overload]
    try:
        yield f"postgresql://planaria@/postgres?host={socket}"
    finally:
        subprocess.run([found / "pg_ctl", "-D", data, "-m", "immediate", "stop"], **quiet)  # type: ignore[call-overload]
