"""Training text: files and globs → a token index in Megatron's format, built once per content → samples by id.

The index lives in a cache folder, keyed by the tokenizer and by every file's path, size and time. Whoever comes
first builds it under a lock that expires (:mod:`pretrain.folder_lock`), in a folder of its own that one rename
makes visible; the others wait for it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner import stdlib_corpus
from planner.clock import Clock, SystemClock
from planner.errors import BadInputError, WorkFailedError
from planner.files import write_json
from planner.pretrain_config import Data
from pretrain.folder_lock import POLL_SECONDS, FolderLock
from pretrain.tokenizer import Tokenizer

STDLIB = "stdlib"
STDLIB_HELD_OUT = "stdlib-held-out"
HELD_OUT_ONE_IN = 20
META = "meta.json"
_FORMAT = 1
_WAIT_SECONDS = 3600.0


@dataclass(frozen=True)
class TokenIndex:
    """The tokens of one half of the data, memory-mapped; documents stand one after the other, each ended by a token."""

    prefix: Path
    """Path of Megatron's indexed dataset without ``.bin`` and ``.idx``."""
    tokens: int
    documents: int
    digest: str
    """SHA-256 of the tokens: ranks and incarnations with equal digests see equal samples."""

    def open(self) -> np.ndarray:
        """All tokens as one memory-mapped array."""
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(str(self.prefix), mmap=True)
        if int(dataset.sequence_lengths.sum()) != self.tokens or len(dataset) != self.documents:
            raise WorkFailedError(
                f"{self.prefix}: the token index does not hold the {self.tokens} tokens in {self.documents} documents "
                "that it says; delete the folder and run again"
            )
        return np.memmap(f"{self.prefix}.bin", dtype=dataset.index.dtype, mode="r")


class Samples:
    """Fixed-length stretches of the tokens: sample i is the tokens i·L to i·L + L, both ends included.

    Inputs are the first L of them and labels the last L, so that consecutive samples share one token and every
    token but the very first is predicted once an epoch. A rest shorter than L is left out.
    """

    def __init__(self, index: TokenIndex, seq_length: int) -> None:
        """Samples of ``seq_length`` (L) over ``index``."""
        self._tokens = index.open()
        self.seq_length = seq_length
        self.count = max(0, (index.tokens - 1) // seq_length)

    def batch(self, indices: Sequence[int]) -> np.ndarray:
        """Array (samples, L + 1) of int64."""
        length = self.seq_length
        return np.stack([self._tokens[i * length : i * length + length + 1] for i in indices]).astype(np.int64)


@dataclass(frozen=True)
class Corpus:
    """Both halves; ``valid`` is None where nothing can be held out."""

    train: TokenIndex
    valid: TokenIndex | None


def resolve(patterns: Sequence[str], field: str) -> list[Path]:
    """The files that ``patterns`` stand for, each once, sorted by path within a pattern.

    Raises:
        BadInputError: a pattern without any file; the message names ``field`` and the pattern.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if pattern == STDLIB:
            paths = stdlib_corpus.training_files()
        elif pattern == STDLIB_HELD_OUT:
            paths = stdlib_corpus.held_out_files()
        else:
            expanded = os.path.expanduser(pattern)
            paths = [Path(os.path.abspath(p)) for p in sorted(glob.glob(expanded, recursive=True)) if os.path.isfile(p)]
        if not paths:
            raise BadInputError(f"{field}: {pattern!r} matches no file; check the path (** needs a folder before it)")
        found.update(dict.fromkeys(paths))
    return list(found)


def split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """(training, held-out): one file in twenty, at least one, chosen by a hash of its path; none of a single file.

    The choice depends on the paths alone, so that it is the same on every node and in every run.
    """
    if len(files) < 2:
        return list(files), []
    ranked = sorted(files, key=lambda path: hashlib.sha256(str(path).encode()).digest())
    held_out = set(ranked[: max(1, len(files) // HELD_OUT_ONE_IN)])
    return [path for path in files if path not in held_out], [path for path in files if path in held_out]


def prepare(
    data: Data, tokenizer: Tokenizer, cache: Path, *, clock: Clock | None = None, wait_seconds: float = _WAIT_SECONDS
) -> Corpus:
    """The token indices of ``data``, built now if nobody has built them yet.

    Args:
        data: the ``data`` section of the config.
        tokenizer: makes the ids.
        cache: folder of token indices; ``data.cache`` wins over it.
        clock: time of the lock's expiry.
        wait_seconds: longest wait for another builder.

    Raises:
        BadInputError: no files, no text in them, no UTF-8, or a cache folder that cannot be written.
        WorkFailedError: another builder held the lock for longer than ``wait_seconds``.
    """
    folder = Path(data.cache).expanduser() if data.cache else cache
    train_files = resolve(data.train, "data.train")
    if data.valid:
        valid_files = resolve(data.valid, "data.valid")
    else:
        train_files, valid_files = split(train_files)
    build = _Builder(tokenizer, folder, clock or SystemClock(), wait_seconds)
    train = build.index(train_files, "data.train")
    return Corpus(train=train, valid=build.index(valid_files, "data.valid") if valid_files else None)


def check(data: Data) -> None:
    """Refuse data that is not there or holds no text, reading next to nothing; for use before anything is started.

    Raises:
        BadInputError: as :func:`prepare`.
    """
    for patterns, field in ((data.train, "data.train"), (data.valid, "data.valid")):
        files = resolve(patterns, field)
        if patterns and not any(path.stat().st_size for path in files):
            raise BadInputError(f"{field}: the {len(files)} files of {', '.join(patterns)} are empty")


class _Builder:
    """Builds token indices, or waits for who does."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, clock: Clock, wait_seconds: float) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._clock = clock
        self._wait_seconds = wait_seconds

    def index(self, files: Sequence[Path], field: str) -> TokenIndex:
        target = self._folder / self._key(files)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._wait_or_build(files, field, target)
        except OSError as error:
            raise BadInputError(
                f"data.cache: the token index cannot be written to {self._folder}: {error.strerror or error}"
            ) from error
        return _read_meta(target)

    def _wait_or_build(self, files: Sequence[Path], field: str, target: Path) -> None:
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        lock = FolderLock(self._folder / f"{target.name}.lock", owner, clock=self._clock)
        deadline = self._clock.monotonic() + self._wait_seconds
        while not (target / META).exists():
            if lock.try_acquire():
                with lock.renewed():
                    if not (target / META).exists():
                        self._clear_debris(target)
                        self._build(files, field, target, owner)
            elif self._clock.monotonic() > deadline:
                holder = lock.holder()
                raise WorkFailedError(
                    f"{lock.path}: {holder and holder[0]} has been building the token index for more than "
                    f"{self._wait_seconds:.0f} s"
                )
            else:
                self._clock.sleep(POLL_SECONDS)

    @staticmethod
    def _clear_debris(target: Path) -> None:
        """Remove what builders left that were killed, or lost the lock because they hung."""
        for work in target.parent.glob(f".{target.name}.*"):
            if work.is_dir():
                shutil.rmtree(work, ignore_errors=True)

    def _build(self, files: Sequence[Path], field: str, target: Path, owner: str) -> None:
        """Write the index into a folder of this owner's and make it visible by one rename."""
        work = target.with_name(f".{target.name}.{owner.replace(':', '-')}")
        try:
            work.mkdir()
            meta = self._write(files, field, work)
            write_json(work / META, meta)
            try:
                os.rename(work, target)
            except OSError:
                if not (target / META).exists():  # else a second builder was faster, with the same content
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _write(self, files: Sequence[Path], field: str, work: Path) -> dict[str, Any]:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        dtype = np.uint16 if self._tokenizer.size <= 1 << 16 else np.int32
        builder: Any = IndexedDatasetBuilder(str(work / "tokens.bin"), dtype=dtype)
        digest, tokens, documents = hashlib.sha256(), 0, 0
        with contextlib.closing(builder.data_file):
            for path in files:
                ids = self._tokenizer.encode(_read_text(path, field))
                if not len(ids):
                    continue
                document = np.append(ids, self._tokenizer.end_of_document).astype(dtype)
                builder.add_document(document, [len(document)])
                digest.update(document.tobytes())
                tokens += len(document)
                documents += 1
            if not documents:
                raise BadInputError(f"{field}: no text in {_some(files)}; give files with text in them")
            builder.finalize(str(work / "tokens.idx"))
        return {"format": _FORMAT, "tokens": tokens, "documents": documents, "digest": digest.hexdigest()}

    def _key(self, files: Sequence[Path]) -> str:
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        value = json.dumps([_FORMAT, self._tokenizer.digest, stats])
        return "tokens-" + hashlib.sha256(value.encode()).hexdigest()[:24]


def _read_meta(target: Path) -> TokenIndex:
    value = json.loads((target / META).read_text())
    return TokenIndex(
        prefix=target / "tokens", tokens=value["tokens"], documents=value["documents"], digest=value["digest"]
    )


def _read_text(path: Path, field: str) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # not read_text: line ends stay what they are
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{field}: {path} is not UTF-8 text (byte {error.start}); convert or leave it out"
        ) from error
    except OSError as error:
        raise BadInputError(f"{field}: {path} cannot be read ({error.strerror})") from error


def _some(files: Sequence[Path]) -> str:
    shown = ", ".join(str(path) for path in files[:3])
    return shown + (f" and {len(files) - 3} more" if len(files) > 3 else "")
