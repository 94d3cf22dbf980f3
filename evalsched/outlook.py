"""What a conductor's runs mean to others: the backlog that the allocator prices, and the status."""

from __future__ import annotations

from typing import Any

from evalsched.conductor import Conductor
from planner.events import TrialState
from planner.packing import urgency


def backlog(conductor: Conductor) -> tuple[float, int]:
    """(slot-seconds that are not answered, shards that wait or are out)."""
    active = [run for run in conductor.runs.values() if not run.over]
    shards = sum(len(run.waiting) for run in active) + len({one.worker for one in conductor.out.values()})
    return sum(run.slot_seconds for run in active), shards


def reports(conductor: Conductor, now: float) -> list[dict[str, Any]]:
    """What waits per report, most urgent first, as the lending plan wants to know it (docs/allocator.md)."""
    active = [run for run in conductor.runs.values() if not run.over]
    typical = max((run.slot_seconds for run in active), default=0.0) or 1.0
    active.sort(key=lambda run: (-urgency(run.outline(), now), run.id))
    return [
        {
            "name": run.id,
            "slot_seconds": run.slot_seconds if run.prepared else typical,
            "tail_seconds": sum(run.tails.values()),
            "longest_seconds": run.longest,
            "waited_seconds": max(0.0, now - run.spec.created),
        }
        | ({"job": f"job:{run.spec.job}"} if run.spec.job else {})
        for run in active
    ]


def load_seconds(conductor: Conductor) -> float | None:
    """Until a slot without an engine answers its first request, by the newest run's model; None: not known."""
    known = [run for run in conductor.runs.values() if run.predictor is not None]
    newest = max(known, key=lambda run: run.spec.created, default=None)
    return newest.predictor.load_estimate().value if newest is not None and newest.predictor else None


def resident(conductor: Conductor) -> int:
    """Workers whose engine is loaded."""
    return sum(1 for name in conductor.live() if conductor.roster.records[name].facts.get("model"))


def status(conductor: Conductor) -> dict[str, Any]:
    """The ``evaluation`` part of ``planaria status``, in trials."""
    counts = {"queued": 0, "running": 0, "done": 0, "failed": 0}
    for run in conductor.runs.values():
        tasks = len(run.prepared.trials) if run.prepared else len(run.spec.settings.tasks)
        if run.state is TrialState.DONE:
            counts["failed"] += len(run.failed)
            counts["done"] += tasks - len(run.failed)
        elif run.state is TrialState.FAILED:
            counts["failed"] += tasks
        else:
            counts["queued" if run.state in (TrialState.QUEUED, TrialState.RECORDING) else "running"] += tasks
    return counts | {
        "workers": len(conductor.live()),
        "shards_out": len(conductor.out),
        "calibration": conductor.estimates.calibration(),
    }
