"""How fast a job is at each count of ranks: measured where it was, guessed elsewhere."""

from __future__ import annotations

from planner.job_record import JobRecord
from planner.pretrain_config import Model
from planner.throughput import MeasuredTable

VOCABULARY = 50_000
"""Rows of the embedding where nothing is known of the tokenizer but that it is none of bytes."""
BYTES_VOCABULARY = 260
GUESSED_FLOPS = 1.0e10
"""Rate of one slot before anything was measured; only ratios between counts matter then."""
GUESSED_SCALING = 0.95
"""Share of the linear rate that each doubling keeps, where it was not measured."""
LEAST_GAIN = 1.01
"""Least rate of a count against that of the next smaller one."""
EVIDENCE_STEPS = 20.0
"""Steps at which a count's own measurement weighs as much as what the best measured count lets expect."""


def feasible(job: JobRecord) -> tuple[int, ...]:
    """Counts of ranks that have a layout, ascending: whole model-parallel groups, each with a micro-batch to do."""
    config = job.settings
    group = config.parallel.tensor * config.parallel.pipeline
    most = min(config.workers.max, group * config.batch.micro_batches)
    return tuple(count for count in range(group, most + 1, group) if count >= config.workers.min)


def parameters(model: Model, vocabulary: int) -> int:
    """Weights of the Llama-shaped model: attention, SwiGLU, norms and embeddings."""
    kv = model.groups * model.head_size
    attention = model.hidden_size * (2 * model.hidden_size + 2 * kv)
    layer = attention + 3 * model.hidden_size * model.ffn_hidden_size + 2 * model.hidden_size
    tables = 1 if model.tie_embeddings else 2
    return model.layers * layer + tables * vocabulary * model.hidden_size + model.hidden_size


def step_flops(job: JobRecord) -> float:
    """Floating-point operations of one optimizer step: 6 per weight and token, and attention's 12·l·s·h per token."""
    config = job.settings
    vocabulary = BYTES_VOCABULARY if config.tokenizer == "bytes" else VOCABULARY
    tokens = config.batch.global_ * config.model.seq_length
    attention = 12.0 * config.model.layers * config.model.seq_length * config.model.hidden_size
    return tokens * (6.0 * parameters(config.model, vocabulary) + attention)


def measure(job: JobRecord, workers: int, seconds: float) -> None:
    """Note a completed step in the record's table (``job`` is the decision's own copy)."""
    if seconds > 0 and workers > 0:
        table = MeasuredTable.from_json(job.measured)
        job.measured = table.record(workers, seconds, step_flops(job)).to_json()


def rates(job: JobRecord) -> dict[int, float]:
    """Aggregate FLOP/s per feasible count: measured where it was, scaled from the nearest measured count elsewhere.

    A few steps say little (a neighbour may have been busy), so each measurement is drawn towards what the count with
    the most steps lets expect, by ``steps/(steps + EVIDENCE_STEPS)`` on a logarithmic scale: a job that ran a handful
    of slow steps at a count is not kept away from it. And no count is held to be slower than a smaller one: where
    ranks share cores with others a measurement may say so, and slots would come and go with it. What is hardly faster
    is still the first to be lent.
    """
    table = MeasuredTable.from_json(job.measured)
    known = {count: rate.flops for count in table.entries if (rate := table.rate(count)) is not None and rate.flops > 0}
    if not known:
        return {count: _scaled(GUESSED_FLOPS, 1, count) for count in feasible(job)}
    anchor = max(known, key=lambda count: (table.entries[count].steps, count))
    for count in known.keys() - {anchor}:
        weight = table.entries[count].steps / (table.entries[count].steps + EVIDENCE_STEPS)
        known[count] = known[count] ** weight * _scaled(known[anchor], anchor, count) ** (1.0 - weight)
    found: dict[int, float] = {}
    least = 0.0
    for count in feasible(job):
        near = min(known, key=lambda other: (abs(other - count), other))
        found[count] = max(_scaled(known[near], near, count), least)
        least = found[count] * LEAST_GAIN
    return found


def _scaled(rate: float, near: int, count: int) -> float:
    """``rate`` at ``near`` ranks, carried over to ``count``."""
    return rate * count / near * (GUESSED_SCALING ** (count / near - 1.0) if count > near else 1.0)
