"""The loop of one rank: draw, accumulate, reduce, agree, update, tell; validate and publish when it is time."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from planner.alignment import Alignment, Stage
from planner.clock import Clock, SystemClock
from planner.events import Action
from planner.messages import Persisted, RankDone, RankLeaving, RankNote, RankPhase, RankStep, Reform
from planner.pretrain_config import Phase, PretrainConfig
from pretrain import healing, parallel
from pretrain.channel import AgentMessage, Channel
from pretrain.checkpoint import Parts, SaveFailedError
from pretrain.collective import leave_collective
from pretrain.guard import Decision, NonFiniteError, Verdict, decide
from pretrain.metrics import ScalarWriter
from pretrain.optimizer import advance as set_rate
from pretrain.order import SampleOrder
from pretrain.parallel import Layout
from pretrain.reform import Facts, Reformer, on_leave
from pretrain.snapshots import Snapshots
from pretrain.state import TrainState, step_seed
from pretrain.step import Agreement, Machine, StepPlan, StepWork, plan
from pretrain.validation import Validation


class Checkpoints(Protocol):
    """Where the trainer's state goes; all calls are collective."""

    def save(self, state: TrainState, *, insist: bool = False) -> bool:
        """Make ``state`` and the live model durable; False where that failed and training may go on without.

        With ``insist`` it is tried again until it succeeds; raises when it failed too often in a row.
        """

    def settle(self) -> None:
        """Wait until what was saved last is published; raises where it cannot be."""

    def heard(self, message: Persisted) -> None:
        """Take a word of the node's persister (in the channel's thread)."""

    def hands_over(self) -> bool:
        """Whether the next save is a snapshot that the persister publishes (the same on all ranks)."""


KEPT_STEPS = 1000
"""Steps that a rank can say again: more than are completed until the cluster notices that nobody listens (10 s)."""
PART_SECONDS = 3.0
"""Longest wait of a rank that got SIGTERM for the order that lets the others go on without it."""


class StopRequest:
    """The wish to stop at the next step's end, set from a signal handler or the channel's thread."""

    def __init__(self) -> None:
        self._why: str | None = None
        self.warned = False
        """Whether this process was told to leave (SIGTERM)."""
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


@dataclass(frozen=True)
class Share:
    """What a replica runs of an attempt that is taken up again."""

    micro_batches: tuple[int, ...]
    forward_only: bool = False
    """The gradients are there already; only the losses are missing."""
    foreign: int = 0
    """How many of them were not this rank's when the attempt began."""


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

    traffic: Callable[[int], AbstractContextManager[None]] = field(default=lambda rank: contextlib.nullcontext())
    """Held while this rank's gradients want the network, so that copies for other nodes wait."""
    reformer: Reformer | None = None
    """What takes this rank into later incarnations; None: whatever breaks a collective ends the rank."""
    on_reformed: Callable[[Layout, int], None] | None = None
    """Called (collectively) when the groups of a new incarnation are in place, with the layout and its number."""
    parts: Parts | None = None
    """The live objects as checkpoints know them, to hand state to ranks that join."""
    attempt: int = 0
    """Attempts at steps so far; equal on all ranks at the same moment of the run."""
    stage: Stage = Stage.GRADIENT
    """Part of the attempt that is under way."""
    work: StepWork | None = None
    """The attempt in hand."""
    share: Share | None = None
    """What this replica runs of the attempt in hand where that is not the plan's share (after a re-form)."""
    facts: Facts = field(default_factory=Facts)
    retries: int = 0
    skips: int = 0
    told: RankStep | None = None
    """The last step said."""
    history: deque[RankStep] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """The last steps said."""
    started: float = 0.0
    """Monotonic time at which the step in hand began."""
    catching_up: bool = False
    """While it goes through stages whose results its peers know, it begins nothing of its own."""
    settled: bool = False
    """Whether this process has completed a step in the present incarnation."""

    def run(self) -> str:
        """Train until all steps are done or a stop is agreed; returns why, after saying ``done``.

        Raises:
            NonFiniteError: the guard gives up (:mod:`pretrain.guard`).
            DismissedError: a new incarnation does without this rank.
        """
        trouble: tuple[Exception, str | None, str] | None = None
        while True:
            try:
                if trouble is not None:
                    healing.heal(self, *trouble)
                    trouble = None
                while (why := self.advance()) is None:
                    pass
                return why
            except Exception as error:
                if self.reformer is None or not self.reformer.heals(error, self.machine.membership):
                    raise
                # The traceback holds the old groups; they must be able to go.
                place, text = healing.place_of(error), "".join(traceback.format_exception(error))
                trouble = error.with_traceback(None), place, text

    def on_agent(self, message: AgentMessage) -> None:
        """Take a message of the agent (called in the channel's thread)."""
        if message.kind == "stop":
            self.stop.ask(message.why)
        elif isinstance(message, Persisted):
            self.checkpoints.heard(message)
        elif self.reformer is None:
            return
        elif isinstance(message, Reform):
            self.reformer.orders.put(message)
            if not message.at_boundary and message.incarnation > self.machine.membership.incarnation:
                leave_collective(self.machine.membership, message.reason)
        else:
            on_leave(message, self.reformer.orders, self.machine.membership, self.machine.layout)

    def told_to_leave(self) -> None:
        """SIGTERM came (called in a thread of its own). The job may go on without this rank: that is the supervisor's
        to say. If it says nothing in time, all ranks publish at the step's end and leave."""
        if self.reformer is not None and not self.stop.warned:
            self.stop.warned = True
            self.channel.send(RankLeaving(step=self.state.step, time=self.clock.time()))
            if self.reformer.released(PART_SECONDS):
                return
        if self.stop.why is None:
            self.stop.ask("preempted")

    # ------------------------------------------------------------ the stages of a step

    def advance(self) -> str | None:
        """Complete the stage in hand, from memory where its collective completed on a peer; returns why all is over.

        Whatever raises leaves the stage as it is, so that it can be taken up again by other ranks.
        """
        if self.stage == Stage.GRADIENT:
            if self.state.step >= self.config.steps:
                self.stage = Stage.LEAVE
            else:
                self._gradient()
        elif self.stage == Stage.NORM:
            self._norm_and_update()
        elif self.stage == Stage.VALIDATE:
            self._validate_and_tell()
        elif self.stage == Stage.SAVE:
            self._save_and_turn()
        else:
            return self._leave()
        return None

    def _gradient(self) -> None:
        work = self.work if self.work is not None else self.start_step()
        agreement = self.facts.agreements.get(self.attempt)
        if agreement is None:
            share = self.share or Share(work.plan.shares[self.machine.layout.data_rank])
            began = self.clock.monotonic()
            work.accumulate(share.micro_batches, forward_only=share.forward_only)
            if share.foreign:
                part = share.foreign / len(share.micro_batches)
                redo = work.seconds.get("redo", 0.0)
                work.seconds["redo"] = redo + part * (self.clock.monotonic() - began)
            with self.traffic(self.machine.layout.rank):
                work.reduce()
            agreement = work.agree(self.stop.why, regroup=self._wants_regroup())
        self.facts.agreements[self.attempt] = agreement
        self.share = None
        self.stage = Stage.NORM

    def _wants_regroup(self) -> bool:
        if self.reformer is None:
            return False
        order = self.reformer.orders.newer_than(self.incarnation)
        return order is not None and order.at_boundary

    def _norm_and_update(self) -> None:
        """Judge the gradient and act on it; but for the norm itself this is the same on every rank without a word."""
        work = self.work
        assert work is not None
        agreement = self.facts.agreements[self.attempt]
        rate = set_rate(self.schedule, work.plan.step)
        norm = self.facts.norms.get(self.attempt)
        if norm is None:
            norm = work.gradient_norm()
            self.facts.norms[self.attempt] = norm
        else:
            work.prepare()
        policy = self.config.health.on_bad_gradient
        decision = decide(policy, agreement.loss, norm, retries=self.retries, skips=self.skips)
        if decision.verdict == Verdict.APPLY:
            self._apply(work, agreement, norm, rate)
            return
        self._report_guard(work.plan, decision)
        if decision.verdict == Verdict.RETRY:
            self.retries += 1
        elif decision.verdict == Verdict.SKIP:
            self.retries, self.skips = 0, self.skips + 1
            self.state.consumed_samples += len(work.plan.ids)
            self.state.skipped.extend(work.plan.ids)
        else:
            raise NonFiniteError(f"step {work.plan.step}: {decision.reason}")
        self._next_attempt()

    def _apply(self, work: StepWork, agreement: Agreement, norm: float, rate: float) -> None:
        if self.snapshots is not None:
            self.snapshots.before_update()
        work.update(norm)
        self.retries = self.skips = 0
        self.state.step = work.plan.step
        self.state.consumed_samples += len(work.plan.ids)
        if self.snapshots is not None:
            self.state.incarnation = self.incarnation
            if not (self._save_due(agreement) and self.checkpoints.hands_over()):  # or it is copied twice
                self.snapshots.after_step(self.state)
        seconds = self.clock.monotonic() - self.started
        self.told = self._message(work, agreement, norm, rate, seconds)
        self.stage = Stage.VALIDATE

    def _validate_and_tell(self) -> None:
        step = self.state.step
        if step not in self.facts.valid:
            self.facts.valid[step] = self._validate() if self._validates() else None
        if self.told is not None and self.told.step == step:
            self.told = self.told.model_copy(update={"valid_loss": self.facts.valid[step]})
            self.history.append(self.told)
            self.tell(self.told)
        self.settled = True
        self.stage = Stage.SAVE

    def _save_and_turn(self) -> None:
        """Save where that is due, then begin the next attempt, stop, or re-form, as was agreed."""
        agreement = self.facts.agreements[self.attempt]
        if self._save_due(agreement) and self.state.step < self.config.steps and agreement.stop is None:
            self._save()
        if agreement.stop is not None:
            self.stage = Stage.LEAVE
            return
        self._next_attempt()
        if agreement.regroup and agreement.regroup == self.incarnation:
            healing.turn(self)

    def _save_due(self, agreement: Agreement) -> bool:
        """Whether the state just reached is saved, now or (the last one) on leaving."""
        step = self.state.step
        due = step % self.config.checkpoint.every_steps == 0 or self.retry.due(step)
        return due or step == self.config.steps or agreement.stop is not None

    def _next_attempt(self) -> None:
        self.attempt += 1
        self.stage, self.work, self.share = Stage.GRADIENT, None, None
        self.facts.forget(self.attempt, self.state.step)

    def _leave(self) -> str:
        agreement = self.facts.agreements.get(self.attempt)
        why = (agreement.stop if agreement is not None else None) or "completed"
        if self.state.step > self.saved_step:
            self._save(insist=True)
        self._settle()
        if self.snapshots is not None:
            self.snapshots.close(completed=why == "completed")
        self._say_done(why)
        return why

    def start_step(self) -> StepWork:
        """A fresh attempt at the next step: its plan, and empty gradient buffers."""
        self.enter("step" if self.settled else "first_step")
        self.started = self.clock.monotonic()
        step = self.state.step + 1
        parallel.seed_generators(step_seed(self.config.seed, step))
        ids = self.order.batch(self.state.consumed_samples, self.config.batch.global_)
        self.work = StepWork(
            self.machine,
            plan(step, ids, self.config.batch.micro, self.config.model.seq_length, self.machine.layout.data),
        )
        self.work.own = self.work.plan.shares[self.machine.layout.data_rank]
        self.work.begin()
        return self.work

    def take_up(self, alignment: Alignment) -> list[int]:
        """Go on with the attempt in hand as agreed after a re-form; returns the micro-batches it runs for others."""
        if alignment.lead[1] != Stage.GRADIENT or not alignment.todo:
            return []
        replica = self.machine.layout.data_rank
        work = self.work if self.work is not None else self.start_step()
        work.take_up(replica in alignment.keep, alignment.finished_buckets)
        todo = alignment.todo[replica]
        foreign = [micro_batch for micro_batch in todo if micro_batch not in work.own]
        self.share = Share(todo, alignment.forward_only, len(foreign))
        return foreign

    # ------------------------------------------------------------ validation and checkpoints

    def _validates(self) -> bool:
        every = self.config.valid_every_steps or self.config.checkpoint.every_steps
        return self.validation is not None and (self.state.step % every == 0 or self.state.step == self.config.steps)

    def _validate(self) -> float | None:
        assert self.validation is not None
        self.enter("validate")
        self.machine.injector.fire(Phase.EVALUATE, self.state.step)
        return self.validation.loss(self.machine.chunk, self.machine.layout, self.machine.membership.check)

    def _save(self, *, insist: bool = False) -> None:
        """Save now; without ``insist`` a failed save is tried again after a few more steps."""
        self.enter("save")
        self.state.incarnation = self.incarnation
        saved = self.facts.saved.get(self.state.step)
        if saved is None or (insist and not saved):
            saved = self.checkpoints.save(self.state, insist=insist)
            if not saved:
                self.machine.membership.check()  # it failed because peers are gone: that is no failure of storage
            self.facts.saved[self.state.step] = saved
        if saved:
            self.saved_step = self.state.step
            self.retry = SaveRetry()
        else:
            self.retry = self.retry.after_failure(self.state.step)

    def _settle(self) -> None:
        """Leave nothing behind that is not published: what cannot be is saved anew, with all its allowance."""
        if self.phase != "save":
            self.enter("save")
        try:
            self.checkpoints.settle()
        except SaveFailedError:
            self.machine.membership.check()
            self.facts.saved.pop(self.state.step, None)
            self._save(insist=True)

    # ------------------------------------------------------------ messages

    def enter(self, phase: str) -> None:
        """Say that the rank enters ``phase``; limits on its duration hang on this."""
        self.phase = phase
        step = self.state.step + (1 if phase in ("step", "first_step") else 0)
        self.channel.send(RankPhase(phase=phase, step=step, time=self.clock.time()))

    def _message(self, work: StepWork, agreement: Agreement, norm: float, rate: float, seconds: float) -> RankStep:
        layout = self.machine.layout
        known = sum(spent for part, spent in work.seconds.items() if part != "redo")
        return RankStep(
            step=work.plan.step,
            loss=agreement.loss,
            grad_norm=norm,
            tokens=work.plan.tokens,
            seconds=seconds,
            lr=rate,
            workers=layout.world_size,
            ids=work.plan.samples_of_all(work.done) if layout.reads_data else [],
            batch=list(work.plan.ids),
            incarnation=self.incarnation,
            time=self.clock.time(),
            phases={**work.seconds, "other": max(0.0, seconds - known)},
        )

    def tell_again(self, after: int) -> None:
        """Say the steps after ``after`` again, once for all: whoever was to say them may be gone."""
        if self.machine.layout.rank == 0:
            for message in [one for one in self.history if one.step > after]:
                self.tell(message.model_copy(update={"incarnation": self.incarnation}))

    def tell(self, message: RankStep) -> None:
        """Say a completed step."""
        if self.machine.layout.rank != 0:
            self.channel.send(message.model_copy(update={"batch": []}))
            return
        self.channel.send(message)
        unheard = [one for one in self.channel.unheard() if isinstance(one, RankStep)]
        self.state.unheard = [one.model_dump(mode="json") | {"job": self.job_folder.name} for one in unheard]
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
