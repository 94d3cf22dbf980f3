"""The one model that a worker holds: loaded once, swapped in place for the next checkpoint, replaced for another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalsched.engine import EngineError, EngineSettings, VllmEngine, prepare_environment
from evalsched.engine import preload as preload_engine
from evalsched.messages import ModelRef
from evalsched.models import ModelFacts
from planner.errors import BadInputError, one_line

if TYPE_CHECKING:
    from evalsched.peer_staging import PeerStaging

log = logging.getLogger("planaria.worker")
_loading = threading.Lock()


def preload() -> None:
    """Import the engine, holding the lock that :meth:`Resident.hold` takes, so that imports never race."""
    with _loading:
        import shutil

        device = "cuda" if shutil.which("nvidia-smi") else "cpu"
        prepare_environment(EngineSettings(), device)
        try:
            preload_engine()
        except Exception as error:  # said again, with its trial, when a shard needs the engine
            log.error("action=preload reason=%s", one_line(error))


class Resident:
    """Holds at most one engine. Used by one thread."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._engine: VllmEngine | None = None
        self._held: ModelRef | None = None
        self._settings: EngineSettings | None = None
        self._staged: Any = None
        self.peers: PeerStaging | None = None
        """Passes staged models on between nodes, where this worker's cluster has several."""
        self.starts = 0
        """Engines started in this process."""
        self.swaps = 0
        """Checkpoints swapped in place."""

    @property
    def engine(self) -> VllmEngine:
        """The engine.

        Raises:
            EngineError: none is loaded.
        """
        if self._engine is None:
            raise EngineError("no model is loaded")
        return self._engine

    def hold(self, model: ModelRef, engine: Mapping[str, Any]) -> str | None:
        """Make ``model`` the resident one; ``start`` or ``swap`` where something had to be done, else None.

        Raises:
            BadInputError: the directory is no model, or not the one that was asked for.
            EngineError: the engine failed; it must not be used any more.
        """
        settings = replace(EngineSettings.from_json(engine), threads=self._threads)
        ready = self._engine is not None and self._settings == settings
        if (
            ready
            and self._held is not None
            and (self._held.digest, self._held.tokenizer) == (model.digest, model.tokenizer)
        ):
            return None
        staged = self._stage(model)
        folder = staged.folder if staged is not None else Path(model.path)
        facts = ModelFacts.read(folder)
        try:
            if self._engine is not None and self._settings == settings and self._engine.why_not_swap(facts) is None:
                self._engine.swap(folder)
                self.swaps += 1
                how = "swap"
            else:
                self._start(folder, settings)
                how = "start"
        except BaseException:
            self._engine, self._held = None, None
            if staged is not None:
                staged.release()
            raise
        if self._staged is not None:
            self._staged.release()
        self._staged, self._held, self._settings = staged, model, settings
        return how

    def _stage(self, model: ModelRef) -> Any:
        if not model.stage:
            return None
        from evalsched.staging import stage

        if self.peers is None:
            return stage(Path(model.path), model.digest)
        staged = stage(Path(model.path), model.digest, copy=self.peers.copy)
        if staged.reference is not None:
            self.peers.announce(model.digest)
        return staged

    def _start(self, folder: Path, settings: EngineSettings) -> None:
        if self.starts:
            raise NewProcessNeededError(f"{folder}: it needs an engine of its own, so this worker starts anew")
        with _loading:
            self._engine = VllmEngine(folder, settings)
        self.starts += 1


class NewProcessNeededError(EngineError):
    """Another architecture, or an engine that failed: vLLM's device state cannot be rebuilt in this process."""


__all__ = ["BadInputError", "NewProcessNeededError", "Resident", "preload"]
