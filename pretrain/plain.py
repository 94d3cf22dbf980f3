"""Python values of a training state as JSON and back, exactly: no pickle ever crosses a process or a network."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch

_TAG = "__planaria__"


def encode(value: Any, where: str = "state") -> Any:
    """``value`` as JSON: numbers, text, lists, dicts (any plain keys), tuples, bytes, tensors, dtypes, None.

    Raises:
        TypeError: something else stands in it; names the place.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: encode(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode(key, where), encode(item, f"{where}.{key}")] for key, item in value.items()]
        return {_TAG: "dict", "items": pairs}
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": _base64(value)}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "name": dtype_name(value)}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, io.BytesIO):
        return {_TAG: "stream", "data": base64.b64encode(value.getvalue()).decode()}
    raise TypeError(f"{where}: a {type(value).__name__} cannot be part of a snapshot")


def decode(value: Any) -> Any:
    """The value that :func:`encode` took.

    Raises:
        ValueError: not something that :func:`encode` makes.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(decode(item) for item in value["items"])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in value["items"]}
    if kind == "tensor":
        raw = bytearray(base64.b64decode(value["data"]))
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(named_dtype(value["dtype"])).reshape(value["shape"])
    if kind == "dtype":
        return named_dtype(value["name"])
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "stream":
        return io.BytesIO(base64.b64decode(value["data"]))
    raise ValueError(f"unknown kind {kind!r} in an encoded state")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """The inverse of :func:`dtype_name`.

    Raises:
        ValueError: no such type.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no tensor type")
    return dtype


def _base64(tensor: torch.Tensor) -> str:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return base64.b64encode(raw).decode()
