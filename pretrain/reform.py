"""Re-forming in place: from a torn incarnation to the next one without leaving the process.

:class:`Reformer` does what no other part of a rank does: wait for the supervisor's order, join the next
incarnation, swap the groups inside the live objects, and tell the others what this rank still holds. What is to be
done with what they hold is :func:`planner.alignment.align`; the trainer carries it out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import distributed as dist

from planner.alignment import Standing
from planner.errors import ExitCode, PlanariaError, WorkFailedError
from planner.messages import LeaveCollective, Persisted, RankSpec, Reform, StopAtBoundary
from planner.rank_map import Grid
from planner.severity import name_exception
from pretrain import parallel, regroup
from pretrain.channel import AgentMessage, Channel
from pretrain.collective import CollectiveLeftError, Membership, collective_of, leave_collective
from pretrain.parallel import Layout
from pretrain.step import Agreement, Machine

ORDER_SECONDS = 180.0
"""Longest wait of a rank that has left its collective for the order to re-form; the supervisor is sooner, or gone."""
JOIN_SECONDS = 60.0
"""Longest wait for the other ranks of the new incarnation."""
PEER_TROUBLE = frozenset({"connection_error", "network_error", "nccl_timeout", "nccl_remote_error"})
"""Classes of errors that say something about a peer or the link to it, not about this rank."""


class DismissedError(PlanariaError):
    """The new incarnation does without this rank: it leaves in peace."""

    exit_code = ExitCode.DONE


class NobodyReformedError(WorkFailedError):
    """No order to re-form came in time."""


class Orders:
    """The supervisor's orders to re-form, set in the channel's thread and awaited by the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._orders: list[Reform] = []
        self._broken = 0
        self._dismissed = False

    def put(self, order: Reform) -> None:
        """Take an order; one that is no newer than the last is dropped."""
        with self._changed:
            if not self._orders or order.incarnation > self._orders[-1].incarnation:
                self._orders.append(order)
            self._changed.notify_all()

    def break_off(self, incarnation: int) -> None:
        """This incarnation, and all before it, are broken: whoever has yet to join it must not wait for anybody."""
        self._broken = max(self._broken, incarnation)

    def broken(self, incarnation: int) -> bool:
        """Whether ``incarnation`` is known to be broken before it is joined."""
        return incarnation <= self._broken

    def stop(self) -> None:
        """Whoever waits for an order waits in vain."""
        with self._changed:
            self._dismissed = True
            self._changed.notify_all()

    def newer_than(self, incarnation: int) -> Reform | None:
        """The newest order, if it forms an incarnation after ``incarnation``."""
        with self._changed:
            return self._orders[-1] if self._orders and self._orders[-1].incarnation > incarnation else None

    def wait_until(self, holds: Callable[[Reform], bool], seconds: float) -> bool:
        """Wait until ``holds`` is true of the newest order, at most ``seconds``; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._orders) and holds(self._orders[-1]), seconds)

    def wait(self, incarnation: int, seconds: float | None) -> list[Reform]:
        """All orders to form incarnations after ``incarnation``, oldest first. The last one counts; but each names
        ranks as the one before it left them, so that a rank must follow all their renamings.

        Raises:
            NobodyReformedError: none came within ``seconds``.
            DismissedError: this rank was told to stop instead.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._dismissed or self.newer_than(incarnation) is not None, seconds)
            if self._dismissed:
                raise DismissedError("told to stop while waiting to re-form")
            found = [order for order in self._orders if order.incarnation > incarnation]
            if not found:
                raise NobodyReformedError(f"no order to re-form after incarnation {incarnation} within {seconds} s")
            self._orders = found[-1:]
            return found


@dataclass
class Facts:
    """Results of collectives that completed on this rank, so that ranks on which they did not can do without."""

    agreements: dict[int, Agreement] = field(default_factory=dict)
    """By attempt."""
    norms: dict[int, float] = field(default_factory=dict)
    """By attempt."""
    valid: dict[int, float | None] = field(default_factory=dict)
    """Held-out loss by step; None where none was due."""
    saved: dict[int, bool] = field(default_factory=dict)
    """Whether the save succeeded, by step."""

    def merge(self, other: Facts) -> None:
        """Learn what ``other`` knows."""
        self.agreements |= other.agreements
        self.norms |= other.norms
        self.valid |= other.valid
        self.saved |= other.saved

    def forget(self, attempt: int, step: int) -> None:
        """Drop what is older than one attempt and one step ago; survivors are never further apart."""
        for by_attempt in (self.agreements, self.norms):
            for key in [key for key in by_attempt if key < attempt - 1]:
                del by_attempt[key]
        for by_step in (self.valid, self.saved):
            for key in [key for key in by_step if key < step - 1]:
                del by_step[key]


@dataclass(frozen=True)
class Account:
    """What a rank tells the others when it joins: where it stands, and what it knows."""

    rank: int
    standing: Standing
    facts: Facts
    data_digest: str


@dataclass
class Reformer:
    """Takes one rank from incarnation to incarnation."""

    spec: RankSpec
    orders: Orders
    installed: regroup.Groups
    """The groups that the live objects hold."""
    name: int
    """This rank's number in the present incarnation, or the name under which it waits to join."""
    followed: int = 0
    """Incarnation of the last order that was followed."""

    def heals(self, error: BaseException, membership: Membership) -> bool:
        """Whether ``error`` means that peers are gone or the collective was left, so that this rank can go on."""
        if not isinstance(error, Exception) or isinstance(error, DismissedError | NobodyReformedError):
            return False
        if membership.left.is_set() or isinstance(error, CollectiveLeftError | dist.DistError):
            return True
        return collective_of(error) is not None or name_exception(type(error).__name__, str(error)) in PEER_TROUBLE

    def await_order(self, incarnation: int, seconds: float | None = ORDER_SECONDS) -> Reform:
        """Wait for the order that takes this rank into a later incarnation.

        Raises:
            DismissedError: the new incarnation does without this rank.
            NobodyReformedError: no order came.
        """
        while True:
            for order in self.orders.wait(incarnation, seconds):
                number = order.ranks.get(self.name)
                if number is None:
                    raise DismissedError(f"incarnation {order.incarnation} does without rank {self.name}")
                self.followed = incarnation = order.incarnation
                self.name = number
            if self.name < order.world_size:
                return order

    def released(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for an order that does without this rank; whether one came (any thread)."""
        return self.orders.wait_until(self._without_me, seconds)

    def _without_me(self, newest: Reform) -> bool:
        return newest.incarnation > self.followed and self.name not in newest.ranks

    def layout_of(self, order: Reform) -> Layout:
        """This rank's coordinates in the incarnation of ``order``."""
        settings = self.spec.config.parallel
        return parallel.layout(self.name, order.world_size, settings.tensor, settings.pipeline)

    def connect(self, order: Reform, layout: Layout, membership: Membership) -> None:
        """Drop the old groups, join the store, build the new groups; breaks off as soon as the incarnation is left.

        Raises:
            CollectiveLeftError: it was left meanwhile.
        """
        parallel.leave()
        if self.orders.broken(order.incarnation):
            leave_collective(membership, "the incarnation broke before it was joined")
        with membership.joining():
            parallel.join(
                layout,
                store_host=order.store_host,
                store_port=order.store_port,
                prefix=f"{self.spec.job}/{order.incarnation}",
                bind_address=self.spec.bind_address,
                store_seconds=JOIN_SECONDS,
            )

    def swap(self, machine: Machine, *more: object) -> None:
        """Put the present groups into the live objects."""
        present = regroup.present()
        regroup.swap([machine.chunk, machine.optimizer, *more], self.installed, present)
        regroup.resize(machine.chunk)
        self.installed = present


def exchange(own: Account) -> list[Account]:
    """Everybody's account, in rank order (collective)."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told


def on_leave(message: LeaveCollective, orders: Orders, membership: Membership, layout: Layout) -> None:
    """Act on the agent's word that peers are broken (in the channel's thread)."""
    orders.break_off(message.incarnation)
    if message.incarnation < membership.incarnation:
        return
    if message.incarnation > membership.incarnation:
        # The incarnation that is to come is broken before this rank is part of it: the present one is no more use.
        leave_collective(membership, message.reason)
        return
    grid = Grid(layout.tensor, layout.pipeline, layout.data)
    broken = {grid.replica(rank) for rank in message.ranks if 0 <= rank < grid.world}
    defer = bool(message.ranks) and layout.data_rank not in broken
    leave_collective(membership, message.reason, defer=defer)


class Waiting:
    """The channel's handler of a rank that waits to join and then joins."""

    def __init__(self, orders: Orders, name: int, channel: Channel) -> None:
        self._orders = orders
        self._name = name
        self._channel = channel
        self._joining: tuple[Membership, Layout] | None = None
        self.kept: list[Persisted] = []
        """For the trainer that is to come."""

    def watch(self, membership: Membership, layout: Layout) -> None:
        """From now on a word to leave breaks the joining of ``membership`` off."""
        self._joining = membership, layout

    def on_agent(self, message: AgentMessage) -> None:
        """Take a message of the agent (in the channel's thread)."""
        if isinstance(message, Reform):
            if message.ranks.get(self._name) == self._name >= message.world_size:
                # It goes on waiting; an agent that comes back knows it under the new incarnation.
                self._channel.rename(message.incarnation, self._name)
            self._orders.put(message)
        elif isinstance(message, StopAtBoundary):
            self._orders.stop()
        elif isinstance(message, Persisted):
            self.kept.append(message)
        elif self._joining is not None:
            on_leave(message, self._orders, *self._joining)
