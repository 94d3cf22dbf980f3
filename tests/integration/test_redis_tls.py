"""A cluster whose Redis is behind TLS with a password: its URL is enough for the store, Celery, workers and Flower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from evalsched.app import make_app
from evalsched.messages import WARM, ModelRef, Warm, infer_queue
from planner.auth import new_secret
from planner.errors import MissingServiceError
from planner.redis_server import free_port, start_redis
from planner.store import ClusterStore
from planner.worker_table import WorkerTable
from tests.support.redis import await_that, end_server
from tests.support.tls_proxy import certificate, tls_proxy

PASSWORD = "p:w@/x%"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A Redis that is reached by TLS alone."""
    server = start_redis(tmp_path / "redis", password=PASSWORD)
    cert, key = certificate(tmp_path)
    try:
        with tls_proxy(server.port, cert, key) as port:
            yield f"rediss://:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/0?ssl_ca_certs={cert}&ssl_cert_reqs=required"
    finally:
        end_server(server)


@pytest.mark.timeout(120)
def test_a_worker_serves_over_tls_and_flower_shows_it(url: str, tmp_path: Path) -> None:
    secret = new_secret()
    (tmp_path / "secret").write_text(secret)
    store = ClusterStore(url, secret, patience=5.0)
    port = free_port()
    environment = os.environ | {
        "PLANARIA_URL": url, "PLANARIA_SECRET_FILE": str(tmp_path / "secret"),
        "PLANARIA_PRIVATE_PARENT": str(os.getpid()), "FLOWER_UNAUTHENTICATED_API": "true",
    }  # fmt: skip
    stub = [sys.executable, "-m", "tests.support.stub_worker", "--kind", "infer", "--name", "w"]
    flower = [sys.executable, "-m", "celery", "-A", "evalsched.app", "flower", f"--port={port}", "--address=127.0.0.1"]
    processes = [
        subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for command in (stub, flower)
    ]
    try:
        table = WorkerTable(store.link.call)
        await_that(lambda: "w" in table.workers() and table.workers()["w"].facts["state"] == "ready", 60)
        model = ModelRef(path="/m", digest="d", tokenizer="t")
        app = make_app(url)
        app.send_task(WARM, args=[Warm(model=model, engine={}).wire()], queue=infer_queue("w"), retry=False)
        await_that(lambda: table.workers()["w"].facts.get("model") == "d", 30)
        await_that(lambda: any(name.startswith("w@") for name in _flower(port)), 60)
        app.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()
        store.close()


def _flower(port: int) -> list[str]:
    """Names of the workers that Flower knows."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/workers?refresh=1", timeout=10) as answer:
            return sorted(json.loads(answer.read()))
    except OSError:
        return []


def test_a_server_that_nobody_vouches_for_is_refused(url: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, _ = certificate(tmp_path / "other")
    wrong = url.partition("ssl_ca_certs=")[0] + f"ssl_ca_certs={other}&ssl_cert_reqs=required"
    store = ClusterStore(wrong, new_secret(), patience=0.5)
    with pytest.raises(MissingServiceError) as refused:
        store.link.call(lambda client: client.ping())
    assert quote(PASSWORD, safe="") not in str(refused.value)
    store.close()
    app = make_app(wrong)
    with pytest.raises(Exception, match=r"CERTIFICATE_VERIFY_FAILED|certificate"):
        app.send_task(WARM, args=[{}], queue="q", retry=False)
    app.close()
