"""SEV3 retry in place, failing which SEV2 restart the process, failing which SEV1 isolate the node and re-plan.

A budget is spent by faults and given back by *progress*: a step that no earlier incarnation had completed. Time
gives nothing back (a healthy job is never torn down by old faults, a crashing one never lives on by waiting), and
neither do steps that are only done again after a roll-back. The decision is pure; the supervisor carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from planner.severity import Severity


class Cure(StrEnum):
    """What is done about a fault."""

    RETRY = "retry"  #: all ranks live: leave the collective, re-form with the same ranks, go on with the step
    RESTART = "restart"  #: end the faulty process; survivors heal in place, a new process takes its slot
    ISOLATE = "isolate"  #: the same, but the node is cordoned and the cluster re-planned
    RESTART_ALL = "restart_all"  #: nobody can heal in place: start all ranks from the newest state
    GIVE_UP = "give_up"  #: end the job as failed


@dataclass(frozen=True)
class Limits:
    """How often each cure is tried before the next one."""

    retries: int = 3
    """SEV3 retries in place without progress, per job."""
    restarts: int = 2
    """SEV2 restarts without progress, per node: more and the node is isolated."""
    incarnations: int = 3
    """Starts of all ranks without progress before the job is given up (``health.incarnations_without_progress``)."""


@dataclass(frozen=True)
class State:
    """What has been spent since the last progress."""

    best_step: int = 0
    """Highest step ever completed."""
    retries: int = 0
    restarts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """Restarts per node."""
    starts: int = 0
    """Starts of all ranks."""
    last_cause: str = ""
    roots: tuple[str, ...] = ()
    """Roots of class STOP seen since the last progress: one that comes back ends the job."""

    def to_json(self) -> dict[str, Any]:
        """For the job's record, so that a new coordinator goes on counting where the old one stopped."""
        return {
            "best_step": self.best_step,
            "retries": self.retries,
            "restarts": dict(self.restarts),
            "starts": self.starts,
            "last_cause": self.last_cause,
            "roots": list(self.roots),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> State:
        """The inverse of :meth:`to_json`; missing keys take their defaults."""
        known = {key: value[key] for key in ("best_step", "retries", "starts", "last_cause") if key in value}
        return cls(
            **known, roots=tuple(value.get("roots", ())), restarts=MappingProxyType(dict(value.get("restarts", {})))
        )


@dataclass(frozen=True, kw_only=True)
class FaultSeen:
    """One fault, its root known."""

    severity: Severity
    cause: str
    """Name of the row and what was seen."""
    root: str = ""
    """Name of the row: a class of failure."""
    final: bool = False
    """Nothing can change by itself (bad input): a STOP at the first sight."""
    node: str
    process_alive: bool
    """Whether the faulty process still runs and could take part in a retry."""
    can_heal: bool = True
    """Whether survivors hold all state among them, so that they can re-form in place."""
    other_nodes: bool = True
    """Whether the job could run without this node; if not, only a true SEV1 isolates it."""


@dataclass(frozen=True)
class StepCompleted:
    """All ranks completed this step."""

    step: int


@dataclass(frozen=True)
class RanksStarted:
    """All ranks are about to be started, from a checkpoint or from the seed."""


@dataclass(frozen=True)
class HealFailed:
    """Re-forming in place did not come to an end, or failed again."""

    cause: str


Event = FaultSeen | StepCompleted | RanksStarted | HealFailed


@dataclass(frozen=True)
class Decision:
    """What to do, why, and the state to remember. ``cure`` is None where there is nothing to do."""

    cure: Cure | None
    reason: str
    state: State


def decide(state: State, event: Event, limits: Limits = Limits()) -> Decision:
    """The next cure. Pure: nothing depends on time, so no clock is needed."""
    if isinstance(event, StepCompleted):
        return _progress(state, event)
    if isinstance(event, RanksStarted):
        return Decision(None, "ranks start", replace(state, starts=state.starts + 1))
    if isinstance(event, HealFailed):
        return _restart_all(replace(state, last_cause=event.cause), limits, f"healing in place failed: {event.cause}")
    state = replace(state, last_cause=event.cause)
    if event.severity == Severity.STOP:
        if event.final or event.root in state.roots:
            why = "" if event.final else ", for the second time without a step of progress"
            return Decision(Cure.GIVE_UP, f"STOP: restarting cannot help: {event.cause}{why}", state)
        # One sight proves little: bad data may be another rank's next time, a file may come late.
        state = replace(state, roots=(*state.roots, event.root))
    if event.severity == Severity.SEV3 and event.process_alive and event.can_heal and state.retries < limits.retries:
        spent = replace(state, retries=state.retries + 1)
        return Decision(Cure.RETRY, f"SEV3: retry {spent.retries} of {limits.retries} in place: {event.cause}", spent)
    return _restart_or_isolate(state, event, limits)


def _progress(state: State, event: StepCompleted) -> Decision:
    if event.step <= state.best_step:
        return Decision(None, f"step {event.step} was completed before", state)
    return Decision(None, f"step {event.step} is new", State(best_step=event.step))


def _restart_or_isolate(state: State, event: FaultSeen, limits: Limits) -> Decision:
    if not event.can_heal and state.starts >= limits.incarnations:
        return _restart_all(state, limits, "")
    before = state.restarts.get(event.node, 0)
    is_node_fault = event.severity == Severity.SEV1
    count = before if is_node_fault else before + 1
    spent = replace(state, restarts=MappingProxyType({**state.restarts, event.node: count}))
    if is_node_fault or (count > limits.restarts and event.other_nodes):
        why = "SEV1" if is_node_fault else f"SEV1 after {limits.restarts} restarts without progress"
        return Decision(Cure.ISOLATE, f"{why}: isolate {event.node}: {event.cause}", spent)
    label = (
        "SEV2"
        if event.severity == Severity.SEV2
        else "STOP if it comes back before a step of progress, now SEV2"
        if (event.severity == Severity.STOP)
        else "SEV2 (a retry is not possible or did not help)"
    )
    if event.can_heal:
        return Decision(Cure.RESTART, f"{label}: restart on {event.node}, survivors go on: {event.cause}", spent)
    return _restart_all(spent, limits, f"{label}: no survivor holds the state: {event.cause}")


def _restart_all(state: State, limits: Limits, reason: str) -> Decision:
    if state.starts >= limits.incarnations:
        return Decision(
            Cure.GIVE_UP,
            f"{state.starts} starts without a step of progress beyond step {state.best_step}; root cause: "
            f"{state.last_cause}",
            state,
        )
    return Decision(Cure.RESTART_ALL, reason, state)
