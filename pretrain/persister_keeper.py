"""Keeps one persister process alive for a job on a node, and passes on what it says."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from planner.clock import Clock, SystemClock
from planner.files import write_atomic
from planner.messages import Persisted, RankCheckpoint
from pretrain.persister import PersisterSpec, scratch_of

_LONGEST_BACK_OFF = 30.0


class PersisterKeeper:
    """Starts a persister, starts it again when it dies (with growing pauses), reads its messages.

    ``tell`` gets every message for the event log, ``settled`` every last word for the ranks. The death of the
    process is a message too (``failed``), so a save that its death interrupted is known within the caller's polling
    interval and is done again by the next process.
    """

    def __init__(
        self,
        spec: PersisterSpec,
        folder: Path,
        tell: Callable[[RankCheckpoint], None],
        *,
        settled: Callable[[Persisted], None] = lambda word: None,
        python: str = sys.executable,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self.ready = False
        """Whether the present process is up."""
        self.leaving_until: float | None = None
        """Monotonic time until which it may finish; None: it was not told to leave."""
        self.finished = False
        """Whether it left on its own, with everything done."""
        self.deaths = 0
        """Deaths in a row, without a publication between them."""
        self._folder, self._tell, self._settled, self._python = folder, tell, settled, python
        self._clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._next_start = 0.0
        self._told = False
        self._spec_path = folder / f"persister-{spec.job}.json"

    @property
    def pid(self) -> int | None:
        """The process's id, where it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def output(self) -> int | None:
        """Descriptor that is readable when :meth:`poll` has something to read."""
        return self._process.stdout.fileno() if self._process and self._process.stdout else None

    def start(self) -> None:
        """Start it now, in a session of its own, logging beside its spec."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._spec_path, self.spec.model_dump_json(), mode=0o600)
        with (self._folder / f"persister-{self.spec.job}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", "pretrain.persister", str(self._spec_path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=_environment(),
            )
        self._pending, self.ready = b"", False

    def poll(self, seconds: float = 0.0) -> None:
        """Read what it said (waiting up to ``seconds``), and start it again if it died and its pause is over."""
        if self._process is None:
            if self._clock.monotonic() >= self._next_start and self.leaving_until is None:
                self.start()
            return
        self._read(seconds)
        code = self._process.poll()
        if code is None:
            self._press()
            return
        self._read(0.0)
        self._close()
        if self.leaving_until is not None:
            self.finished = code == 0
            return
        self.deaths += 1
        pause = min(_LONGEST_BACK_OFF, 0.5 * 2 ** (self.deaths - 1)) if self.deaths > 1 else 0.0
        self._next_start = self._clock.monotonic() + pause
        reason = f"the persister died (exit {code}); it is started again in {pause:.1f} s and takes the save up anew"
        self._tell(RankCheckpoint(what="failed", step=0, reason=reason, time=self._clock.time()))

    def leave(self, seconds: float) -> None:
        """Tell it to finish the marked snapshots and go, without waiting: :meth:`poll` does the rest, until ``gone``.

        One that is still coming up is told when it is up: before that the signal would end it at once.
        """
        if self.leaving_until is None:
            self.leaving_until = self._clock.monotonic() + seconds
            self._told = False
        self._press()

    @property
    def gone(self) -> bool:
        """Whether it was told to leave and has left."""
        return self.leaving_until is not None and self._process is None

    def _press(self) -> None:
        if self.leaving_until is None or self._process is None:
            return
        if self._clock.monotonic() >= self.leaving_until:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif self.ready and not self._told:
            self._told = True
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def stop(self, seconds: float = 60.0) -> bool:
        """Let it finish the marked snapshots and leave; whether it did so in time. After that it is killed."""
        if self._process is None:
            return True
        end = self._clock.monotonic() + seconds
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        while self._process.poll() is None and self._clock.monotonic() < end:
            self._read(0.05)
        finished = self._process.poll() == 0
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._read(0.0)
        self._close()
        return finished

    def _close(self) -> None:
        assert self._process is not None
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        shutil.rmtree(scratch_of(self._spec_path), ignore_errors=True)  # one that was killed left it

    def _read(self, seconds: float) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while selector.select(seconds):
                chunk = os.read(descriptor, 65536)
                if not chunk:
                    return
                *lines, self._pending = (self._pending + chunk).split(b"\n")
                for line in lines:
                    self._hear(line)
                seconds = 0.0

    def _hear(self, line: bytes) -> None:
        try:
            data = json.loads(line)
        except ValueError:
            return
        kind = data.get("kind") if isinstance(data, dict) else None
        if kind == "ready":
            self.ready = True
            self._settled(Persisted(step=0))
        elif kind == "persisted":
            self._settled(Persisted.model_validate(data))
        elif kind == "checkpoint":
            message = RankCheckpoint.model_validate(data)
            if message.what == "published":
                self.deaths = 0
            self._tell(message)


def _environment() -> dict[str, str]:
    """A persister speaks to storage alone: it gets no way to the cluster."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PLANARIA_URL", "PLANARIA_SECRET_FILE")}
    return kept | {"OMP_NUM_THREADS": "1"}
