"""What the scheduler does when a job's evaluation falls behind; the decisions are :mod:`planner.coalescing`'s."""

from __future__ import annotations

from dataclasses import replace

from evalsched.conductor import Conductor
from evalsched.runs import Run, RunSpec
from planner.coalescing import WaitingReport, interval, lowered_limit, skips


class Arrears:
    """Skips checkpoints, or takes fewer documents of new ones, as each job's ``evaluate.behind`` says.

    Args:
        conductor: whose runs these are.
    """

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def tend(self, now: float) -> None:
        """Leave out what has to be left out now."""
        jobs = {run.spec.job for run in self._conductor.runs.values() if run.spec.behind == "skip" and not run.over}
        for job in jobs:
            if job is None:
                continue
            mine = self._of(job)
            waiting = [self._waiting(run, mine) for run in mine if not run.over]
            for chosen in skips(waiting, self._slots(), interval([run.spec.created for run in mine])):
                self._conductor.skip(self._conductor.runs[chosen.run], chosen.reason, now)

    def fitted(self, spec: RunSpec) -> RunSpec:
        """A new checkpoint's evaluation, with fewer documents where its job wants that and evaluation is behind."""
        if spec.behind != "limit" or spec.job is None:
            return spec
        mine = self._of(spec.job)
        known = max((run for run in mine if run.prepared is not None), key=lambda run: run.spec.created, default=None)
        if known is None or known.prepared is None or ((limit := spec.settings.limit) is not None and limit < 1):
            return spec
        documents = max((task.documents for task in known.prepared.recording.tasks), default=0)
        whole = documents if limit is None else int(limit)
        own = known.pace.total * max(1.0, whole / max(1, documents))
        left = sum(run.slot_seconds for run in mine if not run.over)
        times = [*(run.spec.created for run in mine), spec.created]
        found = lowered_limit(whole, whole, own, left, self._slots(), interval(times))
        if found is None:
            return spec
        settings = replace(spec.settings, limit=float(found.limit))
        return replace(spec, settings=settings, remark=found.reason)

    def _of(self, job: str) -> list[Run]:
        return [run for run in self._conductor.runs.values() if run.spec.job == job]

    def _slots(self) -> int:
        return max(1, len(self._conductor.live()), self._conductor.expected_workers)

    @staticmethod
    def _waiting(run: Run, mine: list[Run]) -> WaitingReport:
        """One whose requests are not known yet is taken to be as long as the job's longest."""
        longest = max((other.pace.total for other in mine), default=0.0)
        begun = run.begun or run.state.value == "scoring"
        seconds = run.slot_seconds if run.prepared else longest
        return WaitingReport(run=run.id, step=run.spec.step or 0, seconds=seconds, begun=begun)
