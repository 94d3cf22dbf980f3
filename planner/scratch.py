"""Temporary files of processes that may be killed: in a folder that whoever started them removes.

Libraries leave sockets and files in ``TMPDIR`` when a process is killed (vLLM's sockets and rendezvous files, torch's
stores), and workers are killed all the time.
"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from pathlib import Path

RECORD = "scratch"
"""File that names the scratch folder of whoever runs in the directory where it stands."""


def scratch_environment(folder: Path) -> dict[str, str]:
    """What lets a process keep its temporary files in ``folder``, but what torch compiles where it is found again."""
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return {
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": kept or str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"),
    }


def renew_scratch(run_dir: Path) -> Path:
    """The scratch folder of whoever runs in ``run_dir``: that of an earlier life, or a new one."""
    found = scratch_of(run_dir)
    if found is None or not found.is_dir():
        found = Path(tempfile.mkdtemp(prefix="planaria-"))  # short: paths of sockets have at most 107 bytes
        (run_dir / RECORD).write_text(str(found))
    return found


def remove_scratch(run_dir: Path) -> None:
    """Remove the scratch folder of whoever ran in ``run_dir``."""
    if (found := scratch_of(run_dir)) is not None:
        shutil.rmtree(found, ignore_errors=True)
        (run_dir / RECORD).unlink(missing_ok=True)


def scratch_of(run_dir: Path) -> Path | None:
    """The recorded scratch folder; None where there is none, or where the record names no folder of ours."""
    try:
        found = Path((run_dir / RECORD).read_text())
    except OSError:
        return None
    return found if found.name.startswith("planaria-") and found.is_absolute() else None
