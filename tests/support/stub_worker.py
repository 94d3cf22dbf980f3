"""A real worker process on real Redis and Celery whose engine answers at once from the request's text.

``python -m tests.support.stub_worker --kind infer --name NAME``; the environment says how it misbehaves:
``STUB_SECONDS`` per request, ``STUB_POISON`` a text whose request kills the process, ``STUB_REFUSE`` a text whose
shard raises, ``STUB_HANG`` a text that makes it stand still, all only while the file ``STUB_ONLY_WHILE`` is there;
``STUB_PLAIN`` answers the same to every scored request.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evalsched import worker as worker_module
from evalsched.engine import EngineError
from evalsched.messages import ModelRef
from evalsched.types import Request, Response
from tests.support.hash_lm import respond


class StubEngine:
    """Answers from the text alone, in order."""

    def run(self, requests: Sequence[Request], stop: Callable[[], bool] = lambda: False) -> Iterator[Response]:
        """See :class:`evalsched.engine.Engine`."""
        pause, plain = float(os.environ.get("STUB_SECONDS", "0")), "STUB_PLAIN" in os.environ
        for request in requests:
            if stop():
                return
            text = str(request.arguments)
            if _says("STUB_POISON", text):
                os.kill(os.getpid(), signal.SIGKILL)
            if _says("STUB_REFUSE", text):
                raise EngineError("this text breaks the engine")
            while _says("STUB_HANG", text):
                time.sleep(1)
            if pause:
                time.sleep(pause)
            yield Response(id=request.id, value=(-1.0, True)) if plain else respond(request)

    def forget(self) -> None:
        """See :class:`evalsched.engine.Engine`."""


def _says(name: str, text: str) -> bool:
    word, flag = os.environ.get(name), os.environ.get("STUB_ONLY_WHILE")
    if flag and not Path(flag).exists():
        return False
    return bool(word) and word in text


class StubResident:
    """Holds whatever it is told to."""

    def __init__(self, threads: int = 1) -> None:
        self.engine = StubEngine()
        self.starts = self.swaps = 0
        self.peers: Any = None
        self._held: str | None = None

    def hold(self, model: ModelRef, engine: Mapping[str, Any]) -> str | None:
        """See :class:`evalsched.residency.Resident`."""
        if self._held == model.digest:
            return None
        how = "start" if self._held is None else "swap"
        self._held = model.digest
        self.starts += how == "start"
        self.swaps += how == "swap"
        return how


def main() -> int:
    """Run as a worker."""
    from evalsched import residency

    residency.Resident = StubResident  # type: ignore[assignment, misc]
    preload = worker_module._preload
    worker_module._preload = lambda kind, wait: None if kind == "infer" else preload(kind, wait=wait)
    name = sys.argv[sys.argv.index("--name") + 1]
    kind = sys.argv[sys.argv.index("--kind") + 1]
    folder = os.environ.get("PLANARIA_STATE_DIR")
    return worker_module.worker_command(kind, name, None, Path(folder) if folder else None, None, None)


if __name__ == "__main__":
    sys.exit(main())
