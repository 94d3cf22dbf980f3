"""Model directories in a node's memory: copied once for all workers, verified, counted, bounded, dropped when unused.

Everything lies below ``$PLANARIA_SHM/models`` (``/dev/shm/planaria-<user>`` without one): a folder per digest, beside
it a folder of references, one file per process that uses it. A process that dies takes its reference with it, since
a reference counts only while its process lives. ``python -m evalsched.staging PATH DIGEST`` stages from outside.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evalsched.digests import model_digest
from planner.errors import BadInputError, PlanariaError, one_line

log = logging.getLogger("planaria.staging")

SHARE = 0.25
"""Share of the memory file system's size that staged models may take, where ``PLANARIA_STAGE_BYTES`` says nothing."""
_CHUNK = 8 << 20


def staging_root() -> Path:
    """Where this node's staged models lie."""
    base = os.environ.get("PLANARIA_SHM") or f"/dev/shm/planaria-{os.getuid()}"
    return Path(base) / "models"


def staging_budget(root: Path) -> int:
    """Bytes that staged models may take together."""
    if own := os.environ.get("PLANARIA_STAGE_BYTES"):
        return int(own)
    try:
        return int(shutil.disk_usage(root).total * SHARE)
    except OSError:
        return 0


@dataclass(frozen=True)
class Staged:
    """A model that may be read at ``folder`` until :meth:`release`."""

    folder: Path
    reference: Path | None
    """None where it was not staged, but is read where it lies."""

    def release(self) -> None:
        """This process needs it no more; it stays for others until its room is needed."""
        if self.reference is not None:
            self.reference.unlink(missing_ok=True)


Copy = Callable[[Path, Path, str], None]
"""``copy(source, work, digest)``: brings a model into ``work``, going on with what is there already."""


def stage(
    source: Path, digest: str, *, root: Path | None = None, budget: int | None = None, copy: Copy | None = None
) -> Staged:
    """``source`` in memory; where it does not fit beside what others use, ``source`` itself.

    ``copy``: where the bytes come from instead of ``source`` (:class:`evalsched.peer_staging.PeerStaging`).

    Raises:
        BadInputError: what was copied has another digest than ``digest``: the source changed, or was never it.
    """
    base = root or staging_root()
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    target = base / digest
    with _lock(base / f".{digest}.lock"):
        if not target.is_dir():
            size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
            if not _make_room(base, size, staging_budget(base) if budget is None else budget):
                log.warning("action=stage.skipped source=%s bytes=%d reason=no room", source, size)
                return Staged(source, None)
            _bring(source, target, digest, copy or (lambda source, work, _: copy_files(source, work)))
        return Staged(target, _refer(base, digest))


def _refer(base: Path, digest: str) -> Path:
    folder = base / f".{digest}.refs"
    folder.mkdir(exist_ok=True)
    reference = folder / f"{os.getpid()}-{_started(os.getpid())}"
    reference.touch()
    os.utime(base / digest)
    return reference


def _started(pid: int) -> str:
    """Start time of a process in ticks; with the pid it names one process for good."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text[text.rindex(")") + 2 :].split()[19]


def in_use(base: Path, digest: str) -> bool:
    """Whether a live process refers to it; references of dead ones are removed."""
    used = False
    for reference in (base / f".{digest}.refs").glob("*"):
        pid, _, started = reference.name.partition("-")
        if pid.isdigit() and _started(int(pid)) == started:
            used = True
        else:
            reference.unlink(missing_ok=True)
    return used


def _make_room(base: Path, size: int, budget: int) -> bool:
    """Drop the least recently used models that nobody uses until ``size`` more bytes fit."""
    with _lock(base / ".room.lock"):
        models = sorted((path for path in base.iterdir() if not path.name.startswith(".")), key=_age)
        taken = {path: sum(one.stat().st_size for one in path.rglob("*") if one.is_file()) for path in models}
        for path in models:
            if sum(taken.values()) + size <= budget:
                break
            if not in_use(base, path.name):
                _drop(base, path.name)
                del taken[path]
        return sum(taken.values()) + size <= budget


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _drop(base: Path, digest: str) -> None:
    away = base / f".{digest}.gone.{os.getpid()}"
    with contextlib.suppress(OSError):
        (base / digest).rename(away)
    shutil.rmtree(away, ignore_errors=True)
    shutil.rmtree(base / f".{digest}.refs", ignore_errors=True)


def unstage(digest: str, *, root: Path | None = None) -> bool:
    """Drop a model that nobody uses; False where somebody does."""
    base = root or staging_root()
    with _lock(base / f".{digest}.lock"):
        if in_use(base, digest):
            return False
        _drop(base, digest)
        return True


def _bring(source: Path, target: Path, digest: str, copy: Copy) -> None:
    """Copy beside the target, going on with what a process that died left there; verify, move into place."""
    work = target.with_name(f".{target.name}.part")
    started = time.monotonic()
    left = work.is_dir()
    try:
        while True:
            work.mkdir(exist_ok=True)
            copy(source, work, digest)
            found = model_digest(work)
            if found == digest:
                break
            shutil.rmtree(work, ignore_errors=True)
            if not left:
                raise BadInputError(f"{source}: its digest is {found}, {digest} was asked for; it changed meanwhile")
            left = False  # what was left was of another content: once more from the start
        with contextlib.suppress(OSError):
            work.rename(target)
        if not target.is_dir():
            raise OSError("the copy could not be moved into place")
    except (OSError, shutil.Error) as error:
        shutil.rmtree(work, ignore_errors=True)
        raise BadInputError(f"{source}: cannot be staged ({one_line(error)})") from error
    log.info("action=staged source=%s seconds=%.2f", source, time.monotonic() - started)


def copy_files(source: Path, work: Path, pace: Callable[[int], None] = lambda _: None) -> None:
    """Copy a folder's files, from where a broken copy ended; ``pace`` is called with each piece's bytes.

    Raises:
        OSError: a file cannot be read or written.
    """
    for path in sorted(one for one in source.rglob("*") if one.is_file()):
        target = work / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        have = target.stat().st_size if target.exists() else 0
        if have > path.stat().st_size:
            have = 0
        with path.open("rb") as reading, target.open("r+b" if have else "wb") as writing:
            reading.seek(have)
            writing.seek(have)
            while chunk := reading.read(_CHUNK):
                writing.write(chunk)
                pace(len(chunk))


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Stage ``PATH DIGEST`` and print where it lies, or ``--drop DIGEST``. The reference is this process's and ends
    with it. In a cluster (``PLANARIA_URL``) it comes from a peer where one has it."""
    if len(sys.argv) != 3:
        print("usage: python -m evalsched.staging PATH DIGEST | --drop DIGEST", file=sys.stderr)
        return 2
    try:
        if sys.argv[1] == "--drop":
            unstage(sys.argv[2])
        else:
            print(stage(Path(sys.argv[1]), sys.argv[2], copy=_from_peers()).folder)
    except PlanariaError as error:
        print(f"planaria: {one_line(error)}", file=sys.stderr)
        return int(error.exit_code)
    return 0


def _from_peers() -> Copy | None:
    if "PLANARIA_URL" not in os.environ or "PLANARIA_NODE" not in os.environ:
        return None
    from evalsched.peer_staging import PeerStaging, address_towards
    from planner.cluster import connect

    store, _ = connect(None, None)
    if store.secret is None:
        return None
    return PeerStaging(store, os.environ["PLANARIA_NODE"], address_towards(store.url)).copy


if __name__ == "__main__":
    sys.exit(main())
