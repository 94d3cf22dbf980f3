"""vLLM's own OpenAI-compatible server with a 135 M model, for what is written against such endpoints."""

from __future__ import annotations

import runpy
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.redis_server import free_port
from tests.support.fork_server import ForkServer
from tests.support.redis import await_that
from tests.support.smollm import smollm

MODEL = "small"
"""The model's name at the endpoint."""
PATIENCE = 240.0


@contextmanager
def llm_server(folder: Path, engines: ForkServer, length: int = 2048) -> Iterator[str]:
    """A server in a session of its own; gives its base URL. ``length`` is its context in tokens."""
    port, log = free_port(), folder / "llm-server.log"
    server = engines.start(
        "tests.support.llm_server:serve", "--model", str(smollm()), "--port", str(port), "--host", "127.0.0.1",
        "--served-model-name", MODEL, "--enforce-eager", "--max-model-len", str(length), out=log,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
    try:
        await_that(lambda: _listens(port) or server.poll() is not None, PATIENCE, "the server answers")
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.kill()
        server.wait()


def serve() -> None:
    """Be ``python -m vllm.entrypoints.openai.api_server``."""
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def _listens(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
