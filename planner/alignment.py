"""Where survivors of a fault go on: what each still holds, made into one plan that all of them compute alike.

Survivors are at most one collective apart: a collective that completed on one was entered by all. A *position* is
``(attempt, stage)``: attempts at steps are counted through, and each goes through the stages gradient, norm,
validate, save. Who is behind the leaders catches up without any collective, since the leaders know every result
that it lacks
(loss, norm, validation loss). What is left to agree on is the attempt whose gradient nobody has finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from planner.microbatches import Shares, reassign


class Stage(IntEnum):
    """Parts of an attempt at a step that end with a collective, in order."""

    GRADIENT = 0  #: micro-batches, reduction, agreement
    NORM = 1  #: norm of the gradient; then the update, which needs no collective
    VALIDATE = 2
    SAVE = 3
    LEAVE = 4  #: all steps are done or a stop is agreed: the last save


@dataclass(frozen=True)
class Standing:
    """Where one rank stands when it joins the new incarnation."""

    replica: int
    """Its data-parallel rank in the new incarnation."""
    newcomer: bool
    attempt: int = 0
    stage: Stage = Stage.GRADIENT
    done: tuple[int, ...] = ()
    """Micro-batches of this attempt whose whole gradient is in this rank's buffers, or was before the reduction."""
    own: tuple[int, ...] = ()
    """Micro-batches of this attempt that were this rank's to run when it left, done or not."""
    clean: bool = True
    """False where a micro-batch was interrupted, so that the buffers hold a part of it."""
    reduced: frozenset[int] = frozenset()
    """Buckets whose reduction completed on this rank."""
    buckets: int = 1

    @property
    def position(self) -> tuple[int, int]:
        """For comparing how far ranks are."""
        return self.attempt, int(self.stage)


@dataclass(frozen=True)
class Alignment:
    """What the new incarnation does first. Equal on all ranks."""

    lead: tuple[int, Stage]
    """The position that everybody is brought to (back from the norm to the gradient, where a newcomer joins there)."""
    keep: frozenset[int] = frozenset()
    """Replicas whose accumulated gradient is kept; the others begin the attempt with empty buffers."""
    todo: Shares = ()
    """Micro-batches that each replica has still to run; empty where no gradient is in hand."""
    finished_buckets: frozenset[int] = frozenset()
    """Buckets that all survivors had reduced; their values stay."""
    forward_only: bool = False
    """True where every bucket is finished, and only the losses of ``todo`` are missing."""


class MisalignedError(ValueError):
    """The survivors' states do not fit together; they cannot go on in place."""


def align(standings: Sequence[Standing], micro_batches: int) -> Alignment:
    """The plan for ranks with these standings, in new rank order.

    Raises:
        MisalignedError: nobody holds state, or the survivors are further apart than a single fault can put them.
    """
    holders = [standing for standing in standings if not standing.newcomer]
    if not holders:
        raise MisalignedError("no rank holds the training state")
    lead = max(standing.position for standing in holders)
    last = min(standing.position for standing in holders)
    if lead[0] - last[0] > 1:
        raise MisalignedError(f"survivors are at attempts {last[0]} to {lead[0]}, which no single fault explains")
    replicas = 1 + max(standing.replica for standing in standings)
    place = (lead[0], Stage(lead[1]))
    joined = any(standing.newcomer for standing in standings)
    if joined and lead[1] == Stage.NORM:
        place = (lead[0], Stage.GRADIENT)  # a newcomer has no gradient to take the norm of: do the step again
        return Alignment(place, todo=reassign(micro_batches, {}, replicas))
    if lead[1] != Stage.GRADIENT:
        return Alignment(place)
    finished = frozenset.intersection(*(s.reduced if s.position == lead else frozenset() for s in holders))
    if joined and any(standing.reduced for standing in holders):
        # A newcomer has no copy of a finished bucket, and survivors no clean one to begin from: do the step again.
        return Alignment(place, todo=reassign(micro_batches, {}, replicas))
    done = {}
    for replica in range(replicas):
        members = [standing for standing in standings if standing.replica == replica]
        if all(s.position == lead and s.clean and not s.newcomer and s.done == members[0].done for s in members):
            done[replica] = members[0].done
    buckets = {standing.buckets for standing in holders if standing.position == lead}
    return Alignment(
        lead=place,
        keep=frozenset(done),
        todo=reassign(micro_batches, done, replicas, {s.replica: s.own for s in holders if s.position == lead}),
        finished_buckets=finished,
        forward_only=bool(finished) and all(len(finished) == count for count in buckets),
    )
