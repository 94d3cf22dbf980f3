"""Reading JSON where a million documents pass through: msgspec, several times faster than the standard library."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode


def loads(text: str | bytes) -> Any:
    """What :func:`json.loads` gives, also for NaN, infinities and lone surrogates, which msgspec does not read.

    Raises:
        ValueError: ``text`` is no JSON.
    """
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return json.loads(text)
