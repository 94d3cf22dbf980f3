"""What passes between the evaluation scheduler and its workers: versioned, closed shapes, JSON only.

*Work* goes to workers as the one argument of a Celery task; *answers* come back sealed through the stream
``planaria:responses``. A message of an unknown version, kind or shape is refused, logged and kept aside.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

VERSION: Literal[1] = 1

RUN_SHARD = "planaria.run_shard"
WARM = "planaria.warm"
METRIC_WORK = "planaria.metric_work"
METRIC_QUEUE = "planaria.metric"


Outcome = Literal["done", "failed", "handed_back", "refused"]


def infer_queue(worker: str) -> str:
    """The queue of one infer worker."""
    return f"planaria.infer.{worker}"


class Message(BaseModel):
    """Base of all messages; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: Literal[1] = VERSION

    def wire(self) -> dict[str, Any]:
        """As plain JSON values; what is large is plain already and is not copied."""
        return {name: value.model_dump() if isinstance(value, BaseModel) else value for name, value in self}


class ModelRef(BaseModel):
    """Which model: where it lies and what it must be."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    path: str
    digest: str
    """Of weights and configuration (:func:`evalsched.digests.model_digest`)."""
    tokenizer: str
    """Digest of the tokenizer."""
    stage: bool = False
    """Copy it into the node's memory first, once for all workers."""


# ---------------------------------------------------------------- to workers


class RunShard(Message):
    """Run one shard. The dispatch is the token: only its first delivery to a worker is run, which finds the shard in
    the dispatch's record (:class:`planner.worker_table.WorkerTable`)."""

    kind: Literal["run_shard"] = "run_shard"
    dispatch: str
    run: str
    model: ModelRef
    engine: dict[str, Any]
    """:class:`evalsched.engine.EngineSettings` as JSON."""
    singly: bool = False
    """Each request alone in the engine: the check of how far answers depend on their batch."""


class Warm(Message):
    """Load a model before the first shard is there (or swap to it)."""

    kind: Literal["warm"] = "warm"
    model: ModelRef
    engine: dict[str, Any]


class Metric(Message):
    """Work that needs lm-eval and no engine: record a run's requests, or score its responses."""

    kind: Literal["metric"] = "metric"
    dispatch: str
    run: str
    what: Literal["record", "score"]
    job: dict[str, Any]
    """What ``python -m evalsched.recording`` or ``python -m evalsched.scoring`` reads."""


Work = Annotated[RunShard | Warm | Metric, Field(discriminator="kind")]
WORK: TypeAdapter[Any] = TypeAdapter(Work)


# ---------------------------------------------------------------- from workers


class Answers(Message):
    """Finished responses of a dispatch; more may follow."""

    kind: Literal["answers"] = "answers"
    worker: str
    lease_token: int
    dispatch: str
    run: str
    responses: list[Any]
    """:class:`evalsched.types.Response` as JSON."""


class Ended(Message):
    """A dispatch is over on this worker."""

    kind: Literal["ended"] = "ended"
    worker: str
    lease_token: int
    dispatch: str
    run: str
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0
    """Of running requests, without loading."""
    load_seconds: float = 0.0
    """Of loading or swapping the model before them."""
    memory: int = 0
    """Bytes by which the worker's process was larger at the most than after loading."""
    result: dict[str, Any] | None = None
    """What metric work gave."""
    bad_input: bool = False
    """The work failed because its input is wrong (exit code 2)."""


class Left(Message):
    """A worker leaves: nothing more comes from it."""

    kind: Literal["left"] = "left"
    worker: str
    lease_token: int
    reason: str


Answer = Annotated[Answers | Ended | Left, Field(discriminator="kind")]
ANSWERS: TypeAdapter[Any] = TypeAdapter(Answer)
