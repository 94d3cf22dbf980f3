"""The conductor's half of the priors: predictions for runs, measurements from what workers report, learning beside."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evalsched.costs import CostModel
from evalsched.engine import MAX_SEQUENCES
from evalsched.ledger import Ledger
from evalsched.messages import Ended
from evalsched.models import ModelFacts
from evalsched.pace import Speeds
from evalsched.priors import LEAST, Observation, Predictor, Priors
from evalsched.recording import Recording
from evalsched.runs import OutShard, Run
from planner.errors import MissingServiceError
from planner.worker_table import WorkerRecord

log = logging.getLogger("planaria.evaluation")

FLUSH_SECONDS = 1.0
RELEARN_SECONDS = 30.0
RELEARN_OBSERVATIONS = 50
"""New measurements after which a long run's later neighbours profit; a new run always has everything."""
LEAST_GROWTH = 1 << 20
"""Bytes; a process that grew less says nothing about its requests' memory."""


class Estimates:
    """Predicts, and learns from what really happened.

    Args:
        ledger: its observations are what is known at the start.
        device: what engines run on.
    """

    def __init__(self, ledger: Ledger, device: str) -> None:
        self._device = device
        self.priors = Priors.of(ledger)
        self.speeds = Speeds()
        self._unwritten: list[Observation] = []
        self._written_at = 0.0
        self._learned_at = 0.0
        self._starting: set[str] = set()
        self._memory: dict[str, int] = {}
        self._calibrated: tuple[int, dict[str, dict[str, Any]]] = (0, {})
        self._learning: threading.Thread | None = None

    # ------------------------------------------------------------------ learning

    def learn_beside(self) -> None:
        """Fit in a thread: the first time it imports scikit-learn."""
        if self.priors.unlearned < LEAST or (self._learning is not None and self._learning.is_alive()):
            return
        self._learning = threading.Thread(target=self.priors.learn, name="learn", daemon=True)
        self._learning.start()

    def wait_for_learning(self) -> None:
        """Until the fit that was begun last is there. For threads beside the conductor's."""
        if self._learning is not None:
            self._learning.join()

    def flush(self, ledger: Ledger, now: float) -> None:
        """Write measurements down, a few at a time; while the ledger is away they wait."""
        if self._unwritten and now - self._written_at >= FLUSH_SECONDS:
            self._written_at = now
            try:
                ledger.put_observations(self._unwritten)
            except MissingServiceError as error:
                log.warning("action=observations.wait reason=%s", error)
                return
            self._unwritten = []
        if self.priors.unlearned >= RELEARN_OBSERVATIONS and now - self._learned_at >= RELEARN_SECONDS:
            self._learned_at = now
            self.learn_beside()

    def _note(self, one: Observation) -> None:
        if one.usable:
            self.priors.note(one)
            self._unwritten.append(one)

    # ------------------------------------------------------------------ predictions

    def predictor(self, run: Run) -> Predictor:
        """Costs of a run's model on this cluster's slots."""
        exact = "/exact" if run.spec.settings.exact or run.spec.engine.exact else ""
        cost = CostModel.of(ModelFacts.read(Path(run.spec.model)), self._device)
        return self.priors.predictor(cost, f"{self._device}/vllm{exact}")

    def tails(self, recording: Recording) -> dict[str, float]:
        """CPU seconds of each task's metrics."""
        return {task: self.priors.metric({task: facts}).value for task, facts in _facts(recording).items()}

    def send(self, run: Run, out: OutShard) -> None:
        """Note how long a shard that is sent takes at the most."""
        if run.predictor is not None and not out.check:
            out.facts = run.predictor.features(out.shard.requests)
            out.high = run.predictor.shard_high(out.shard.seconds, out.facts[1])

    def calibration(self) -> dict[str, dict[str, Any]]:
        """See :meth:`evalsched.priors.Priors.calibration`; computed again where there is a tenth more to it."""
        if self.priors.count > 1.1 * self._calibrated[0]:
            self._calibrated = (self.priors.count, self.priors.calibration())
        return self._calibrated[1]

    # ------------------------------------------------------------------ measurements

    def shard_ended(self, run: Run, out: OutShard, message: Ended) -> None:
        """A shard was run to its end."""
        requests, predictor = out.shard.requests, run.predictor
        self.speeds.note(out.worker, out.shard.seconds, message.seconds)
        if predictor is None or out.check or message.seconds <= 0:
            return
        facts = out.facts or predictor.features(requests)  # without: sent before a restart
        self._note(predictor.observed(facts, out.shard.seconds, message.seconds))
        if message.memory >= max(LEAST_GROWTH, self._memory.get(out.worker, 0) + 1):  # a peak, so it only grows
            self._memory[out.worker] = message.memory
            self._note(predictor.memory_observed(requests, MAX_SEQUENCES, float(message.memory)))

    def scored(self, run: Run, seconds: float) -> None:
        """A run's metrics were computed in ``seconds``."""
        if run.prepared is not None:
            facts = _facts(run.prepared.recording)
            for task, early in run.early.items():
                if early.done() and early.exception() is None and (own := early.result()) is not None:
                    self._note(self.priors.metric_observed({task: facts[task]}, own))
            known = {task: one for task, one in facts.items() if task not in run.failed and task not in run.early}
            if known:
                self._note(self.priors.metric_observed(known, seconds))

    def look_at(self, records: Mapping[str, WorkerRecord], runs: Mapping[str, Run]) -> None:
        """Engines that were started since the last look."""
        for name, record in records.items():
            seconds = record.facts.get("start_seconds")
            if not seconds:
                self._starting.add(name)
            elif name in self._starting:  # one that was there before this conductor was measured by an earlier one
                run = next(
                    (
                        one
                        for one in runs.values()
                        if one.predictor and one.model and one.model.ref.digest == record.facts.get("model")
                    ),
                    None,
                )
                if run is not None and run.predictor is not None:
                    self._starting.discard(name)
                    self._note(run.predictor.load_observed(float(seconds)))

    def forget(self, worker: str) -> None:
        """A worker is gone."""
        self.speeds.forget(worker)
        self._starting.discard(worker)
        self._memory.pop(worker, None)


def _facts(recording: Recording) -> dict[str, tuple[int, bool]]:
    return {task.task: (task.documents, task.unsafe_code or task.sandboxed) for task in recording.tasks}
