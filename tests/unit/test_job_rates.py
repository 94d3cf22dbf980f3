"""What a job's measured steps let the allocator expect of each count."""

from __future__ import annotations

from planner.job_rates import EVIDENCE_STEPS, GUESSED_SCALING, LEAST_GAIN, rates, step_flops
from planner.job_record import JobRecord
from planner.throughput import MeasuredTable
from tests.unit.test_job_machine import Life


def _job(measured: dict[int, tuple[int, float]]) -> JobRecord:
    """A job of 1 to 3 ranks with ``{count: (steps, seconds per step)}`` measured."""
    job, table = Life(workers={"min": 1, "max": 3}, batch={"global": 6, "micro": 2}).job, MeasuredTable()
    for count, (steps, seconds) in measured.items():
        table = table.record(count, steps * seconds, steps * step_flops(job), steps)
    job.measured = table.to_json()
    return job


def test_unmeasured_counts_are_scaled_from_the_nearest() -> None:
    found = rates(_job({2: (100, 0.5)}))
    assert found[2] == step_flops(_job({})) / 0.5
    assert found[1] == found[2] / 2
    assert found[3] == found[2] * 1.5 * GUESSED_SCALING**0.5


def test_a_few_slow_steps_do_not_keep_a_job_at_one_rank() -> None:
    few = rates(_job({1: (150, 1.0), 2: (3, 2.0)}))
    assert few[2] > 1.5 * few[1]
    assert EVIDENCE_STEPS > 3


def test_more_ranks_are_never_held_to_be_slower() -> None:
    found = rates(_job({1: (150, 1.0), 2: (150, 2.0)}))
    assert found[2] == found[1] * LEAST_GAIN
    assert found[3] > found[2]


def test_with_nothing_measured_more_ranks_are_faster() -> None:
    found = rates(_job({}))
    assert 0 < found[1] < found[2] < found[3]
