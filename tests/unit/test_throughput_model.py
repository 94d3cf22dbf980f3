"""The analytic throughput model against published figures, and where it must be monotone.

Published figures (A100 80 GB, GPT, vocabulary 51,200, sequence 2,048):

* Narayanan et al. 2021 (arXiv 2104.04473), weak scaling from 1.7B to 1T and strong scaling of 175B and 530B: achieved
  TFLOP/s per GPU, recomputation counted. The 1T row (502 PFLOP/s in all on 3,072 GPUs, 52% of peak) stands in the
  abstract; the other rows are internally consistent (parameters follow from the shape, checked below).
* Korthikanti et al. 2022 (arXiv 2205.05198): seconds per iteration with selective and with full recomputation. The
  abstract's 530B on 2,240 GPUs (54.2% of peak selective, 42.1% full) is checked apart.
* Llama 3 (arXiv 2407.21783), 405B on 8,192 and 16,384 H100: 430 and 400 TFLOP/s per GPU. Nothing was fitted to them.

Interleaving and micro-batch size are not given for most rows: the model takes two or three chunks a stage where the
layers divide, and the fastest micro-batch that fits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.throughput_model import (
    A100,
    H100,
    Hardware,
    ModelShape,
    Training,
    best_estimate,
    estimate,
    layouts,
    memory_bytes,
    step_seconds,
)
from planner.types import Layout

ERROR = 0.12
"""The stated error: every published figure is met within 12%."""

# heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s per GPU, parameters in billions
NARAYANAN = [
    (24, 2304, 24, 1, 1, 32, 512, 137, 1.7),
    (32, 3072, 30, 2, 1, 64, 512, 138, 3.6),
    (32, 4096, 36, 4, 1, 128, 512, 142, 7.5),
    (48, 6144, 40, 8, 1, 256, 1024, 135, 18.4),
    (64, 8192, 48, 8, 2, 512, 1536, 138, 39.1),
    (80, 10240, 60, 8, 4, 1024, 1792, 140, 76.1),
    (96, 12288, 80, 8, 8, 1536, 2304, 148, 145.6),
    (128, 16384, 96, 8, 16, 1920, 2160, 155, 310.1),
    (128, 20480, 105, 8, 35, 2520, 2520, 163, 529.6),
    (160, 25600, 128, 8, 64, 3072, 3072, 163, 1008.0),
    (96, 12288, 96, 8, 12, 384, 1536, 153, 174.6),
    (96, 12288, 96, 8, 12, 768, 1536, 149, 174.6),
    (96, 12288, 96, 8, 12, 1536, 1536, 141, 174.6),
    (128, 20480, 105, 8, 35, 560, 2240, 171, 529.6),
    (128, 20480, 105, 8, 35, 1120, 2240, 167, 529.6),
    (128, 20480, 105, 8, 35, 2240, 2240, 159, 529.6),
]

# heads, hidden, layers, tensor, pipeline, GPUs, batch, chunks, micro-batch, seconds selective, seconds full
KORTHIKANTI = [
    (64, 6144, 48, 8, 1, 8, 4, 1, 4, 1.10, 1.42),
    (96, 12288, 96, 8, 8, 64, 64, 3, 1, 13.75, 18.13),
    (128, 20480, 105, 8, 35, 280, 280, 3, 1, 37.83, 49.05),
    (160, 25600, 128, 8, 64, 512, 512, 1, 1, 71.49, 94.42),
]


def gpt(heads: int, hidden: int, layers: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, ffn_hidden=4 * hidden, heads=heads, kv_heads=heads, seq_length=2048, vocab=51200
    )


def plain(batch: int, **more: object) -> Training:
    """Training as in 2021: no sequence parallelism, no sharded optimizer, no overlap of the reduction."""
    base = Training(
        global_batch=batch,
        recompute=("full",),
        sequence_parallel=False,
        distributed_optimizer=False,
        overlap_gradients=False,
    )
    return replace(base, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", NARAYANAN, ids=lambda row: f"{row[8]}B-{row[5]}")
def test_narayanan_2021(row: tuple[int, ...]) -> None:
    heads, hidden, layers, tensor, pipeline, gpus, batch, published, billions = row
    shape = gpt(heads, hidden, layers)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.04)
    chunks = next((c for c in (2, 3) if layers // pipeline % c == 0), 1) if pipeline > 1 else 1
    layout = Layout(tensor, pipeline, gpus // tensor // pipeline)
    found = estimate(shape, plain(batch, virtual_stages=chunks), A100, layout)
    assert found is not None, "a published run does not fit in memory"
    achieved = shape.hardware_flops(batch, "full") / found.step_seconds / gpus / 1e12
    assert achieved == pytest.approx(published, rel=ERROR)


@pytest.mark.parametrize("row", KORTHIKANTI, ids=lambda row: f"{row[1]}")
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_korthikanti_2022(row: tuple[float, ...], mode: str) -> None:
    heads, hidden, layers, tensor, pipeline, gpus, batch, chunks, micro, selective, full = row
    training = plain(
        int(batch),
        virtual_stages=int(chunks),
        micro_batches=(int(micro),),
        recompute=(mode,),
        sequence_parallel=mode == "selective",
    )
    layout = Layout(int(tensor), int(pipeline), int(gpus / tensor / pipeline))
    found = estimate(gpt(int(heads), int(hidden), int(layers)), training, A100, layout)
    assert found is not None
    assert found.step_seconds == pytest.approx(selective if mode == "selective" else full, rel=ERROR)


@pytest.mark.parametrize(("mode", "utilisation"), [("selective", 0.542), ("full", 0.421)])
def test_the_530b_of_the_abstract(mode: str, utilisation: float) -> None:
    shape = gpt(128, 20480, 105)
    training = plain(
        2240, virtual_stages=3, micro_batches=(1,), recompute=(mode,), sequence_parallel=mode == "selective"
    )
    found = estimate(shape, training, A100, Layout(8, 35, 8))
    assert found is not None
    assert found.flops / 2240 / A100.peak_flops == pytest.approx(utilisation, rel=ERROR)


@pytest.mark.parametrize(("gpus", "published"), [(8192, 430), (16384, 400)])
def test_llama_3_on_h100_with_the_constants_of_a100(gpus: int, published: float) -> None:
    shape = ModelShape(
        layers=126,
        hidden=16384,
        ffn_hidden=53248,
        heads=128,
        kv_heads=8,
        seq_length=8192,
        vocab=128256,
        gated=True,
        tied=False,
    )
    assert shape.parameters / 1e9 == pytest.approx(405, rel=0.01)
    training = Training(global_batch=2048, virtual_stages=8)
    seconds = step_seconds(shape, training, H100, Layout(8, 16, gpus // 128), 1, "none")
    assert shape.model_flops(2048) / seconds / gpus / 1e12 == pytest.approx(published, rel=ERROR)


def test_flops_are_the_published_closed_forms() -> None:
    """[N21] eq. 3 and [K22] eq. 7: 96·B·s·l·h²·(1 + s/6h + V/16lh) with full recomputation, 72·(…V/12lh) without."""
    shape, batch, s, h, layers, vocab = gpt(96, 12288, 96), 1536, 2048, 12288, 96, 51200
    full = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    model = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert shape.hardware_flops(batch, "full") == pytest.approx(full, rel=1e-12)
    assert shape.model_flops(batch) == pytest.approx(model, rel=1e-12)
    six_n_d = 6 * shape.parameters * batch * s
    assert shape.model_flops(batch) == pytest.approx(six_n_d, rel=0.05)
    assert shape.model_flops(batch) > six_n_d


SHAPE = gpt(32, 4096, 32)
TRAINING = Training(global_batch=512)


PARTS = st.sampled_from(["peak_flops", "memory_bytes_per_second", "node_link", "cluster_link"])
LAYOUTS = st.sampled_from([Layout(1, 1, 8), Layout(8, 1, 2), Layout(4, 4, 4), Layout(2, 8, 16)])
MODES = st.sampled_from(["none", "selective", "full"])


@given(PARTS, st.floats(1.0, 8.0), LAYOUTS, MODES)
def test_better_hardware_is_never_slower(name: str, factor: float, layout: Layout, mode: str) -> None:
    better: Hardware = replace(A100, **{name: getattr(A100, name) * factor})
    before = step_seconds(SHAPE, TRAINING, A100, layout, 1, mode)
    assert step_seconds(SHAPE, TRAINING, better, layout, 1, mode) <= before * (1 + 1e-12)


@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4])
)
def test_memory_falls_with_model_parallelism_and_recomputation(
    tensor: int, pipeline: int, data: int, micro: int
) -> None:
    here = memory_bytes(SHAPE, TRAINING, Layout(tensor, pipeline, data), micro, "none")
    assert memory_bytes(SHAPE, TRAINING, Layout(tensor * 2, pipeline, data), micro, "none") < here
    assert memory_bytes(SHAPE, TRAINING, Layout(tensor, pipeline, data * 2), micro, "none") <= here
    assert memory_bytes(SHAPE, TRAINING, Layout(tensor, pipeline, data), micro, "selective") < here
    assert memory_bytes(SHAPE, TRAINING, Layout(tensor, pipeline, data), 2 * micro, "none") > here


@given(st.integers(0, 6))
def test_a_strongly_scaled_job_gains_less_and_less_by_each_slot(doublings: int) -> None:
    rates = [best_estimate(SHAPE, TRAINING, A100, 8 * 2**n) for n in (doublings, doublings + 1)]
    assert rates[0] is not None
    if rates[1] is None:
        return
    assert rates[1].flops / 2 <= rates[0].flops * (1 + 1e-9), "a slot of twice as many does not do more"


@given(st.integers(1, 64), st.integers(2, 16))
def test_the_bubble_shrinks_with_more_micro_batches(groups: int, pipeline: int) -> None:
    few, many = replace(TRAINING, global_batch=groups), replace(TRAINING, global_batch=2 * groups)
    layout = Layout(1, pipeline, 1)
    slow = step_seconds(SHAPE, few, A100, layout, 1, "full") / groups
    assert step_seconds(SHAPE, many, A100, layout, 1, "full") / (2 * groups) < slow


@given(st.integers(1, 256))
def test_layouts_use_all_workers_and_fit_the_model(workers: int) -> None:
    for layout in layouts(SHAPE, workers):
        assert layout.workers == workers
        assert SHAPE.heads % layout.tensor == 0
        assert SHAPE.layers % layout.pipeline == 0
        assert layout.tensor <= 8


@given(st.sampled_from([8, 16, 32, 64]))
def test_the_best_layout_is_the_best_and_fits(workers: int) -> None:
    best = best_estimate(SHAPE, TRAINING, A100, workers)
    assert best is not None
    assert best.memory_bytes <= A100.memory_bytes * A100.usable_memory
    for layout in layouts(SHAPE, workers):
        other = estimate(SHAPE, TRAINING, A100, layout)
        assert other is None or other.flops <= best.flops


def test_what_does_not_fit_has_no_rate() -> None:
    assert best_estimate(gpt(96, 12288, 96), TRAINING, A100, 8) is None
    assert estimate(SHAPE, Training(global_batch=4), A100, Layout(1, 1, 8)) is None, "more replicas than samples"
