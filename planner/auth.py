"""Message authentication between coordinator, agents, ranks and workers.

Redis is not a trust boundary: whoever can write to it must still not be able to command an agent. A
cluster secret is made by ``planaria up`` and reaches agents by file or environment, never through Redis.
Per-job tokens are derived from it, so that a rank of one job can never speak for another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from planner import quick_json
from planner.errors import FencedError

SECRET_BYTES = 32


class ForgedMessageError(FencedError):
    """A message's code does not match its content: it is dropped and never acted on."""


def new_secret() -> str:
    """A fresh cluster secret, as hexadecimal text."""
    return secrets.token_hex(SECRET_BYTES)


def job_token(secret: str, job: str) -> str:
    """The token that ranks, transfers and workers of ``job`` present; derived, so nothing needs storing."""
    return hmac.new(bytes.fromhex(secret), f"job:{job}".encode(), hashlib.sha256).hexdigest()


def _code(key: str, body: str) -> str:
    return hmac.new(key.encode(), body.encode(), hashlib.sha256).hexdigest()


def seal(key: str, message: Mapping[str, Any]) -> str:
    """Serialise ``message`` with its authentication code, as one JSON text ``{"body": …, "mac": …}``."""
    body = json.dumps(message, sort_keys=True, separators=(",", ":"))
    return json.dumps({"body": body, "mac": _code(key, body)})


def unseal(key: str, text: str | bytes) -> dict[str, Any]:
    """The message inside ``text``.

    Raises:
        ForgedMessageError: the code is missing or wrong, or the text is no sealed message at all.
    """
    try:
        outer = quick_json.loads(text)
        body, mac = outer["body"], outer["mac"]
        genuine = isinstance(body, str) and isinstance(mac, str) and hmac.compare_digest(mac, _code(key, body))
    except (ValueError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise ForgedMessageError(f"not a sealed message: {error!r}") from error
    if not genuine:
        raise ForgedMessageError("a message's authentication code does not match; it was dropped")
    message = quick_json.loads(body)
    if not isinstance(message, dict):
        raise ForgedMessageError("a sealed message must hold a JSON object")
    return message
