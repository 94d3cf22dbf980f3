"""Several logs of one job as one case: clocks aligned across nodes, then one decision over all evidence.

Each node writes by its own clock. Steps that two logs both report were reached at the same moment (all ranks meet in
each step), so the median difference of their times is the clocks' offset; logs without a common step are taken as they
are. What each log's own progress outlived is dropped by that log's own order, before the logs are put together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from pretrain.diagnosis.origin import OriginMap
from pretrain.diagnosis.progress import Course
from pretrain.diagnosis.root import Collector, Evidence, Verdict, decide, outlived

_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.I)
NEGLIGIBLE = 1.0
"""Seconds of offset that are no offset: progress lines are written to the second."""


def clock_offsets(courses: Sequence[Course]) -> list[float]:
    """Seconds by which each log's clock is ahead of the reference, the log with the most steps."""
    if not courses:
        return []
    reference = max(courses, key=lambda course: len(course.times))
    known = dict(reference.times)
    offsets = []
    for course in courses:
        gaps = [when - known[step] for step, when in course.times if step in known]
        offset = median(gaps) if gaps else 0.0
        offsets.append(offset if abs(offset) > NEGLIGIBLE else 0.0)
    return offsets


def together(logs: Sequence[Collector]) -> Verdict:
    """One verdict for all logs of a job; ``file`` is the log that shows the root."""
    offsets = clock_offsets([log.course for log in logs])
    longest = max(logs, key=lambda log: (log.course.last.step if log.course.last else -1, log.bad_end is not None))
    merged = replace(
        longest,
        evidence=sorted(
            (_moved(item, log, offset) for log, offset in zip(logs, offsets, strict=True) for item in log.evidence
             if not outlived(item, log)),
            key=lambda item: item.order,
        ),
        origins=_origins(logs), progress_marks=[], time_limit=any(log.time_limit for log in logs),
        stuck=set().union(*(log.stuck for log in logs)), sequences=_sequences(logs),
        first_failure_rank=next((log.first_failure_rank for log in logs if log.first_failure_rank is not None), None),
    )  # fmt: skip
    merged.cascades = {}
    for log in logs:
        for name, count in log.cascades.items():
            merged.cascades[name] = merged.cascades.get(name, 0) + count
            merged.first_of.setdefault(name, log.first_of[name])
    failed = [log for log in logs if log.bad_end is not None or log.trouble is not None]
    if failed and longest not in failed:
        merged.bad_end, merged.trouble, merged.ended_well = failed[0].bad_end, failed[0].trouble, None
    verdict = decide(merged)
    return verdict if verdict.rank is not None else replace(verdict, rank=_rank_of_name(verdict.file, verdict))


def _moved(item: Evidence, log: Collector, offset: float) -> Evidence:
    when, number = item.order
    return replace(item, order=(when - offset if when else log.last_time or 0.0, number))


def _origins(logs: Sequence[Collector]) -> OriginMap:
    found = OriginMap()
    for log in logs:
        found.node_of_rank |= log.origins.node_of_rank
        found.pids |= log.origins.pids
        found.bus |= log.origins.bus
        found.processes |= log.origins.processes
    return found


def _sequences(logs: Sequence[Collector]) -> dict[int, int]:
    found: dict[int, int] = {}
    for log in logs:
        for rank, number in log.sequences.items():
            found.setdefault(rank, number)
    return found


def _rank_of_name(file: str, verdict: Verdict) -> int | None:
    """A log that one rank writes often says so in its name only."""
    match = _RANK_IN_NAME.search(Path(file).stem)
    return int(match.group(1)) if match and verdict.evidence else None
