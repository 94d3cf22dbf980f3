"""Where published checkpoints live: a folder, or an object store by fsspec URL. Same rules for both.

The manifest is the commit point everywhere. An object store has no rename and no lock: files go straight under
``step-XXXXXXXX/``, are read back and compared, and only then the manifest is written, in one object; the fence is
checked right before it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import xxhash

from planner import manifest, retention
from planner.errors import BadInputError, FencedError, MissingServiceError
from planner.files import map_threads
from pretrain import published, readback
from pretrain.published import FENCE, LATEST, Fence, Refusal

_CHUNK = 8 << 20


class Target(Protocol):
    """A place of published checkpoints. One fenced writer, any number of readers."""

    def work_dir(self, step: int, fence: Fence) -> Path:
        """An empty local directory to prepare a step in."""

    def publish(self, work: Path, described: manifest.Described, fence: Fence, written: Mapping[str, str]) -> str:
        """Publish a finished work directory and let ``latest`` name it; where it is now.

        ``written`` has the xxh3 of files as they were written; what is read back must be the same.
        """

    def steps(self) -> list[int]:
        """Published steps, oldest first."""

    def retain(
        self, *, keep: int, keep_every: int | None, newest_verified: int, protected: Collection[int] = ()
    ) -> list[int]:
        """Apply retention after a publication; the steps deleted."""

    def location(self, step: int) -> str:
        """Path or URL of a step's directory."""

    def incarnation_of(self, step: int) -> int | None:
        """The incarnation that published a step; None where it is not published."""

    def point_latest(self, step: int) -> None:
        """Let ``latest`` name a published step (a writer died between the two)."""

    def claim(self, fence: Fence) -> None:
        """Take the right to publish; older incarnations are refused from now on."""

    def newest_verified(self, cache: Path) -> tuple[Path | None, list[Refusal]]:
        """The newest step that verifies, as a local directory (below ``cache`` where it had to be fetched)."""


def open_target(where: str, scratch: Path, *, hash_threads: int = 2) -> Target:
    """The target at a path or URL.

    Args:
        where: folder, or a URL that fsspec knows (``s3://bucket/prefix``, ``file:///…``, ``memory://``).
        scratch: local folder in which steps for an object store are prepared.
        hash_threads: files hashed or sent at a time.

    Raises:
        BadInputError: a URL that fsspec cannot open.
    """
    if "://" not in where:
        return FolderTarget(Path(where).expanduser(), hash_threads=hash_threads)
    if where.startswith("file://"):
        return FolderTarget(Path(where.removeprefix("file://")), hash_threads=hash_threads)
    return ObjectTarget(where, scratch, threads=hash_threads)


class FolderTarget:
    """A folder on a local or shared file system."""

    def __init__(self, folder: Path, *, hash_threads: int = 2) -> None:
        self.folder = folder
        self._threads = hash_threads

    def work_dir(self, step: int, fence: Fence) -> Path:
        """A hidden directory beside the published ones, empty."""
        self.folder.mkdir(parents=True, exist_ok=True)
        work = published.work_dir(self.folder, step, fence)
        published.remove_tree(work)
        work.mkdir()
        return work

    def publish(self, work: Path, described: manifest.Described, fence: Fence, written: Mapping[str, str]) -> str:
        """Rename, read back from the disk, manifest, ``latest``."""
        target = self.folder / manifest.step_dir_name(described.step)
        read_back = functools.partial(readback.describe_from_disk, threads=self._threads, written=written)
        published.commit(work, target, fence=fence, described=described, describe=read_back)
        return str(target)

    def steps(self) -> list[int]:
        """Published steps, oldest first."""
        return [step for step, _ in published.published(self.folder)]

    def retain(
        self, *, keep: int, keep_every: int | None, newest_verified: int, protected: Collection[int] = ()
    ) -> list[int]:
        """Delete what retention allows."""
        gone = published.apply_retention(
            self.folder, keep=keep, keep_every=keep_every, newest_verified=newest_verified, protected=protected
        )
        return [parsed[0] for path in gone if (parsed := manifest.parse_step_dir(path.name))]

    def location(self, step: int) -> str:
        """The directory's path."""
        return str(self.folder / manifest.step_dir_name(step))

    def incarnation_of(self, step: int) -> int | None:
        """The incarnation in a step's manifest."""
        folder = self.folder / manifest.step_dir_name(step)
        return manifest.read_manifest(folder).incarnation if (folder / manifest.NAME).exists() else None

    def point_latest(self, step: int) -> None:
        """Move the file ``latest``."""
        with published.locked(self.folder):
            published.move_latest(self.folder, manifest.step_dir_name(step))

    def claim(self, fence: Fence) -> None:
        """See :func:`pretrain.published.claim`."""
        published.claim(self.folder, fence)

    def newest_verified(self, cache: Path) -> tuple[Path | None, list[Refusal]]:
        """The directory itself; nothing is copied."""
        return published.newest_verified(self.folder)


class ObjectTarget:
    """An object store through fsspec."""

    def __init__(self, url: str, scratch: Path, *, threads: int = 4) -> None:
        import fsspec

        self.url = url.rstrip("/")
        self._scratch = scratch
        self._threads = threads
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise BadInputError(f"checkpoint.dir {url}: cannot be opened ({error})") from error
        self._fs.use_listings_cache = False

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, *parts])

    def work_dir(self, step: int, fence: Fence) -> Path:
        """A directory in the scratch folder, empty."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        work = published.work_dir(self._scratch, step, fence)
        published.remove_tree(work)
        work.mkdir()
        return work

    def publish(self, work: Path, described: manifest.Described, fence: Fence, written: Mapping[str, str]) -> str:
        """Upload, read back, manifest, ``latest``; an upload that fails is taken away again."""
        name = manifest.step_dir_name(described.step)
        self._check_fence(fence)
        read_back = functools.partial(readback.describe_from_disk, threads=self._threads, written=written)
        said = manifest.prepare(work, described, read_back)
        names, files = list(said.files), said.files
        self._remove_step(described.step)
        try:
            map_threads(
                lambda file: self._send(work / file, self._path(name, file), files[file]["xxh3"]), names, self._threads
            )
            self._check_fence(fence)
            self._fs.pipe_file(self._path(name, manifest.NAME), json.dumps(said.to_json(), indent=2).encode())
        except BaseException:
            with contextlib.suppress(Exception):
                self._remove_step(described.step)
            raise
        self._fs.pipe_file(self._path(LATEST), f"{name}\n".encode())
        shutil.rmtree(work, ignore_errors=True)
        return self.location(described.step)

    def _send(self, source: Path, target: str, wanted: str) -> None:
        self._fs.put_file(str(source), target)
        found = self._hash(target)
        if found != wanted:
            raise readback.NotWhatWasWrittenError(f"{target}: hash {found} came back, sent {wanted}")

    def _hash(self, path: str) -> str:
        digest = xxhash.xxh3_128()
        with self._fs.open(path, "rb", cache_type="none", block_size=_CHUNK) as stream:
            while data := stream.read(_CHUNK):
                digest.update(data)
        return str(digest.hexdigest())

    def _read(self, *parts: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._path(*parts)))
        except FileNotFoundError:
            return None

    def steps(self) -> list[int]:
        """Published steps, oldest first."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        found = []
        for entry in entries:
            parsed = manifest.parse_step_dir(entry.rstrip("/").rpartition("/")[2])
            if parsed and not parsed[1] and self._fs.exists(f"{entry.rstrip('/')}/{manifest.NAME}"):
                found.append(parsed[0])
        return sorted(found)

    def retain(
        self, *, keep: int, keep_every: int | None, newest_verified: int, protected: Collection[int] = ()
    ) -> list[int]:
        """Delete what retention allows, the manifest of each first."""
        gone = retention.deletable(
            self.steps(), keep=keep, keep_every=keep_every, newest_verified=newest_verified, protected=protected
        )
        for step in gone:
            self._remove_step(step)
        return gone

    def _remove_step(self, step: int) -> None:
        """Take a step away: the manifest first, so that it is never listed without its files."""
        name = manifest.step_dir_name(step)
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name, manifest.NAME))
        self._fs.invalidate_cache()
        if self._fs.exists(self._path(name)):
            self._fs.rm(self._path(name), recursive=True)

    def _fence(self) -> Fence | None:
        raw = self._read(FENCE)
        return None if raw is None else Fence(**json.loads(raw))

    def _check_fence(self, own: Fence) -> None:
        newest = self._fence()
        if newest is not None and own.older_than(newest):
            raise FencedError(f"{self.url}: {own} may not publish: {newest} has taken over")

    def location(self, step: int) -> str:
        """The URL of its objects' common prefix."""
        return f"{self.url}/{manifest.step_dir_name(step)}"

    def incarnation_of(self, step: int) -> int | None:
        """The incarnation in a step's manifest."""
        raw = self._read(manifest.step_dir_name(step), manifest.NAME)
        return None if raw is None else int(json.loads(raw)["incarnation"])

    def point_latest(self, step: int) -> None:
        """Write the object ``latest``."""
        self._fs.pipe_file(self._path(LATEST), f"{manifest.step_dir_name(step)}\n".encode())

    def claim(self, fence: Fence) -> None:
        """Take the right to publish; refused where a newer incarnation of the job has it."""
        newest = self._fence()
        if newest is not None and newest.job == fence.job:
            self._check_fence(fence)
        if newest != fence:
            self._fs.pipe_file(self._path(FENCE), json.dumps(vars(fence)).encode())

    def newest_verified(self, cache: Path) -> tuple[Path | None, list[Refusal]]:
        """Fetch the newest step and verify it here; if it is broken, the one before it, and so on."""
        refused: list[Refusal] = []
        for step in reversed(self.steps()):
            name = manifest.step_dir_name(step)
            place = cache / name
            if not (place.is_dir() and not published.examine(place, step)):
                published.remove_tree(place)
                place.parent.mkdir(parents=True, exist_ok=True)
                self._fetch(name, place)
            problems = published.examine(place, step)
            if not problems:
                return place, refused
            refused.append(Refusal(place, step, problems))
            published.remove_tree(place)
        return None, refused

    def fetch(self, step: int, place: Path) -> None:
        """Bring one step here as it is; whether it is whole is the caller's to see.

        Raises:
            MissingServiceError: the store itself does not answer.
        """
        published.remove_tree(place)
        self._fetch(manifest.step_dir_name(step), place)

    def _fetch(self, name: str, place: Path) -> None:
        """Bring one step here as it is; files that cannot be had are left out, and so refused by the verification.

        Raises:
            MissingServiceError: the store itself does not answer.
        """
        raw = self._manifest_of(name)
        place.mkdir(parents=True, exist_ok=True)
        try:
            files = list(json.loads(raw)["files"])
        except (ValueError, KeyError, TypeError):
            files = []  # an unreadable manifest is the verification's to name
        for file in files:
            if ".." in Path(file).parts or Path(file).is_absolute():
                continue
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._fs.get_file(self._path(name, file), str(place / file))
            except Exception:  # a checksum of the client library, a missing object, a dead connection
                self._manifest_of(name)
                (place / file).unlink(missing_ok=True)
        (place / manifest.NAME).write_bytes(raw)

    def _manifest_of(self, name: str) -> bytes:
        try:
            return self._read(name, manifest.NAME) or b""
        except Exception as error:
            raise MissingServiceError(f"{self.url}/{name}: cannot be fetched ({error})") from error
