"""The folder of published checkpoints as files: list, verify, pick, fence, clean up. Light: no torch here.

A step's directory counts only when its manifest is there; names that begin with a dot are work in progress
of some writer and are never read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from planner import manifest, retention
from planner.errors import BadInputError, FencedError
from planner.files import fsync_dir, write_atomic, write_json
from planner.job_record import RollBack

LATEST = "latest"
FENCE = ".fence"
_LOCK = ".lock"


@dataclass(frozen=True)
class Refusal:
    """A checkpoint that was looked at and not used, and why."""

    path: Path
    step: int
    problems: tuple[manifest.Problem, ...]

    @property
    def reason(self) -> str:
        """One line naming the files at fault."""
        return "; ".join(f"{problem.file}: {problem.problem}" for problem in self.problems)


def step_dirs(folder: Path, *, exports: bool = False) -> list[tuple[int, Path]]:
    """(step, directory) of everything named like a checkpoint (or an export), published or not, oldest first."""
    if not folder.is_dir():
        return []
    found = []
    for entry in folder.iterdir():
        parsed = manifest.parse_step_dir(entry.name)
        if parsed and parsed[1] == exports and entry.is_dir():
            found.append((parsed[0], entry))
    return sorted(found)


def published(folder: Path, *, exports: bool = False) -> list[tuple[int, Path]]:
    """(step, directory) of those that have a manifest, oldest first; nothing is verified here."""
    return [(step, path) for step, path in step_dirs(folder, exports=exports) if (path / manifest.NAME).is_file()]


def examine(path: Path, step: int) -> tuple[manifest.Problem, ...]:
    """Every problem of one published checkpoint, its manifest's step included; empty when it can be used."""
    problems = manifest.verify(path)
    if not problems and (said := manifest.read_manifest(path).step) != step:
        problems = [manifest.Problem(manifest.NAME, f"says step {said}, the directory says {step}")]
    return tuple(problems)


def newest_verified(folder: Path) -> tuple[Path | None, list[Refusal]]:
    """The newest published checkpoint whose every byte verifies, and those newer ones that were refused.

    Directories without a manifest are unpublished and are passed over in silence: they are a crashed or
    running save, not a checkpoint.
    """
    refused: list[Refusal] = []
    for step, path in reversed(published(folder)):
        problems = examine(path, step)
        if not problems:
            return path, refused
        refused.append(Refusal(path, step, problems))
    return None, refused


def read_latest(folder: Path) -> Path | None:
    """The directory that ``latest`` names, or None where there is no such file or directory."""
    try:
        name = (folder / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    target = folder / name
    return target if manifest.parse_step_dir(name) and target.is_dir() else None


def move_latest(folder: Path, name: str) -> None:
    """Let ``latest`` name a published step; the caller has made that step durable before."""
    write_atomic(folder / LATEST, name + "\n")


# ---------------------------------------------------------------- fencing


@dataclass(frozen=True)
class Fence:
    """A right to publish in a checkpoint folder; of one job's rights the greatest (incarnation, token) holds."""

    job: str
    incarnation: int
    token: int = 0

    def older_than(self, other: Fence) -> bool:
        """Whether ``other`` has taken this right away: a later one of the same job, or any of another job."""
        if self.job != other.job:
            return True
        return (self.incarnation, self.token) < (other.incarnation, other.token)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that checking the fence and publishing are one step."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def read_fence(folder: Path) -> Fence | None:
    """The newest right that a folder has seen; None where nobody claimed it."""
    try:
        data = json.loads((folder / FENCE).read_text())
        return Fence(str(data["job"]), int(data["incarnation"]), int(data["token"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{folder / FENCE}: unreadable fence ({error}); delete it if no job writes here") from error


def check_fence(folder: Path, own: Fence) -> None:
    """Refuse a writer whose right was taken over.

    Raises:
        FencedError: a newer incarnation or lease, or another job, has claimed this folder; the writer must stop.
    """
    newest = read_fence(folder)
    if newest is not None and own.older_than(newest):
        raise FencedError(
            f"{folder}: job {own.job}, incarnation {own.incarnation} (token {own.token}) may not publish: "
            f"job {newest.job}, incarnation {newest.incarnation} (token {newest.token}) has taken over"
        )


def claim(folder: Path, own: Fence) -> None:
    """Take the right to publish in ``folder``; from now on older incarnations and leases are refused.

    A job may claim a folder of another job: the last claim holds, and the other one is refused when it
    publishes next, instead of the two mixing their steps in silence.

    Raises:
        FencedError: a newer incarnation or lease of the same job has claimed it already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        newest = read_fence(folder)
        if newest is not None and newest.job == own.job:
            check_fence(folder, own)
        if own != newest:
            write_json(folder / FENCE, {"job": own.job, "incarnation": own.incarnation, "token": own.token})


# ---------------------------------------------------------------- after a roll-back


def newest_sound(folder: Path, back: RollBack | None) -> Path | None:
    """The checkpoint to go on from: the newest, or after a roll-back the newest that holds nothing of the bad stretch.

    The first incarnation after it goes ``back.older`` checkpoints further back, as far as there are any.
    """
    found = published(folder)
    if back is None:
        return found[-1][1] if found else None
    later = [path for _, path in found if manifest.read_manifest(path).incarnation >= back.incarnation]
    if later:
        return later[-1]
    before = [path for step, path in found if step <= back.at_most]
    return before[max(0, len(before) - 1 - back.older)] if before else None


def from_before(resume: str | None, back: RollBack) -> bool:
    """Whether a checkpoint (None: the seed) was made before the roll-back."""
    return resume is None or manifest.read_manifest(Path(resume)).incarnation < back.incarnation


def end_of_stretch(folder: Path, back: RollBack, batch: int) -> int:
    """The sample position after step ``back.beyond`` of the run that is given up.

    Each step draws one global batch, so the position follows from any earlier one of that run: those of its
    checkpoints, which are still there, and the one at which it went on after an earlier roll-back. Batches that the
    guard left out later make the stretch end a little further; their samples may be drawn again.
    """
    known = [(0, 0), back.anchor]
    for step, path in published(folder):
        if step <= back.beyond:
            known.append((step, manifest.read_manifest(path).consumed_samples))
    return max(consumed + (back.beyond - step) * batch for step, consumed in known)


def drop_void(folder: Path, keep: int, since: int) -> list[tuple[int, Path]]:
    """Delete checkpoints newer than step ``keep`` that incarnations before ``since`` made; returns them.

    The run takes other data from there on, so the same step will be another state. The caller has claimed the folder.
    """
    void = [(step, path) for step, path in published(folder)
            if step > keep and manifest.read_manifest(path).incarnation < since]  # fmt: skip
    with locked(folder):
        for _, path in void:
            remove_tree(path)
        left = published(folder)
        if void and left:
            move_latest(folder, left[-1][1].name)
        elif void:
            (folder / LATEST).unlink(missing_ok=True)
    return void


# ---------------------------------------------------------------- making and removing directories


def work_dir(folder: Path, step: int, own: Fence, export: bool = False) -> Path:
    """The hidden directory in which this writer prepares a step; nobody else uses the name."""
    return folder / f".{manifest.step_dir_name(step, export)}.{own.job}.{own.incarnation}-{own.token}.tmp"


def remove_tree(path: Path) -> None:
    """Delete a directory so that no crash leaves it looking published: the manifest goes first."""
    with contextlib.suppress(FileNotFoundError):
        (path / manifest.NAME).unlink()
        fsync_dir(path)
    if path.exists():
        shutil.rmtree(path)


def commit(
    work: Path,
    target: Path,
    *,
    fence: Fence | None,
    described: manifest.Described,
    latest: bool = True,
    on_stage: Callable[[str], None] = lambda name: None,
    describe: manifest.DescribeFiles | None = None,
) -> bool:
    """Turn a finished work directory into the published ``target``.

    Syncing and hashing come first; fence, rename, manifest and ``latest`` are one short step under the lock.

    If ``target`` is published already and verifies, it stays: a replayed step has the same content, and
    somebody may be reading it.

    Args:
        work: finished directory beside ``target``.
        target: ``step-XXXXXXXX`` or ``step-XXXXXXXX.hf``.
        fence: the right to publish, checked inside the lock; None for what needs none (exports).
        described: what the manifest says besides the files.
        latest: let ``latest`` name the step afterwards; not for exports.
        on_stage: called with ``rename``, ``publish`` and ``latest`` before each begins.
        describe: hashes the files another way (the persister reads around the page cache).

    Returns:
        Whether the work directory was used.

    Raises:
        FencedError: a newer incarnation has taken over.
    """
    whole = (target / manifest.NAME).exists() and not examine(target, described.step)
    said = None if whole else manifest.prepare(work, described, describe)
    with locked(target.parent):
        if fence is not None:
            check_fence(target.parent, fence)
        if said is not None:
            on_stage("rename")
            remove_tree(target)
            work.rename(target)
            on_stage("publish")
            try:
                manifest.commit(target, said)
            except BaseException:
                remove_tree(target)
                raise
        if latest and not _overtaken(target.parent, described):
            on_stage("latest")
            move_latest(target.parent, target.name)
    return said is not None


def _overtaken(folder: Path, described: manifest.Described) -> bool:
    """Whether ``latest`` names a later step of the same incarnation: two of its saves ended in the other order."""
    named = read_latest(folder)
    if named is None or not (named / manifest.NAME).exists():
        return False
    try:
        said = manifest.read_manifest(named)
    except BadInputError:
        return False
    return (said.job, said.incarnation) == (described.job, described.incarnation) and said.step > described.step


def clear_debris(folder: Path) -> list[Path]:
    """Remove what crashed writers left: hidden work directories and step directories without a manifest.

    Only the holder of the fence may call this, at its start, inside :func:`locked`: whatever is half-made then
    belongs to a writer that may not publish any more.
    """
    removed = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        hidden = entry.name.startswith(".step-")
        unpublished = manifest.parse_step_dir(entry.name) and not (entry / manifest.NAME).exists()
        if entry.is_dir() and (hidden or unpublished):
            remove_tree(entry)
            removed.append(entry)
    return removed


def apply_retention(
    folder: Path,
    *,
    keep: int,
    keep_every: int | None,
    newest_verified: int | None,
    protected: Collection[int] = (),
) -> list[Path]:
    """Delete what :func:`planner.retention.deletable` allows, oldest first; the checkpoints that were deleted.

    Called by the holder of the fence after a publication, never before it. ``newest_verified`` is normally the
    step just published, whose bytes have been read back. Exports stay: whether a trial still needs one is the
    supervisor's to know (:func:`planner.retention.deletable_exports`).
    """
    found = dict(published(folder))
    steps = retention.deletable(
        found, keep=keep, keep_every=keep_every, newest_verified=newest_verified, protected=protected
    )
    for step in steps:
        remove_tree(found[step])
    return [found[step] for step in steps]


def retire_after(folder: Path, step: int) -> list[Path]:
    """Take the checkpoints above ``step`` out of the count (a roll-back goes to an earlier state on purpose).

    Each is renamed to ``retired-…`` with its content, so that a recovery does not pick it and a person still can.
    """
    retired = []
    for newer, path in published(folder):
        if newer > step:
            place = folder / f"retired-{path.name}"
            remove_tree(place)
            path.rename(place)
            retired.append(place)
    if retired:
        kept = published(folder)
        if kept:
            move_latest(folder, kept[-1][1].name)
        else:
            (folder / LATEST).unlink(missing_ok=True)
        fsync_dir(folder)
    return retired
