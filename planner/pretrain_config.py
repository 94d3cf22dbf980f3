"""The settings of a pretraining job (``configs/pretrain/*.yaml``), one model per section.

Shapes that cannot work are refused here, before anything is started, each with the value in the message.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from planner.coalescing import Behind
from planner.loading import Settings

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that the CPU attention kernel of the evaluation engine takes."""


class Workers(Settings):
    """How many slots the job takes."""

    min: Positive = 1
    """Fewest ranks that the job runs with; below it the job waits."""
    max: Positive = 1
    """Most ranks that the job is given."""

    @model_validator(mode="after")
    def _ordered(self) -> Workers:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class Parallel(Settings):
    """Model parallelism; what is left of the slots is data parallelism."""

    tensor: Positive = 1
    """Ranks that share each layer's matrices."""
    pipeline: Positive = 1
    """Stages that the layers are cut into."""


class Model(Settings):
    """A Llama-shaped GPT: RMSNorm, rotary positions, SwiGLU, grouped-query heads."""

    layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the SwiGLU projection."""
    heads: Positive
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads; as many as query heads when left out."""
    seq_length: Positive
    """Tokens of a training sample and window of the exported model."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: Annotated[float, Field(gt=0)] = 1.0e-5
    """Epsilon of RMSNorm."""
    tie_embeddings: bool = False
    """Share the input and output embeddings."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights in training and export."""

    @property
    def groups(self) -> int:
        """Key and value heads after the default."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.heads

    @model_validator(mode="after")
    def _shape(self) -> Model:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not divisible by heads {self.heads}")
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.groups}")
        return self


class Data(Settings):
    """Training and held-out text."""

    train: Annotated[list[str], Field(min_length=1)]
    """Files or globs (``**`` allowed, ``~`` expanded) of UTF-8 text; ``stdlib`` stands for the running
    interpreter's standard library without the held-out modules."""
    valid: list[str] = []
    """Held-out files or globs; ``stdlib-held-out`` stands for the held-out modules. Empty: one file in twenty
    of ``train`` is held out."""
    cache: str | None = None
    """Folder of the token index; below the state directory when left out."""


class Batch(Settings):
    """Samples of an optimizer step."""

    model_config = Settings.model_config
    global_: Annotated[int, Field(gt=0, alias="global")]
    """Samples of a step over all ranks."""
    micro: Positive
    """Samples of one forward pass."""

    @model_validator(mode="after")
    def _divisible(self) -> Batch:
        if self.global_ % self.micro:
            raise ValueError(f"global {self.global_} is not divisible by micro {self.micro}")
        return self

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step over all data-parallel ranks; they need not divide evenly."""
        return self.global_ // self.micro


class Optimizer(Settings):
    """AdamW with a cosine schedule after a linear warm-up."""

    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the last step."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Bound of the global gradient norm; 0 turns clipping off."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's moment decays."""
    eps: Annotated[float, Field(gt=0)] = 1.0e-8
    """Adam's epsilon."""

    @model_validator(mode="after")
    def _ordered(self) -> Optimizer:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        return self


class Checkpoint(Settings):
    """When state is copied, published and deleted."""

    dir: str | None = None
    """Folder or fsspec URL of published checkpoints; the job's folder when left out."""
    every_steps: Positive = 60
    """Steps between published checkpoints; the last step is always published."""
    snapshot_every_steps: Positive = 10
    """Steps between snapshots to host memory."""
    keep: Positive = 3
    """Newest published checkpoints that retention keeps."""
    keep_every: Positive | None = None
    """Every checkpoint whose step is a multiple of this stays for good."""
    failures: Positive = 3
    """Saves that may fail in a row before the job counts as failed."""
    export: bool = True
    """Publish a Hugging Face export beside each checkpoint."""
    start_over: bool = False
    """Allow starting from random weights although unusable checkpoints are there."""


class Evaluate(Settings):
    """What is evaluated at each published checkpoint."""

    tasks: list[str] = []
    """lm-eval task names; empty: nothing is evaluated."""
    limit: Positive | None = None
    """Documents per task; all when left out."""
    every_checkpoints: Positive = 1
    """Evaluate every n-th published checkpoint."""
    num_fewshot: NonNegative | None = None
    """Few-shot examples; the task's own number when left out."""
    behind: Behind = "all"
    """When evaluation falls behind: ``all`` evaluates every checkpoint, later; ``skip`` leaves out intermediate ones
    that nobody has begun; ``limit`` takes fewer documents. The report says what was left out."""
    deadline_seconds: Positive | None = None
    """A report is wanted so many seconds after its checkpoint was published; it presses when that becomes tight."""


class FaultKind(StrEnum):
    """What an injected fault does."""

    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    EXCEPTION = "exception"
    EXIT = "exit"
    NCCL_ERROR = "nccl_error"
    NAN_LOSS = "nan_loss"
    LOSS_SPIKE = "loss_spike"
    SLOW = "slow"
    HANG = "hang"
    CORRUPT_CHECKPOINT = "corrupt_checkpoint"
    DISK_FULL = "disk_full"


class Phase(StrEnum):
    """Where in a step an injected fault fires."""

    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    OPTIMIZER = "optimizer"
    SAVE = "save"
    REFORM = "reform"
    EVALUATE = "evaluate"


class Fault(Settings):
    """A fault asked for by coordinates; it fires once and says so in the event log."""

    at_step: Positive
    """The step (1-based) in which it fires."""
    kind: FaultKind
    """What it does."""
    rank: NonNegative = 0
    """The rank at the job's start, followed through re-forming."""
    phase: Phase | None = None
    """Where in the step; at its first forward pass when left out."""
    micro_batch: NonNegative | None = None
    """Which of the rank's micro-batches (0-based), for forward and backward; the first when left out."""


class HealthLimits(Settings):
    """How faults are told from slowness. Steps are learned; these bound what is not learned yet."""

    start_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Longest start of an incarnation until its ranks said hello and loaded."""
    first_step_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Longest first step (it compiles and warms up)."""
    hang_factor: Annotated[float, Field(gt=1)] = 3.0
    """A step longer than this many average steps is a hang (Unicron: 3 ×)."""
    hang_floor_seconds: Annotated[float, Field(gt=0)] = 20.0
    """No step shorter than this is a hang."""
    straggler_factor: Annotated[float, Field(gt=1)] = 1.1
    """A step longer than this many average steps is a warning (Unicron: 1.1 ×, unverified)."""
    grace_seconds: Annotated[float, Field(gt=0)] = 60.0
    """Time between SIGTERM and SIGKILL, for an emergency checkpoint."""
    heal_in_place: bool = True
    """After a fault the survivors re-form in their processes, where they hold all state among them. False: all ranks
    start anew from the nearest snapshot, as they must where each holds a shard of its own (distributed optimizer)."""
    incarnations_without_progress: Positive = 3
    """Starts without one completed step, after which the job is failed."""
    on_loss_spike: Literal["roll_back", "tell"] = "roll_back"
    """What to do when the loss leaves its band and stays: back to an earlier checkpoint without that data, or only an
    event."""
    roll_backs: Positive = 3
    """Roll-backs for one bad stretch, each further back than the last one; after them the job is failed."""
    on_bad_gradient: Literal["retry_step", "skip_batch", "roll_back"] = "skip_batch"
    """What to do when the gradient or loss is Inf or NaN; never silently on."""


class PretrainConfig(Settings):
    """One pretraining job."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")]
    """Name of the job: lower case, digits, dots, dashes."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """w(t) of the objective: how much this job's FLOP/s are worth against others'."""
    workers: Workers = Workers()
    parallel: Parallel = Parallel()
    model: Model
    tokenizer: str = "bytes"
    """``bytes`` or the path of a Hugging Face tokenizer."""
    data: Data
    batch: Batch
    optimizer: Optimizer
    steps: Positive
    """Optimizer steps of the whole run."""
    seed: NonNegative = 1234
    """Seed of weights and sample order."""
    start_from: str | None = None
    """Folder of a Hugging Face Llama-type model whose weights the run starts from; random weights when left out."""
    valid_every_steps: Positive | None = None
    """Steps between measurements of the held-out loss; at every checkpoint when left out."""
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    health: HealthLimits = HealthLimits()
    faults: list[Fault] = []
    """Faults to inject, for tests and drills."""

    @field_validator("tokenizer")
    @classmethod
    def _named(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("a tokenizer is needed: 'bytes' or the path of a Hugging Face tokenizer")
        return value

    @model_validator(mode="after")
    def _layout(self) -> PretrainConfig:
        tensor, pipeline = self.parallel.tensor, self.parallel.pipeline
        group = tensor * pipeline
        checks: list[tuple[bool, str]] = [
            (
                self.model.layers % pipeline == 0,
                f"model.layers {self.model.layers} is not divisible by parallel.pipeline {pipeline}",
            ),
            (
                self.model.heads % tensor == 0,
                f"model.heads {self.model.heads} is not divisible by parallel.tensor {tensor}",
            ),
            (
                self.model.groups % tensor == 0,
                f"model.kv_heads {self.model.groups} is not divisible by parallel.tensor {tensor}",
            ),
            (
                self.model.ffn_hidden_size % tensor == 0,
                f"model.ffn_hidden_size {self.model.ffn_hidden_size} is not divisible by parallel.tensor {tensor}",
            ),
            (
                self.workers.min >= group,
                f"workers.min {self.workers.min} is below parallel.tensor × parallel.pipeline = {group}",
            ),
            (
                self.workers.min % group == 0,
                f"workers.min {self.workers.min} is not a multiple of parallel.tensor × parallel.pipeline = {group}",
            ),
            (
                not self.evaluate.tasks or self.model.head_size in CPU_HEAD_SIZES,
                f"model.hidden_size / model.heads gives a head size of {self.model.head_size}, which the evaluation "
                f"engine cannot serve; use one of {', '.join(map(str, CPU_HEAD_SIZES))}",
            ),
            (
                not self.evaluate.tasks or self.checkpoint.export,
                "evaluate.tasks needs checkpoint.export: true, since the engine loads the export",
            ),
            (
                self.optimizer.warmup_steps <= self.steps,
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} is above steps {self.steps}",
            ),
        ]
        for fine, message in checks:
            if not fine:
                raise ValueError(message)
        for index, fault in enumerate(self.faults):
            if fault.rank >= self.workers.max:
                raise ValueError(f"faults.{index}.rank {fault.rank} does not exist with workers.max {self.workers.max}")
            if fault.at_step > self.steps:
                raise ValueError(f"faults.{index}.at_step {fault.at_step} is after the last step {self.steps}")
        return self

    def to_json(self) -> dict[str, object]:
        """The settings as JSON that :meth:`pydantic.BaseModel.model_validate` reads back."""
        return self.model_dump(mode="json", by_alias=True)
