"""The epoch of fencing tokens, kept outside Redis: a Redis that lost its last writes cannot turn time back."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from planner.errors import BadInputError
from planner.files import write_json

EPOCH_FILE = "epoch.json"


def read_epoch(state_dir: Path) -> int:
    """The last epoch that was taken; 0 before the first.

    Raises:
        BadInputError: the file is damaged (tokens must never start over, so nothing is guessed).
    """
    path = state_dir / EPOCH_FILE
    try:
        epoch = json.loads(path.read_text(encoding="utf-8"))["epoch"]
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f'{path}: damaged ({error!r}); write {{"epoch": N}} with N above all earlier ones'
        ) from error
    if not isinstance(epoch, int) or epoch < 0:
        raise BadInputError(f"{path}: epoch: {epoch!r} is not a whole number; write one above all earlier ones")
    return epoch


def next_epoch(state_dir: Path) -> int:
    """Take the next epoch, durably, before it is used; safe against others that do the same."""
    fd = os.open(state_dir / f".{EPOCH_FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        epoch = read_epoch(state_dir) + 1
        write_json(state_dir / EPOCH_FILE, {"epoch": epoch}, mode=0o600)
        return epoch
    finally:
        os.close(fd)
