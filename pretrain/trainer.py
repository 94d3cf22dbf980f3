"""The loop of one rank: draw, accumulate, reduce, agree, update, tell; validate and publish when it is time."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from planner.clock import Clock, SystemClock
from planner.events import Action
from planner.messages import RankDone, RankNote, RankPhase, RankStep
from planner.pretrain_config import Phase, PretrainConfig
from pretrain import parallel
from pretrain.channel import AgentMessage, Channel
from pretrain.guard import Decision, NonFiniteError, Verdict, decide
from pretrain.metrics import ScalarWriter
from pretrain.optimizer import advance
from pretrain.order import SampleOrder
from pretrain.snapshots import Snapshots, memory_dir
from pretrain.state import TrainState, step_seed
from pretrain.step import Agreement, Machine, StepPlan, StepWork, plan
from pretrain.validation import Validation


class Checkpoints(Protocol):
    """Where the trainer's state goes; all calls are collective."""

    def save(self, state: TrainState, *, insist: bool = False) -> bool:
        """Make ``state`` and the live model durable; False where that failed and training may go on without.

        With ``insist`` it is tried again until it succeeds; raises when it failed too often in a row.
        """


class StopRequest:
    """The wish to stop at the next step's end, set from a signal handler or the channel's thread."""

    def __init__(self) -> None:
        self._why: str | None = None
        self.asked = threading.Event()

    def ask(self, why: str) -> None:
        """Ask to stop; a later reason replaces an earlier one."""
        self._why = why
        self.asked.set()

    @property
    def why(self) -> str | None:
        """The reason, or None."""
        return self._why


@dataclass(frozen=True)
class SaveRetry:
    """When a failed save is tried again: 1, 2, 4 … steps later."""

    failures: int = 0
    at_step: int | None = None

    def due(self, step: int) -> bool:
        """Whether the retry is due after ``step``."""
        return self.at_step is not None and step >= self.at_step

    def after_failure(self, step: int) -> SaveRetry:
        """The next retry after another failure at ``step``."""
        return SaveRetry(self.failures + 1, step + (1 << self.failures))


@dataclass
class Trainer:
    """One rank's training run. The parts that a re-form replaces (``machine``) stand apart from those that stay."""

    config: PretrainConfig
    incarnation: int
    machine: Machine
    schedule: object
    order: SampleOrder
    state: TrainState
    channel: Channel
    checkpoints: Checkpoints
    validation: Validation | None
    stop: StopRequest
    job_folder: Path
    clock: Clock = field(default_factory=SystemClock)
    phase: str = "start"
    """What the rank is doing, for the message of an exception."""
    saved_step: int = 0
    """Step of the newest checkpoint."""
    retry: SaveRetry = SaveRetry()
    writer: ScalarWriter | None = None
    snapshots: Snapshots | None = None
    """Copies of the state in host memory; None: that tier is off."""

    def run(self) -> str:
        """Train until all steps are done or a stop is agreed; returns why, after saying ``done``.

        Raises:
            NonFiniteError: the guard gives up (:mod:`pretrain.guard`).
        """
        self.saved_step = self.state.step
        first, why = True, "completed"
        while self.state.step < self.config.steps:
            self.enter("first_step" if first else "step")
            why = self._one_step() or "completed"
            first = False
            if why != "completed":
                break
        if self.state.step > self.saved_step:
            self._save(insist=True)
        if self.snapshots is not None:
            self.snapshots.close(completed=why == "completed", memory=memory_dir())
        self._say_done(why)
        return why

    def on_agent(self, message: AgentMessage) -> None:
        """Take a message of the agent (called in the channel's thread)."""
        if message.kind == "stop":
            self.stop.ask(message.why)

    # ------------------------------------------------------------ a step

    def _one_step(self) -> str | None:
        """Complete one optimizer step, then validate and save where that is due; returns a reason to stop."""
        started = self.clock.monotonic()
        work, agreement, norm, rate = self._attempt_until_applied()
        self.state.step = work.plan.step
        self.state.consumed_samples += len(work.plan.ids)
        if self.snapshots is not None:
            self.state.incarnation = self.incarnation
            self.snapshots.after_step(self.state)
        seconds = self.clock.monotonic() - started
        valid = self._validate() if self._validates() else None
        self._tell(work, agreement, norm, rate, seconds, valid)
        due = self.state.step % self.config.checkpoint.every_steps == 0 or self.retry.due(self.state.step)
        if due and self.state.step < self.config.steps and agreement.stop is None:
            self._save()
        return agreement.stop

    def _attempt_until_applied(self) -> tuple[StepWork, Agreement, float, float]:
        """Attempts of the step in hand until one is sound: retried or with the next samples, as the guard decides."""
        retries = skips = 0
        while True:
            work = self.start_step()
            agreement, norm, rate = self.finish_gradient(work)
            decision = decide(self.config.health.on_bad_gradient, agreement.loss, norm, retries=retries, skips=skips)
            if decision.verdict == Verdict.APPLY:
                if self.snapshots is not None:
                    self.snapshots.before_update()
                work.update(norm)
                return work, agreement, norm, rate
            self._report_guard(work.plan, decision)
            if decision.verdict == Verdict.RETRY:
                retries += 1
            elif decision.verdict == Verdict.SKIP:
                retries, skips = 0, skips + 1
                self.state.consumed_samples += len(work.plan.ids)
                self.state.skipped.extend(work.plan.ids)
            else:
                raise NonFiniteError(f"step {work.plan.step}: {decision.reason}")

    def start_step(self) -> StepWork:
        """A fresh attempt at the next step: its plan, and empty gradient buffers."""
        step = self.state.step + 1
        parallel.seed_generators(step_seed(self.config.seed, step))
        ids = self.order.batch(self.state.consumed_samples, self.config.batch.global_)
        work = StepWork(
            self.machine,
            plan(step, ids, self.config.batch.micro, self.config.model.seq_length, self.machine.layout.data),
        )
        work.begin()
        return work

    def finish_gradient(self, work: StepWork) -> tuple[Agreement, float, float]:
        """Accumulate this rank's share, reduce and agree; returns the agreement, the gradient's norm and the rate."""
        work.accumulate(work.plan.shares[self.machine.layout.data_rank])
        work.reduce()
        agreement = work.agree(self.stop.why)
        rate = advance(self.schedule, work.plan.step)
        return agreement, work.gradient_norm(), rate

    # ------------------------------------------------------------ validation and checkpoints

    def _validates(self) -> bool:
        every = self.config.valid_every_steps or self.config.checkpoint.every_steps
        return self.validation is not None and (self.state.step % every == 0 or self.state.step == self.config.steps)

    def _validate(self) -> float | None:
        assert self.validation is not None
        self.enter("validate")
        self.machine.injector.fire(Phase.EVALUATE, self.state.step)
        return self.validation.loss(self.machine.chunk, self.machine.layout)

    def _save(self, *, insist: bool = False) -> None:
        """Save now; without ``insist`` a failed save is tried again after a few more steps."""
        self.enter("save")
        self.state.incarnation = self.incarnation
        if self.checkpoints.save(self.state, insist=insist):
            self.saved_step = self.state.step
            self.retry = SaveRetry()
        else:
            self.retry = self.retry.after_failure(self.state.step)

    # ------------------------------------------------------------ messages

    def enter(self, phase: str) -> None:
        """Say that the rank enters ``phase``; limits on its duration hang on this."""
        self.phase = phase
        step = self.state.step + (1 if phase in ("step", "first_step") else 0)
        self.channel.send(RankPhase(phase=phase, step=step, time=self.clock.time()))

    def _tell(
        self, work: StepWork, agreement: Agreement, norm: float, rate: float, seconds: float, valid: float | None
    ) -> None:
        layout = self.machine.layout
        message = RankStep(
            step=work.plan.step,
            loss=agreement.loss,
            grad_norm=norm,
            tokens=work.plan.tokens,
            seconds=seconds,
            lr=rate,
            workers=layout.world_size,
            ids=work.plan.samples_of_all(work.done) if layout.reads_data else [],
            incarnation=self.incarnation,
            valid_loss=valid,
            time=self.clock.time(),
            phases={**work.seconds, "other": max(0.0, seconds - sum(work.seconds.values()))},
        )
        self.channel.send(message)
        if layout.rank == 0:
            if self.writer is None:
                self.writer = ScalarWriter(self.job_folder, first_step=message.step)
            self.writer.write(message)

    def _report_guard(self, attempt: StepPlan, decision: Decision) -> None:
        """Put a bad gradient into the event log, once for the job."""
        if self.machine.layout.rank != 0:
            return
        action = Action.SAMPLES_SKIPPED if decision.verdict == Verdict.SKIP else Action.FAULT_DETECTED
        details = {"step": attempt.step, "verdict": decision.verdict.value, "ids": sorted(attempt.ids)}
        self.channel.send(
            RankNote(action=action.value, reason=decision.reason, details=details, time=self.clock.time())
        )

    def _say_done(self, why: str) -> None:
        self.enter("done")
        if self.writer is not None:
            self.writer.close()
        self.channel.send(RankDone(step=self.state.step, why=why, time=self.clock.time()))
