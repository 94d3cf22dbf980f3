"""How a command finds its cluster: ``--url``, then ``PLANARIA_URL``, then the state directory, then the last ``up``.

``planaria up`` leaves ``cluster.json`` (mode 0600) in its state directory and a pointer to that directory under
``$XDG_STATE_HOME/planaria``, so that later commands of the same user need no option.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.clock import Clock
from planner.errors import BadInputError, MissingServiceError
from planner.files import write_atomic
from planner.redis_link import COMMAND_PATIENCE, DAEMON_PATIENCE
from planner.store import ClusterStore

STATE_FILE = "cluster.json"
SECRET_FILE = "secret"


@dataclass(frozen=True)
class ClusterAddress:
    """Where a cluster is. ``secret`` is None where no secret file was found; ``state_dir`` None for a bare URL."""

    url: str
    secret: str | None
    state_dir: Path | None


def state_home() -> Path:
    """``$XDG_STATE_HOME/planaria``, or ``~/.local/state/planaria``."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "planaria"


def default_state_dir() -> Path:
    """The state directory of ``planaria up`` without ``--state-dir``."""
    return state_home() / "local"


def remember_last_up(state_dir: Path) -> None:
    """Point later commands to this state directory."""
    home = state_home()
    home.mkdir(parents=True, exist_ok=True)
    write_atomic(home / "last-up", f"{state_dir.resolve()}\n")


def last_up() -> Path | None:
    """The state directory of the last ``up``, if one is remembered."""
    try:
        text = (state_home() / "last-up").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return Path(text) if text else None


def read_state_file(state_dir: Path) -> dict[str, Any] | None:
    """What ``cluster.json`` of a state directory says; None where there is none.

    Raises:
        BadInputError: it cannot be read or is no JSON object.
    """
    path = state_dir / STATE_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror}); is it another user's?") from error
    except ValueError as error:
        raise BadInputError(f"{path}: not valid JSON; run planaria down --state-dir {state_dir}") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: a JSON object is needed; run planaria down --state-dir {state_dir}")
    return data


def read_secret(path: Path) -> str:
    """The cluster secret in a file.

    Raises:
        BadInputError: unreadable, or not hexadecimal text.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
        bytes.fromhex(text)
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such secret file; copy it from the state directory of planaria up") from None
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BadInputError(f"{path}: a cluster secret is hexadecimal text") from error
    if not text:
        raise BadInputError(f"{path}: empty; a cluster secret is hexadecimal text")
    return text


def find_secret(state_dir: Path | None, secret_file: Path | None = None) -> str | None:
    """The secret: from ``secret_file``, else ``PLANARIA_SECRET_FILE``, else the state directory; None where none is."""
    named = secret_file or (Path(found) if (found := os.environ.get("PLANARIA_SECRET_FILE")) else None)
    if named is not None:
        return read_secret(named)
    if state_dir is not None and (state_dir / SECRET_FILE).exists():
        return read_secret(state_dir / SECRET_FILE)
    return None


def find_cluster(url: str | None, state_dir: Path | None, secret_file: Path | None = None) -> ClusterAddress:
    """Where the cluster is.

    Raises:
        MissingServiceError: nothing names one.
        BadInputError: a file that names one is broken.
    """
    place = state_dir or last_up()
    address = url or os.environ.get("PLANARIA_URL") or None
    if address is None and place is not None:
        state = read_state_file(place)
        address = None if state is None else str(state.get("url") or "") or None
    if address is None:
        where = f"nothing is up in {place}" if place is not None else "no cluster is known"
        raise MissingServiceError(f"{where}: run planaria up, or give --url, PLANARIA_URL or --state-dir")
    if state_dir is None and place is not None and not _belongs(place, address):
        place = None  # a URL from elsewhere: the last `up` has nothing to do with it
    return ClusterAddress(address, find_secret(place, secret_file), place)


def _belongs(state_dir: Path, url: str) -> bool:
    try:
        state = read_state_file(state_dir)
    except BadInputError:
        return False
    return state is not None and state.get("url") == url


def connect(
    url: str | None,
    state_dir: Path | None,
    *,
    secret_file: Path | None = None,
    daemon: bool = False,
    clock: Clock | None = None,
) -> tuple[ClusterStore, ClusterAddress]:
    """A store that answered a ping, and where it is. Daemons wait longer for a Redis that is away.

    Raises:
        MissingServiceError: no cluster named, unreachable, or it refuses us.
    """
    address = find_cluster(url, state_dir, secret_file)
    patience = DAEMON_PATIENCE if daemon else COMMAND_PATIENCE
    store = ClusterStore(address.url, address.secret, patience=patience, clock=clock)
    try:
        store.ping()
    except BaseException:
        store.close()
        raise
    return store, address
