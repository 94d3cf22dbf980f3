"""How a trainer goes from one incarnation into the next: after a fault, at a step's end, or as a newcomer.

The order of the collectives in :func:`enter` is the same for survivors and newcomers: join, exchange accounts, catch
up (no collective), exchange positions, hand state over, claim the checkpoint folder. Whatever breaks in between
leaves weights, optimizer and gradients of the survivors as they were, so the next attempt begins from the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from planner.alignment import Alignment, MisalignedError, Stage, Standing, align
from planner.errors import one_line
from planner.messages import RankLeft, RankReformed, Reform
from planner.pretrain_config import Phase
from planner.severity import name_exception
from pretrain import transfer
from pretrain.collective import Membership, collective_of, leave_collective
from pretrain.optimizer import build_optimizer
from pretrain.parallel import Layout
from pretrain.reform import PEER_TROUBLE, Account, exchange

if TYPE_CHECKING:
    from pretrain.trainer import Trainer


def heal(trainer: Trainer, error: Exception, collective: str | None, traceback: str = "") -> None:
    """Leave what is left of the collective, say so, wait for the order, and form the next incarnation.

    Raises:
        DismissedError: it does without this rank.
        NobodyReformedError: no order came.
    """
    assert trainer.reformer is not None
    membership = trainer.machine.membership
    own = not membership.left.is_set()
    if not membership.deferred:
        leave_collective(membership, one_line(error)[:300])
    trainer.channel.send(
        RankLeft(
            incarnation=membership.incarnation,
            step=trainer.state.step,
            phase=trainer.phase,
            own=own,
            type=type(error).__name__,
            message=one_line(error)[:1000],
            traceback=traceback[-4000:] if own else "",
            collective=collective,
            time=trainer.clock.time(),
        )
    )
    enter(trainer, trainer.reformer.await_order(membership.incarnation))


def place_of(error: Exception) -> str | None:
    """The collective that ``error`` came out of; transfers between pipeline stages raise where they are awaited."""
    found = collective_of(error)
    if found is None and not isinstance(error, dist.DistError):
        trouble = name_exception(type(error).__name__, str(error))
        found = "pipeline" if trouble in PEER_TROUBLE else None
    return found


def turn(trainer: Trainer) -> None:
    """All ranks agreed to re-form at this step's end: wait for the order where it is not here yet, and follow it."""
    if trainer.reformer is None or trainer.catching_up:
        return
    enter(trainer, trainer.reformer.await_order(trainer.incarnation))


def enter(trainer: Trainer, order: Reform, *, newcomer: bool = False) -> None:
    """Become part of the incarnation of ``order`` (collective over its ranks).

    Raises:
        MisalignedError: the survivors' states do not fit together.
        TransferError: a newcomer received something else than was sent.
    """
    reformer, machine = trainer.reformer, trainer.machine
    assert reformer is not None
    began = trainer.clock.monotonic()
    in_hand = trainer.work is not None
    trainer.phase = "reform"
    if not newcomer:
        # From here on the agent's words about the new incarnation count, also while it is being joined.
        machine.membership, machine.layout = Membership(order.incarnation), reformer.layout_of(order)
        trainer.incarnation = order.incarnation
        trainer.channel.rename(order.incarnation, machine.layout.rank)
        machine.injector.forget(order.fired_faults)
        machine.injector.fire(Phase.REFORM, trainer.state.step + 1)
        reformer.connect(order, machine.layout, machine.membership)
        reformer.swap(machine)
        if order.joining:
            # Megatron compares the parameter groups of all ranks when an optimizer is built, as newcomers do now.
            build_optimizer(trainer.config, [machine.chunk])
    accounts = exchange(account_of(trainer, newcomer))
    alignment = align([account.standing for account in accounts], trainer.config.batch.micro_batches)
    _catch_up(trainer, accounts, alignment, newcomer)
    received = _hand_over(trainer, accounts, newcomer, order.sources)
    if trainer.on_reformed is not None:
        trainer.on_reformed(machine.layout, order.incarnation)
    redone = trainer.take_up(alignment)
    seconds = trainer.clock.monotonic() - began
    if in_hand:
        trainer.started += seconds  # the step's own time does not count the repair
    _report(trainer, seconds, redone, newcomer, received, order.told_step)


# ---------------------------------------------------------------- who stands where


def account_of(trainer: Trainer, newcomer: bool) -> Account:
    """What this rank tells the others."""
    machine, work = trainer.machine, trainer.work
    standing = Standing(
        replica=machine.layout.data_rank, newcomer=newcomer, attempt=trainer.attempt, stage=trainer.stage
    )
    if work is not None and not newcomer:
        standing = Standing(
            replica=machine.layout.data_rank,
            newcomer=False,
            attempt=trainer.attempt,
            stage=trainer.stage,
            done=tuple(work.done) if work.clean else (),
            own=tuple(trainer.share.micro_batches if trainer.share is not None else work.own),
            clean=work.clean,
            reduced=work.reduced_for_good(),
            buckets=len(machine.chunk.bucket_groups),
        )
    return Account(machine.layout.rank, standing, trainer.facts, trainer.state.data_digest)


@dataclass(frozen=True)
class _Position:
    """Where a rank is after catching up; equal on all survivors, or they cannot go on together."""

    attempt: int
    stage: Stage
    step: int
    consumed_samples: int
    retries: int
    skips: int
    saved_step: int = field(compare=False)
    """What is saved is no part of the state; but all must decide alike when to save, so all take the same."""
    retry: Any = field(compare=False)


def _position(trainer: Trainer) -> _Position:
    state = trainer.state
    return _Position(
        trainer.attempt, trainer.stage, state.step, state.consumed_samples,
        trainer.retries, trainer.skips, trainer.saved_step, trainer.retry,
    )  # fmt: skip


def _catch_up(trainer: Trainer, accounts: Sequence[Account], alignment: Alignment, newcomer: bool) -> None:
    """Learn what the others know and go through the stages that it settles, without any collective."""
    digests = {account.data_digest for account in accounts}
    if len(digests) > 1:
        raise MisalignedError("the ranks see different training text; give every node the same files and tokenizer")
    for account in accounts:
        trainer.facts.merge(account.facts)
    if newcomer:
        return
    if trainer.stage == Stage.NORM and alignment.lead == (trainer.attempt, Stage.GRADIENT):
        trainer.facts.agreements.pop(trainer.attempt, None)
        trainer.facts.norms.pop(trainer.attempt, None)
        trainer.stage = Stage.GRADIENT
    trainer.catching_up = True
    try:
        while (trainer.attempt, trainer.stage) < alignment.lead:
            trainer.advance()
    finally:
        trainer.catching_up = False


def _hand_over(trainer: Trainer, accounts: Sequence[Account], newcomer: bool, sources: Mapping[int, int]) -> int:
    """Check that all survivors are at one position, and bring the newcomers there; returns bytes received."""
    own = None if newcomer else _position(trainer)
    positions: list[_Position | None] = [None] * len(accounts)
    dist.all_gather_object(positions, own)
    held = [position for position in positions if position is not None]
    if any(position != held[0] for position in held):
        raise MisalignedError(f"survivors are at different positions: {held}")
    trainer.saved_step, trainer.retry = held[0].saved_step, held[0].retry
    receivers = [account.rank for account in accounts if account.standing.newcomer]
    if not receivers:
        return 0
    layout, parts = trainer.machine.layout, trainer.parts
    assert parts is not None
    givers = {rank: _giver(rank, accounts, layout, sources) for rank in receivers}
    if newcomer:
        trainer.state, received = transfer.receive(parts, givers[layout.rank])
        _adopt(trainer, held[0])
        return received
    mine = [rank for rank, giver in givers.items() if giver == layout.rank]
    if mine:
        parts.state = trainer.state
        transfer.send(parts, mine)
    return 0


def _giver(receiver: int, accounts: Sequence[Account], layout: Layout, sources: Mapping[int, int]) -> int:
    """Who hands over its state: as ordered, if that rank holds it; else the first that does."""
    holders = [
        account.rank
        for account in accounts
        if not account.standing.newcomer and _same_place(receiver, account.rank, layout.tensor, layout.data)
    ]
    ordered = sources.get(receiver)
    return ordered if ordered in holders else min(holders)


def _same_place(one: int, other: int, tensor: int, data: int) -> bool:
    """Whether two ranks have the same tensor and pipeline coordinates."""
    return one % tensor == other % tensor and one // (tensor * data) == other // (tensor * data)


def _adopt(trainer: Trainer, position: _Position) -> None:
    trainer.attempt, trainer.stage = position.attempt, position.stage
    trainer.retries, trainer.skips = position.retries, position.skips


# ---------------------------------------------------------------- said


def _report(trainer: Trainer, seconds: float, redone: list[int], joined: bool, received: int, told_step: int) -> None:
    trainer.channel.send(
        RankReformed(
            incarnation=trainer.incarnation,
            step=trainer.state.step,
            joined=joined,
            redone=redone,
            seconds=seconds,
            state_bytes=received,
            time=trainer.clock.time(),
        )
    )
    trainer.enter("step" if trainer.settled else "first_step")
    trainer.tell_again(told_step)
