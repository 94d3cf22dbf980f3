"""Reading single tensors out of a Megatron distributed checkpoint, without Megatron and without a process group.

The files hold each saved chunk as one ``torch.save`` record at a known offset; the metadata says which part of
which global tensor it is. So one CPU process can read any slice of any tensor, whatever layout wrote it.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from planner.errors import WorkFailedError

METADATA = ".metadata"
_ALLOWED = ("torch", "collections", "_codecs")
_ALLOWED_BUILTINS = frozenset({"set", "frozenset", "list", "dict", "tuple", "int", "getattr"})


class UnreadableError(WorkFailedError):
    """The checkpoint's metadata or a chunk cannot be read; it names the file."""


class _MetadataUnpickler(pickle.Unpickler):
    """Torch's own checkpoint classes and plain containers, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one that metadata may hold."""
        if module.partition(".")[0] in _ALLOWED or (module == "builtins" and name in _ALLOWED_BUILTINS):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} may not stand in a checkpoint's metadata")


@dataclass(frozen=True)
class _Chunk:
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Described:
    """Shape and type of a global tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class DistReader:
    """The tensors of one distributed checkpoint (a ``megatron/`` folder)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            self._chunks, self.tensors = _index(metadata)
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, KeyError, ImportError) as error:
            raise UnreadableError(f"{path}: not a distributed checkpoint's metadata ({error})") from error

    def read(self, key: str, where: Sequence[slice | int] = ()) -> torch.Tensor:
        """A global tensor, or what ``where`` cuts out of it (ints drop their axis); only what is needed is read.

        Raises:
            KeyError: no such tensor.
            UnreadableError: a chunk is missing or broken.
        """
        described = self.tensors[key]
        wanted = [*where, *[slice(None)] * (len(described.shape) - len(where))]
        bounds = [_bounds(size, part) for size, part in zip(described.shape, wanted, strict=True)]
        out = torch.empty([stop - start for start, stop in bounds], dtype=described.dtype)
        filled = 0
        for chunk in self._chunks[key]:
            low = [max(start, offset) for (start, _), offset in zip(bounds, chunk.offset, strict=True)]
            high = [
                min(stop, offset + size)
                for (_, stop), offset, size in zip(bounds, chunk.offset, chunk.shape, strict=True)
            ]
            if any(begin >= end for begin, end in zip(low, high, strict=True)):
                continue
            data = self._record(chunk).reshape(chunk.shape)
            source = tuple(slice(b - o, e - o) for b, e, o in zip(low, high, chunk.offset, strict=True))
            target = tuple(slice(b - s, e - s) for b, e, (s, _) in zip(low, high, bounds, strict=True))
            out[target].copy_(data[source])
            filled += out[target].numel()
        if filled != out.numel():
            raise UnreadableError(f"{self.folder}: {key}: only {filled} of {out.numel()} elements are in the files")
        return out[tuple(0 if isinstance(part, int) else slice(None) for part in wanted)]

    def _record(self, chunk: _Chunk) -> torch.Tensor:
        path = self.folder / chunk.file
        try:
            with path.open("rb") as stream:
                stream.seek(chunk.start)
                loaded = torch.load(io.BytesIO(stream.read(chunk.length)), map_location="cpu", weights_only=True)
        except Exception as error:
            raise UnreadableError(f"{path}: the record at byte {chunk.start} cannot be read ({error})") from error
        if not isinstance(loaded, torch.Tensor):
            raise UnreadableError(f"{path}: the record at byte {chunk.start} is no tensor")
        return loaded.detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


def _bounds(size: int, part: slice | int) -> tuple[int, int]:
    if isinstance(part, int):
        if not 0 <= part < size:
            raise IndexError(f"index {part} is outside an axis of {size}")
        return part, part + 1
    start, stop, step = part.indices(size)
    if step != 1:
        raise IndexError("only contiguous slices can be read")
    return start, max(start, stop)


def _index(metadata: Any) -> tuple[dict[str, list[_Chunk]], dict[str, Described]]:
    shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}
    tensors: dict[str, Described] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        tensors[key] = Described(tuple(entry.size), entry.properties.dtype)
        for chunk in entry.chunks:
            shapes[key, tuple(chunk.offsets)] = tuple(chunk.sizes)
    chunks: dict[str, list[_Chunk]] = defaultdict(list)
    for index, info in metadata.storage_data.items():
        if index.fqn in tensors:
            offset = tuple(index.offset)
            shape = shapes[index.fqn, offset]
            chunks[index.fqn].append(_Chunk(offset, shape, info.relative_path, info.offset, info.length))
    return dict(chunks), tensors
