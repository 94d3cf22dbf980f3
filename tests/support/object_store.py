"""An S3 server (moto's) on the loopback, whose answers a test can refuse or damage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest


def access(url: str) -> dict[str, str]:
    """The environment in which clients speak to the server at ``url``."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


class Faulty:
    """Lets requests through to moto, except those that a test wants to fail or to be damaged."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.refuse: Callable[[str, str], bool] = lambda method, path: False
        self.damage: Callable[[str, str], bool] = lambda method, path: False

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if self.refuse(method, path):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>injected</Message></Error>"]
        body = b"".join(self._app(environ, start_response))
        return [bytes([body[0] ^ 1]) + body[1:]] if body and self.damage(method, path) else [body]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Faulty]]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    faulty = Faulty(DomainDispatcherApplication(create_backend_app))
    serving = make_server("127.0.0.1", 0, faulty, threaded=True)
    thread = threading.Thread(target=serving.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}", faulty
    serving.shutdown()
    thread.join()
    serving.server_close()
