"""An evaluation run: one checkpoint on a set of tasks, from the request to the results.

The scheduler's thread alone changes a :class:`Run`; what takes long (:func:`prepare`) runs beside it and only
returns values.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from evalsched.engine import EngineSettings, engine_key
from evalsched.evaluation import Model, describe_model, open_trials
from evalsched.ledger import Ledger
from evalsched.messages import ModelRef
from evalsched.models import ModelFacts
from evalsched.pace import Pace
from evalsched.priors import Facts, Predictor
from evalsched.recording import Recording, RecordJob
from evalsched.scoring import ScoreOutcome
from evalsched.shards import cut, prefix_group
from evalsched.types import EvalSettings, Request, RequestId, Shard, Trial, digest_of
from planner.events import TrialState
from planner.packing import PendingShard, RunView

MANY_REQUESTS = 20_000
"""Requests from which on the garbage collector is told that they stay."""
EARLY_SECONDS = 10.0
"""A metric that is expected to take so long is computed as soon as its task is answered."""
SHORTEST_SHARD = 0.3
"""Seconds below which no shard is cut."""
SHARDS_PER_WORKER = 3
"""Shards that each worker gets at least, so that all end together."""
RECUT_SHARDS = 3
"""Finished shards after which what waits may be cut anew."""
RECUT_FACTOR = 2.0
"""How far off the shards' seconds must be for that."""
RETRY_SECONDS = 0.5
"""Pause before a shard that failed twice is sent again; the first time it goes at once."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What is to be evaluated and where the results go; JSON, so that it outlives a scheduler."""

    model: str
    settings: EvalSettings
    output: str
    created: float
    job: str | None = None
    step: int | None = None
    weight: float = 1.0
    engine: EngineSettings = field(default_factory=EngineSettings)
    stage: bool = False
    """Bring the model into the node's memory, once for all workers."""
    target_seconds: float = 5.0
    """Length that shards are cut to."""
    deadline: float | None = None
    """When the report should be out, seconds since the epoch; the run presses when that needs all workers."""
    behind: str = "all"
    """What is done when evaluation falls behind (:mod:`planner.coalescing`)."""
    remark: str = ""
    """What was left out of it, and why; shown in the report."""

    @property
    def id(self) -> str:
        """The same for the same evaluation into the same folder."""
        own = {**self.to_json(), "created": 0}
        for name in ("deadline", "behind", "remark"):
            del own[name]
        return digest_of(own)[:16]

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal value."""
        return {**self.__dict__, "settings": self.settings.to_json(), "engine": self.engine.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunSpec:
        """The spec that :meth:`to_json` wrote."""
        settings = EvalSettings.from_json(data["settings"])
        return cls(**{**data, "settings": settings, "engine": EngineSettings.from_json(data["engine"])})


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What preparation found: everything that is known before the first request is run."""

    recording: Recording
    trials: Mapping[str, Trial]
    open: tuple[Request, ...]
    """Requests that nobody answered yet, in recorded order."""
    requests: int


@dataclass(frozen=True, kw_only=True)
class Identified:
    """The model, before its requests are recorded."""

    ref: ModelRef
    model: Model
    engine_key: Mapping[str, str]
    max_length: int


def identify(spec: RunSpec, device: str = "cpu") -> Identified:
    """Digest and check a model; cheap, so that workers can load it while its requests are recorded.

    Raises:
        BadInputError: it is no complete model directory, or cannot be served here.
    """
    folder = Path(spec.model)
    facts = ModelFacts.read(folder)
    if device == "cpu":
        facts.check_cpu()
    model = describe_model(folder, job=spec.job, step=spec.step)
    ref = ModelRef(path=str(model.path), digest=model.digest, tokenizer=model.tokenizer, stage=spec.stage)
    return Identified(
        ref=ref, model=model, engine_key=engine_key(facts, spec.engine, device), max_length=facts.max_length()
    )


def prepare(spec: RunSpec, found: Identified, ledger: Ledger, recorder: Callable[[RecordJob], Recording]) -> Prepared:
    """Record the requests, keep trials and requests in the ledger, find what is open.

    Raises:
        BadInputError: a task is unknown or cannot be loaded.
        WorkFailedError: recording failed.
        MissingServiceError: the ledger is away.
    """
    recording = recorder(RecordJob(settings=spec.settings, tokenizer=str(found.model.path)))
    requests = recording.requests()
    trials = open_trials(ledger, recording, spec.settings, found.model, found.engine_key, requests)
    answered = {one for trial in trials.values() if trial.responses for one in ledger.answered(trial.id)}
    if len(requests) > MANY_REQUESTS:
        gc.freeze()  # they live as long as the run: collections need not walk over them each time
    return Prepared(
        recording=recording,
        trials=trials,
        open=tuple(request for request in requests if request.id not in answered),
        requests=len(requests),
    )


@dataclass
class WaitingShard:
    """A shard of a run that is not at a worker. ``id`` stays that of the first cut, for the attempts' count."""

    shard: Shard
    attempts: int = 0
    after: float = 0.0
    last_worker: str | None = None
    back: bool = False
    """It was at a worker before."""
    tail: float = 0.0
    """CPU seconds of the longest metric that waits for its answers."""
    group: str = ""
    """See :func:`evalsched.shards.prefix_group`."""


@dataclass
class OutShard:
    """A dispatch: a shard that is at a worker."""

    dispatch: str
    run: str
    worker: str
    shard: Shard
    sent: float
    attempts: int = 0
    begun: float = 0.0
    check: bool = False
    high: float | None = None
    """Seconds that it takes at most, by its estimate's uncertainty."""
    facts: Facts | None = None
    """What its estimate came from."""


@dataclass
class Run:
    """A run as the scheduler holds it."""

    spec: RunSpec
    id: str
    state: TrialState = TrialState.QUEUED
    reason: str = ""
    model: Identified | None = None
    prepared: Prepared | None = None
    waiting: dict[str, WaitingShard] = field(default_factory=dict)
    open: set[RequestId] = field(default_factory=set)
    """Requests that are neither answered nor given up."""
    pace: Pace = field(default_factory=Pace)
    """Estimated seconds of everything that had to be run, and how it goes."""
    check_seconds: float = 0.0
    """Estimated seconds of the sample that is run again after the last answer, on the scale of ``pace``."""
    score_seconds: float = 0.0
    """Estimated seconds of scoring."""
    predictor: Predictor | None = None
    """Costs of its model by what was known when its requests were cut."""
    tails: dict[str, float] = field(default_factory=dict)
    """CPU seconds of each task's metrics."""
    left: Counter[str] = field(default_factory=Counter)
    """Unanswered requests per task."""
    keeping: frozenset[str] = frozenset()
    """Tasks whose verdicts are kept between scorings: programs that are run, answers that are judged."""
    early: dict[str, Future[float | None]] = field(default_factory=dict)
    """Tasks whose metrics were computed, or are being, before the others were answered: the seconds of it."""
    longest: float = 0.0
    """Estimated seconds of its longest request."""
    usual: float = inf
    """Estimated seconds that shards were cut to."""
    cut_by: float = 1.0
    """The pace's factor (what shards took over what was estimated) at that time."""
    began: float = 0.0
    settled: float = 0.0
    """When its last request was answered, while a shard had not said yet that it ended."""
    ended: float = 0.0
    failed: dict[str, str] = field(default_factory=dict)
    """Tasks that could not be completed, with the reason."""
    check: dict[str, Any] | None = None
    check_sent: bool = False
    outcome: ScoreOutcome | None = None
    error: BaseException | None = None
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it."""
        return self.state in (TrialState.DONE, TrialState.FAILED, TrialState.SKIPPED)

    def view(self) -> RunView:
        """What the feeding decision sees of it."""
        pending = tuple(
            PendingShard(
                shard=name, seconds=one.shard.seconds, attempts=one.attempts, after=one.after,
                last_worker=one.last_worker, back=one.back, tail=one.tail, group=one.group,
            )
            for name, one in self.waiting.items()
        )  # fmt: skip
        digest = self.model.ref.digest if self.model else ""
        return RunView(
            run=self.id, created=self.spec.created, model=digest, pending=pending, weight=self.spec.weight,
            deadline=self.spec.deadline, usual=self.usual, finest=SHORTEST_SHARD / self.pace.factor,
        )  # fmt: skip

    def outline(self) -> RunView:
        """The run as one shard: enough to compare urgencies."""
        whole = PendingShard(shard="", seconds=self.slot_seconds, tail=max(self.tails.values(), default=0.0))
        return RunView(
            run=self.id, created=self.spec.created, model="", pending=(whole,), weight=self.spec.weight,
            deadline=self.spec.deadline,
        )  # fmt: skip

    def wait(self, shard: Shard, **more: Any) -> None:
        """A shard waits for a worker."""
        tail = max((self.tails.get(task, 0.0) for task in shard.tasks), default=0.0)
        self.waiting[shard.id] = WaitingShard(shard=shard, tail=tail, group=prefix_group(shard), **more)

    def cut(self, requests: Sequence[Request], workers: int) -> None:
        """Cut requests into shards of the usual length, and let these wait."""
        self.cut_by = factor = self.pace.factor
        total = sum(map(self.cost, requests))
        shortest, equal = SHORTEST_SHARD / factor, total / (SHARDS_PER_WORKER * max(1, workers))
        self.usual = min(self.spec.target_seconds / factor, max(shortest, equal))
        for shard in cut(requests, self.cost, self.usual, scope=self.id):
            self.wait(shard)

    def recut(self, workers: int) -> None:
        """Cut what waits anew when shards turn out to be far shorter or longer than they should be.

        Where nothing was measured before, estimates may be off by a factor of ten; a shard that is too short fills no
        pass of the engine, and one too long is a loss when its worker dies. Shards that failed stay as they are.
        """
        off = self.pace.factor / self.cut_by
        if self.pace.shards < RECUT_SHARDS or 1 / RECUT_FACTOR <= off <= RECUT_FACTOR:
            return
        fresh = [name for name, one in self.waiting.items() if not one.attempts and not one.back]
        if not fresh:
            return
        self.cut([request for name in fresh for request in self.waiting.pop(name).shard.requests], workers)

    def cost(self, request: Request) -> float:
        """Estimated seconds of one of its requests."""
        return self.pace.cost.get(request.id, 0.0)

    def take_back(self, out: OutShard, now: float, *, count: bool) -> None:
        """What is left of a dispatch waits again; ``count``: as a failed attempt."""
        left = tuple(request for request in out.shard.requests if request.id in self.open)
        if not left:
            return
        seconds = out.shard.seconds * len(left) / max(1, len(out.shard.requests))
        shard = replace(out.shard, requests=left, seconds=seconds)
        attempts = out.attempts + (1 if count else 0)
        after = now + RETRY_SECONDS * (2 ** (attempts - 1) - 1) if count else now
        self.wait(shard, attempts=attempts, after=after, last_worker=out.worker if count else None, back=True)

    def answered(self, ids: Iterable[RequestId], now: float) -> None:
        """Requests were answered."""
        fresh = [one for one in ids if one in self.open]
        self.open.difference_update(fresh)
        for one in fresh:
            self.left[one.task] -= 1
        self.pace.closed(fresh, now)

    def fail_task(self, tasks: Collection[str], reason: str) -> None:
        """Give tasks up: their requests are no longer waited for."""
        for task in tasks:
            self.failed.setdefault(task, reason)
        self.open = {one for one in self.open if one.task not in self.failed}
        for name in list(self.waiting):
            left = tuple(one for one in self.waiting[name].shard.requests if one.task not in self.failed)
            if left:
                self.waiting[name].shard = replace(self.waiting[name].shard, requests=left)
            else:
                del self.waiting[name]

    @property
    def slot_seconds(self) -> float:
        """Estimated seconds on one slot of what is not answered."""
        left = self.pace.left(1, 0.0) if self.pace.measured else None
        return sum(self.pace.open.values()) if left is None else left

    def early_tasks(self) -> list[str]:
        """Tasks that are answered, whose metrics take long, while others are not answered yet."""
        if not self.open:
            return []
        return [
            task
            for task, seconds in self.tails.items()
            if seconds >= EARLY_SECONDS
            and task in self.keeping
            and self.left[task] <= 0
            and task not in self.early
            and task not in self.failed
        ]

    @property
    def begun(self) -> bool:
        """Whether any of its requests was answered."""
        return self.pace.done > 0

    def progress(self, workers: int, now: float) -> tuple[float, float | None]:
        """(share of the requests' work that is done, seconds until the results with so many workers, or None)."""
        if self.over:
            return 1.0, 0.0
        left = self.pace.left(workers, now)
        if left is not None:
            left += self.check_seconds * self.pace.factor + self.score_seconds
        return self.pace.share, left
