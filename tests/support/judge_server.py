"""An OpenAI-compatible endpoint that answers by a script: verdicts, refusals, breaks, garbage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Script:
    """``answer(prompt, number)`` gives a reply's text, or (HTTP status, body), or None for a broken connection."""

    answer: Callable[[str, int], Any]
    prompts: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""


@contextmanager
def judge_server(answer: Callable[[str, int], Any]) -> Iterator[Script]:
    """A server on a free port of this host."""
    script = Script(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][-1]["content"]
            with script.lock:
                script.prompts.append(prompt)
                script.keys.add(self.headers.get("Authorization", ""))
                number = len(script.prompts)
            said = script.answer(prompt, number)
            if said is None:
                self.close_connection = True
                self.connection.close()
                return
            status, text = said if isinstance(said, tuple) else (200, json.dumps(_completion(said)))
            payload = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Retry-After-Ms", "20")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    script.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _completion(text: str) -> dict[str, Any]:
    return {
        "id": "x", "object": "chat.completion", "created": 1, "model": "judge",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 60, "completion_tokens": 40, "total_tokens": 100},
    }  # fmt: skip
