"""One run's figures, and the mean over runs with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from planner.ettr import LOSSES
from planner.simulation.cluster import Outcome

CONFIDENCE = 0.95
PERCENTILES = (50, 95, 99)


def figures(outcome: Outcome) -> dict[str, Any]:
    """One policy's entry of the document; seconds and FLOP."""
    latencies = np.array(outcome.latencies)
    return {
        "accumulated_waf": outcome.accumulated_waf,
        "certain_waf": outcome.certain_waf,
        "useful_flop": outcome.useful_flop,
        "ettr": outcome.ettr,
        "gpu_hours": outcome.gpu_hours,
        "cost": outcome.cost,
        "makespan_seconds": outcome.makespan,
        "evaluation_latency": {
            f"p{percent}": float(np.percentile(latencies, percent)) if latencies.size else None
            for percent in PERCENTILES
        },
        "losses": {name: outcome.losses[name] for name in LOSSES},
        "utilisation": outcome.busy_gpu_hours / outcome.gpu_hours if outcome.gpu_hours else 0.0,
        "price_per_useful_flop": outcome.cost / outcome.useful_flop if outcome.useful_flop else None,
        "useful_flop_per_gpu_hour": outcome.useful_flop / outcome.gpu_hours if outcome.gpu_hours else 0.0,
        "reports": len(outcome.latencies) - outcome.pending,
        "reports_pending": outcome.pending,
        "events": outcome.events,
        "series": [[time, value] for time, value in outcome.series],
    }


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and its confidence interval (Student's t over the seeds)."""
    array = np.array(values)
    mean, count = float(array.mean()), len(array)
    if count < 2:
        return {"mean": mean, "low": mean, "high": mean}
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1) * array.std(ddof=1) / count**0.5)
    return {"mean": mean, "low": mean - half, "high": mean + half}


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Each figure the mean over the runs; latencies are those of all runs together."""
    count = len(outcomes)
    if count == 1:
        return outcomes[0]
    same = all(len(o.series) == len(outcomes[0].series) for o in outcomes)
    return Outcome(
        accumulated_waf=sum(o.accumulated_waf for o in outcomes) / count,
        certain_waf=sum(o.certain_waf for o in outcomes) / count,
        useful_flop=sum(o.useful_flop for o in outcomes) / count,
        ettr=sum(o.ettr for o in outcomes) / count,
        makespan=sum(o.makespan for o in outcomes) / count,
        losses={
            name: sum(o.losses[name] / o.makespan for o in outcomes if o.makespan)
            / count
            * sum(o.makespan for o in outcomes)
            / count
            for name in outcomes[0].losses
        },
        gpu_hours=sum(o.gpu_hours for o in outcomes) / count,
        cost=sum(o.cost for o in outcomes) / count,
        busy_gpu_hours=sum(o.busy_gpu_hours for o in outcomes) / count,
        latencies=[latency for o in outcomes for latency in o.latencies],
        pending=sum(o.pending for o in outcomes),
        series=[
            (points[0][0], sum(value for _, value in points) / count)
            for points in zip(*(o.series for o in outcomes), strict=True)
        ]
        if same
        else [],
        events=sum(o.events for o in outcomes),
    )
