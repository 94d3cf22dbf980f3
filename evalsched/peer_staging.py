"""Staged models passed on between nodes: every worker that holds one serves it, so storage is read once per tree.

:class:`PeerStaging` is a worker's half of it: a small HTTP server that reads from the node's memory, and the copying
that :func:`evalsched.staging.stage` does, from a peer wherever there is one. What arrives is verified by the model's
digest before anybody sees it. Files can be asked for from an offset on, so a broken transfer goes on at another peer.
"""

from __future__ import annotations

import hmac
import http.client
import json
import logging
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from evalsched.staging import copy_files, staging_root
from planner.auth import job_token
from planner.distribution import Source
from planner.errors import BadInputError, PlanariaError, one_line
from planner.staging_table import StagingTable
from planner.store import ClusterStore

log = logging.getLogger("planaria.staging")

CHUNK = 4 << 20
RENEW_SECONDS = 1.0
POLL_SECONDS = 0.1
LONGEST_WAIT = 120.0
"""Seconds without a peer or a place at storage after which storage is read anyway."""
TIMEOUT = 10.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def token_of(secret: str, digest: str) -> str:
    """What a node shows to get a model from another."""
    return job_token(secret, f"stage:{digest}")


class PeerStaging:
    """Serves this node's staged models and fetches from others.

    Args:
        store: cluster store with the secret.
        node: this node's name.
        address: where others reach it.
        root: where staged models lie.
        bytes_per_second: bound on what is read from storage, and on what is served (``PLANARIA_STAGE_RATE``).
    """

    def __init__(
        self,
        store: ClusterStore,
        node: str,
        address: str = "127.0.0.1",
        *,
        root: Path | None = None,
        bytes_per_second: float | None = None,
    ) -> None:
        if store.secret is None:
            raise ValueError("peer staging needs the cluster's secret")
        self._secret = store.secret
        self._node = node
        self._table = StagingTable(store.link.call)
        own = os.environ.get("PLANARIA_STAGE_RATE")
        self._rate = bytes_per_second or (float(own) if own else None)
        self._root = root or staging_root()
        self._server = ThreadingHTTPServer((address, 0), _handler(self._root, self._secret, self._rate))
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="staged", daemon=True).start()
        self._serves: set[str] = set()

    def withdraw(self) -> None:
        """Say that this process serves no more."""
        for digest in sorted(self._serves):
            self._table.forget(digest, self._node, self.url)

    def close(self) -> None:
        """Serve no more."""
        self.withdraw()
        self._server.shutdown()
        self._server.server_close()

    def announce(self, digest: str) -> None:
        """Say that this node has a model."""
        self._serves.add(digest)
        self._table.done(digest, self._node, self.url)

    def copy(self, source: Path, work: Path, digest: str) -> None:
        """Bring a model into ``work``: from a peer, or from ``source``.

        Raises:
            BadInputError, OSError: it could be had from nowhere.
        """
        began = time.monotonic()
        while True:
            found, url = self._table.claim(digest, self._node)
            if found.kind == "wait":
                if time.monotonic() - began > LONGEST_WAIT:
                    return copy_files(source, work, self._pace(digest, Source("storage")))
                time.sleep(POLL_SECONDS)
                continue
            try:
                if found.kind == "storage":
                    copy_files(source, work, self._pace(digest, found))
                    log.info("action=staged from=storage digest=%s", digest)
                    return None
                assert url is not None
                self._fetch(url, work, digest, found)
                log.info("action=staged from=%s digest=%s", found.peer, digest)
                return None
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._table.done(digest, self._node, None)
                if found.kind == "storage":
                    raise
                log.warning("action=stage.peer_lost peer=%s reason=%s", found.peer, one_line(error))
                self._table.forget(digest, str(found.peer), url)

    def _fetch(self, url: str, work: Path, digest: str, source: Source) -> None:
        """All files of a peer's model; what is there of a broken transfer is kept."""
        token, pace = token_of(self._secret, digest), self._pace(digest, source)
        with _open(f"{url}/{digest}/", token) as answer:
            files: dict[str, int] = json.loads(answer.read())
        for name, size in sorted(files.items()):
            target = (work / name).resolve()
            if not target.is_relative_to(work.resolve()):
                raise BadInputError(f"{url}: a file outside the model's folder is offered ({name})")
            target.parent.mkdir(parents=True, exist_ok=True)
            have = target.stat().st_size if target.exists() else 0
            if have > size:
                target.unlink()
                have = 0
            if have == size and size:
                continue
            with target.open("ab") as stream, _open(f"{url}/{digest}/{quote(name)}", token, have) as answer:
                while chunk := answer.read(CHUNK):
                    stream.write(chunk)
                    pace(len(chunk))
            if target.stat().st_size != size:
                raise OSError(f"{url}: {name} ended after {target.stat().st_size} of {size} bytes")

    def _pace(self, digest: str, source: Source) -> Callable[[int], None]:
        """To be called with each piece's bytes: keeps the claim, and the rate for what comes from storage."""
        began, state = time.monotonic(), {"bytes": 0, "renewed": 0.0}

        def tick(count: int) -> None:
            state["bytes"] += count
            now = time.monotonic()
            if now - state["renewed"] > RENEW_SECONDS:
                state["renewed"] = now
                try:
                    self._table.renew(digest, self._node, source)
                except PlanariaError as error:
                    log.warning("action=stage.renew reason=%s", one_line(error))
            if source.kind == "storage" and self._rate:
                time.sleep(max(0.0, state["bytes"] / self._rate - (time.monotonic() - began)))

        return tick


def _open(url: str, token: str, offset: int = 0) -> http.client.HTTPResponse:
    headers = {"Authorization": f"Bearer {token}"} | ({"Range": f"bytes={offset}-"} if offset else {})
    request = urllib.request.Request(url, headers=headers)
    answer: http.client.HTTPResponse = _DIRECT.open(request, timeout=TIMEOUT)
    return answer


def address_towards(url: str) -> str:
    """This host's address on the way to Redis, at which other nodes reach it too."""
    parsed = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parsed.hostname or "127.0.0.1", parsed.port or 6379))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _handler(root: Path, secret: str, rate: float | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet: the loader logs what it got."""

        def do_GET(self) -> None:
            digest, _, name = self.path.lstrip("/").partition("/")
            given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if not digest.isalnum() or not hmac.compare_digest(given, token_of(secret, digest)):
                return self.send_error(403)
            folder = (root / digest).resolve()
            if not folder.is_dir():
                return self.send_error(404)
            if not name:
                files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
                return self._send(json.dumps(files).encode())
            path = (folder / unquote(name)).resolve()
            if not path.is_relative_to(folder) or not path.is_file():
                return self.send_error(404)
            return self._send_file(path)

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_file(self, path: Path) -> None:
            asked = self.headers.get("Range") or "bytes=0-"
            text = asked.removeprefix("bytes=").partition("-")[0]
            size = path.stat().st_size
            offset = int(text) if text.isdigit() else 0
            if offset > size:
                return self.send_error(416)
            self.send_response(206 if offset else 200)
            self.send_header("Content-Length", str(size - offset))
            self.end_headers()
            began, sent = time.monotonic(), 0
            with path.open("rb") as stream:
                stream.seek(offset)
                while chunk := stream.read(CHUNK):
                    self.wfile.write(chunk)
                    sent += len(chunk)
                    if rate:
                        time.sleep(max(0.0, sent / rate - (time.monotonic() - began)))
            return None

    return Handler
