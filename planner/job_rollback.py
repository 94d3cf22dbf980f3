"""Loss spikes and non-finite losses: back to an earlier healthy checkpoint, past the data of the bad stretch.

Source: Acme, section 6.1. Restarting alone would meet the same data again. A second spike before the run is well past
the last bad stretch goes one checkpoint further back; after ``health.roll_backs`` of them the job is failed.
"""

from __future__ import annotations

from planner import job_faults
from planner.events import Action, JobState
from planner.job_record import FaultRecord, RollBack
from planner.job_turn import Turn
from planner.loss_watch import WINDOW, Spike
from planner.severity import Severity

CURE = "roll_back"
MARGIN = 1
"""Steps before the first bad one that a checkpoint must have: the step before may be bad and not yet show."""


def spiked(turn: Turn, spike: Spike) -> None:
    """The loss left its band and stays outside."""
    job = turn.job
    if job.stage != "running":
        return
    turn.tell(Action.LOSS_SPIKE, reason=spike.reason, step=spike.first, last=spike.last)
    if job.settings.health.on_loss_spike == "tell":
        return
    rank = job.ranks[0].origin
    index, occurred, _ = job.firing or (None, None, 0)
    job.firing = None
    if job.fault is not None:
        job.history.append(job.fault)
    job.fault = FaultRecord(
        detected=turn.now, occurred=occurred, step=spike.first, rank=rank, kind="loss_spike", injected=index,
        severity=Severity.SEV2.value, cause="loss_spike", reason=spike.reason,
    )  # fmt: skip
    turn.move(JobState.HEALING, f"loss spike at step {spike.first}")
    turn.tell(Action.FAULT_DETECTED, reason=spike.reason, rank=rank, step=spike.first, kind="loss_spike",
              method="online_statistics")  # fmt: skip
    turn.tell(Action.SEVERITY_DECIDED, reason=spike.reason, severity=Severity.SEV2.value, cause="loss_spike", rank=rank,
              step=spike.first)  # fmt: skip
    _plan(turn, spike.first, spike.last)
    job_faults.stop_ranks(turn, "heal", 0.0)


def plan_if_not_finite(turn: Turn) -> bool:
    """Ranks that gave up on a loss or gradient that is not finite: the fault at hand is cured by a roll-back too.

    Returns whether it is such a fault; all ranks are to be ended then.
    """
    job, fault = turn.job, turn.job.fault
    if fault is None or not any(seen.exception_type == "NonFiniteError" for seen in fault.seen):
        return False
    if fault.cure == CURE:
        return True
    seen = next(seen for seen in fault.seen if seen.exception_type == "NonFiniteError")
    fault.severity, fault.cause, fault.reason = Severity.SEV2.value, "nan_loss", seen.message[:300]
    fault.rank, fault.step = (fault.rank, fault.step) if fault.injected is not None else (seen.origin, seen.step)
    turn.tell(Action.SEVERITY_DECIDED, reason=fault.reason, severity=fault.severity, cause=fault.cause,
              rank=seen.origin, node=seen.node, step=seen.step)  # fmt: skip
    bad = max(seen.step, job.step + 1)
    _plan(turn, bad, bad)
    return True


def resumed(turn: Turn, step: int, skip_to: int) -> None:
    """The shell chose a checkpoint for the first incarnation after the roll-back."""
    back = turn.job.roll_back
    if back is not None and turn.job.incarnation == back.incarnation:
        back.resumed, back.skip_to = step, max(back.skip_to, skip_to)


def _plan(turn: Turn, first: int, last: int) -> None:
    """Choose how far to go back, or give the job up."""
    job = turn.job
    assert job.fault is not None
    before = job.roll_back
    again = before is not None and first <= before.beyond + WINDOW
    count = before.count + 1 if before is not None and again else 1
    limit = job.settings.health.roll_backs
    job.fault.cure = CURE
    if count > limit:
        job.given_up = f"{job.fault.cause} again after {limit} roll-backs: {job.fault.reason}"
        turn.tell(Action.DECISION, reason=job.given_up, cure="give_up", rank=job.fault.rank)
        return
    at_most = max(0, first - 1 - MARGIN)
    if before is not None and again:
        at_most, last = min(at_most, before.at_most), max(last, before.beyond)
    job.roll_back = RollBack(
        incarnation=job.incarnation + 1, at_most=at_most, older=count - 1, beyond=last, count=count,
        anchor=(before.resumed, before.skip_to) if before is not None else (0, 0),
    )  # fmt: skip
    reason = (f"roll-back {count} of {limit}: to a checkpoint of step {at_most} or before, without the data up to step "
              f"{last}")  # fmt: skip
    turn.tell(Action.DECISION, reason=reason, cure=CURE, rank=job.fault.rank)
    turn.tell(Action.ROLLED_BACK, reason=reason, step=first, at_most=at_most, beyond=last, count=count)
