"""vLLM's own OpenAI-compatible server with a 135 M model, for what is written against such endpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.redis_server import free_port
from tests.support.redis import await_that
from tests.support.smollm import smollm

MODEL = "small"
"""The model's name at the endpoint."""
PATIENCE = 240.0


@contextmanager
def llm_server(folder: Path, length: int = 2048) -> Iterator[str]:
    """A server in a session of its own; gives its base URL. ``length`` is its context in tokens."""
    port, log = free_port(), folder / "llm-server.log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm()), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", MODEL, "--enforce-eager", "--max-model-len", str(length),
    ]  # fmt: skip
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("wb") as stream:
        server = subprocess.Popen(command, env=os.environ | own, stdout=stream, stderr=stream, start_new_session=True)
    try:
        await_that(lambda: _listens(port) or server.poll() is not None, PATIENCE, "the server answers")
        assert server.poll() is None, log.read_text(errors="replace")[-2000:]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _listens(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
