"""Writing safetensors files tensor by tensor, so that a model is never in memory as a whole.

The format: eight bytes of header length (little endian), a JSON header with type, shape and byte range of every
tensor, then the raw bytes. All sizes are known before the first byte of data is needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
}


@dataclass(frozen=True)
class Entry:
    """One tensor of the model to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


def shards(entries: Sequence[Entry], max_bytes: int) -> list[list[Entry]]:
    """Consecutive runs of tensors of at most ``max_bytes`` each; a larger tensor stands alone."""
    runs: list[list[Entry]] = []
    held = 0
    for entry in entries:
        if not runs or (held and held + entry.nbytes > max_bytes):
            runs.append([])
            held = 0
        runs[-1].append(entry)
        held += entry.nbytes
    return runs


def shard_name(index: int, count: int) -> str:
    """The file name that transformers and vLLM expect of shard ``index`` (from 0) of ``count``."""
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_model(
    folder: Path, entries: Sequence[Entry], get: Callable[[str], torch.Tensor], max_bytes: int
) -> list[str]:
    """Write all tensors into ``folder``, one file per shard and an index when there are several.

    Args:
        folder: existing folder.
        entries: the tensors in file order.
        get: makes the tensor of that name; called once for each, in order.
        max_bytes: bound of a shard's data.

    Returns:
        The names of the files written.

    Raises:
        ValueError: ``get`` gave another shape or type than announced.
    """
    runs = shards(entries, max_bytes)
    files = [shard_name(index, len(runs)) for index in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        _write_file(folder / file, run, get)
    if len(runs) > 1:
        where = {entry.name: file for file, run in zip(files, runs, strict=True) for entry in run}
        total = sum(entry.nbytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        files.append(INDEX)
    return files


def _write_file(path: Path, entries: Sequence[Entry], get: Callable[[str], torch.Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        span = [offset, offset + entry.nbytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        offset = span[1]
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for entry in entries:
            tensor = get(entry.name)
            if tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ValueError(f"{entry.name}: {found}, announced as {entry.shape} {entry.dtype}")
            stream.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
