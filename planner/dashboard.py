"""``planaria dashboard``: one read-only page on loopback that polls one JSON document.

It never writes to the cluster. The port is bound before it is told, so nobody can take it in between.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from planner.cluster import connect, default_state_dir
from planner.errors import BadInputError, PlanariaError, one_line
from planner.files import write_json
from planner.overview import event_in_words, overview
from planner.store import ClusterStore

POINTS = 240
"""Points of a loss curve that are sent; more are thinned out."""
EVENTS = 40
PATIENCE = 1.0
"""Seconds a poll waits for a Redis that is away."""


class LossCurves:
    """The loss over steps of each job, read from its ``metrics.jsonl`` as it grows.

    A step that stands twice (after a rollback) counts as its last line says.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._read: dict[str, tuple[int, dict[int, float]]] = {}

    def points(self, job: str, record: Mapping[str, Any]) -> list[tuple[int, float]]:
        """(step, loss) by step, at most :data:`POINTS`, the last one always among them."""
        path = self._path(job, record)
        offset, curve = self._read.get(job, (0, {}))
        try:
            if path is None or path.stat().st_size < offset:  # written anew
                offset, curve = 0, {}
            if path is not None:
                with path.open("rb") as stream:
                    stream.seek(offset)
                    offset += _take_lines(stream.read(), curve)
        except OSError:
            pass  # not there yet
        self._read[job] = (offset, curve)
        steps = sorted(curve)
        stride = -(-len(steps) // POINTS) or 1
        chosen = steps[::stride] if not steps or steps[::stride][-1] == steps[-1] else [*steps[::stride], steps[-1]]
        return [(step, curve[step]) for step in chosen]

    def _path(self, job: str, record: Mapping[str, Any]) -> Path | None:
        if record.get("folder"):
            return Path(str(record["folder"])) / "metrics.jsonl"
        if self._state_dir is None or os.sep in job or job.startswith("."):
            return None
        return self._state_dir / "jobs" / job / "metrics.jsonl"


def _take_lines(raw: bytes, curve: dict[int, float]) -> int:
    """Read whole lines into the curve; returns how many bytes they were."""
    whole = raw[: raw.rfind(b"\n") + 1]
    for line in whole.splitlines():
        try:
            row = json.loads(line)
            if row.get("loss") is not None and math.isfinite(loss := float(row["loss"])):
                curve[int(row["step"])] = loss
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return len(whole)


def document(store: ClusterStore, curves: LossCurves) -> dict[str, Any]:
    """What the page shows."""
    shown = overview(store)
    records = store.jobs()
    for row in shown["jobs"]:
        row["curve"] = curves.points(row["id"], records.get(row["id"], {}))
    events = reversed(store.last_events(EVENTS))
    shown["events"] = [{"time": e.time, "action": e.action.value, "words": event_in_words(e)} for e in events]
    shown["time"] = store.server_time()
    return shown


def application(store: ClusterStore, curves: LossCurves) -> Starlette:
    """The page at ``/`` and its data at ``/data``; GET only, and only under a loopback name."""
    page = files("planner").joinpath("dashboard.html").read_text(encoding="utf-8")

    def index(request: Request) -> HTMLResponse:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    def data(request: Request) -> JSONResponse:
        try:
            return JSONResponse(document(store, curves), headers={"Cache-Control": "no-store"})
        except PlanariaError as error:
            return JSONResponse({"error": one_line(error)}, status_code=503)

    # Another site's script must not read this page through a name that resolves to 127.0.0.1.
    only_here = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=[Route("/", index), Route("/data", data)], middleware=[only_here])


def dashboard_command(*, port: int, state_dir: Path | None, url: str | None) -> int:
    """``planaria dashboard``: serves until it is told to stop.

    Raises:
        BadInputError: the port is taken.
    """
    import uvicorn

    store, address = connect(url, state_dir)
    store.link.patience = PATIENCE
    folder = (state_dir or address.state_dir or default_state_dir()).expanduser()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise BadInputError(f"--port {port}: cannot be bound on 127.0.0.1 ({error}); 0 takes a free one") from None
    listener.listen(64)  # who reads the address may connect at once
    page = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    if folder.is_dir() and os.access(folder, os.W_OK):
        write_json(folder / "dashboard.json", {"url": page, "pid": os.getpid()})
    print(f"dashboard: {page}", flush=True)
    settings = uvicorn.Config(
        application(store, LossCurves(folder)), log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    try:
        uvicorn.Server(settings).run(sockets=[listener])
    finally:
        store.close()
    return 0
