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
    """Aggregate FLOP/s per feasible count: measured where it was, scaled from the nearest measured count elsewhere."""
    table = MeasuredTable.from_json(job.measured)
    known = {count: rate.flops for count in table.entries if (rate := table.rate(count)) is not None}
    found: dict[int, float] = {}
    for count in feasible(job):
        if count in known:
            found[count] = known[count]
            continue
        near = min(known, key=lambda other: (abs(other - count), other), default=1)
        base = known.get(near, GUESSED_FLOPS)
        doublings = abs((count / near) - 1.0) if count > near else abs((near / count) - 1.0)
        scale = count / near * (GUESSED_SCALING**doublings if count > near else 1.0)
        found[count] = base * scale
    return found
