"""How fast a model trains at a layout, from first principles: FLOPs, bubbles, links and memory.

Sources, by the names used below:

* [N21] Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
  arXiv 2104.04473: FLOPs of an iteration (appendix), pipeline bubble, interleaved schedule, messages.
* [K22] Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198:
  activation memory of a layer, sequence parallelism, selective recomputation.
* [R20] Rajbhandari et al., "ZeRO", arXiv 1910.02054: 16 bytes a parameter for mixed-precision Adam.

Two constants are fitted, not derived (``matmul_efficiency`` and ``elementwise_passes``), both on A100 figures alone:
see docs/allocator.md for the fit and its error. Everything is pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from planner.types import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One kind of slot and its links; per slot, one direction. Link speeds are what collectives reach."""

    name: str
    peak_flops: float
    """Dense 16-bit matrix FLOP/s."""
    memory_bytes: float
    memory_bytes_per_second: float
    node_link: float
    """Bytes/s between slots of a node."""
    cluster_link: float
    """Bytes/s between nodes, each slot's share."""
    matmul_efficiency: float = 0.62
    """Share of the peak that large matrix products reach (fitted)."""
    elementwise_passes: float = 2.5
    """How often a layer's activations go through memory in a forward pass and its backward pass (fitted)."""
    usable_memory: float = 0.92
    """Share of the memory that is left for weights and activations (workspace, fragmentation)."""


A100 = Hardware(
    name="a100-80gb", peak_flops=312e12, memory_bytes=80e9, memory_bytes_per_second=2.0e12,
    node_link=240e9, cluster_link=20e9,
)  # fmt: skip
H100 = Hardware(
    name="h100-80gb", peak_flops=989e12, memory_bytes=80e9, memory_bytes_per_second=3.35e12,
    node_link=360e9, cluster_link=40e9,
)  # fmt: skip
H200 = Hardware(
    name="h200-141gb", peak_flops=989e12, memory_bytes=141e9, memory_bytes_per_second=4.8e12,
    node_link=360e9, cluster_link=40e9,
)  # fmt: skip
HARDWARE = {hardware.name: hardware for hardware in (A100, H100, H200)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only transformer; ``gated`` is SwiGLU (three matrices instead of two)."""

    layers: int
    hidden: int
    ffn_hidden: int
    heads: int
    kv_heads: int
    seq_length: int
    vocab: int
    gated: bool = False
    tied: bool = True
    """One matrix for input and output embeddings."""

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices: attention ``h²(2 + 2·groups/heads)``, MLP ``2·h·f`` (3 if gated)."""
        attention = 2 * self.hidden**2 + 2 * self.hidden**2 * self.kv_heads // self.heads
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def parameters(self) -> int:
        """All matrix weights."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    def layer_forward_flops(self, tokens: float) -> float:
        """2 per weight and token, and ``4·s·h`` a token for scores and their use ([N21]: no causal discount)."""
        return tokens * (2.0 * self.layer_parameters + 4.0 * self.seq_length * self.hidden)

    def model_flops(self, samples: float) -> float:
        """FLOPs of a step on ``samples`` sequences, recomputation not counted: 3 × forward = 6·N·D + attention.

        For a GPT (f = 4h, tied) this is ``72·B·s·l·h²·(1 + s/6h + V/12lh)`` ([K22], eq. 7).
        """
        tokens = samples * self.seq_length
        logits = 2.0 * tokens * self.hidden * self.vocab
        return 3.0 * (self.layers * self.layer_forward_flops(tokens) + logits)

    def hardware_flops(self, samples: float, recompute: str) -> float:
        """FLOPs really done: one more forward of the layers if ``full`` ([N21]), of the scores if ``selective``."""
        tokens = samples * self.seq_length
        again = {
            "full": self.layers * self.layer_forward_flops(tokens),
            "selective": self.layers * tokens * 4.0 * self.seq_length * self.hidden,
            "none": 0.0,
        }[recompute]
        return self.model_flops(samples) + again


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a step is."""

    global_batch: int
    """Sequences of a step."""
    micro_batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Micro-batch sizes to choose from."""
    recompute: tuple[str, ...] = ("none", "selective", "full")
    """Recomputation modes to choose from."""
    sequence_parallel: bool = True
    """[K22]: activations outside the tensor-parallel products are split too."""
    distributed_optimizer: bool = True
    """[R20] stage 1: Adam's state is split over the data-parallel ranks."""
    virtual_stages: int = 1
    """Chunks of layers a pipeline rank holds (interleaved schedule, [N21])."""
    overlap_gradients: bool = True
    """Hide the data-parallel reduction behind the backward pass of the last micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A step at one layout: how it runs, how long it takes (s), how fast it is (aggregate model FLOP/s)."""

    layout: Layout
    micro_batch: int
    recompute: str
    step_seconds: float
    flops: float
    memory_bytes: float


def memory_bytes(shape: ModelShape, training: Training, layout: Layout, micro_batch: int, recompute: str) -> float:
    """Bytes on the fullest rank, the first pipeline stage.

    Weights, gradients and Adam: 2 + 4 + 12 bytes a parameter (fp32 gradients), the 12 split over ``data`` with the
    distributed optimizer ([R20]). Activations of a layer ([K22], table 2): ``s·b·h·(10 + 24/t + 5·a·s/(h·t))``, the
    10 split over t with sequence parallelism, the scores gone with selective recomputation, ``2·s·b·h`` (a layer's
    input) with full, plus one layer at work. ``min(p, m)`` micro-batches are in flight there.
    """
    tensor, pipeline, data = layout.tensor, layout.pipeline, layout.data
    stage_layers = ceil(shape.layers / pipeline)
    weights = (stage_layers * shape.layer_parameters + shape.vocab * shape.hidden) / tensor
    state = weights * (6 + 12 / (data if training.distributed_optimizer else 1))
    unit = shape.seq_length * micro_batch * shape.hidden
    working = _layer_activations(shape, training, tensor, unit, scores=recompute == "none")
    kept = {"none": working, "selective": working, "full": 2.0 * unit / (tensor if training.sequence_parallel else 1)}
    in_flight = float(min(pipeline, max(1, ceil(training.global_batch / (data * micro_batch)))))
    if training.virtual_stages > 1 and pipeline > 1:
        in_flight = in_flight * (1 + (pipeline - 1) / (pipeline * training.virtual_stages))
    return state + kept[recompute] * stage_layers * in_flight + (working if recompute == "full" else 0.0)


def _layer_activations(shape: ModelShape, training: Training, tensor: int, unit: float, scores: bool) -> float:
    """Bytes of one layer's activations for one micro-batch; ``unit`` is s·b·h."""
    outside = 10.0 / (tensor if training.sequence_parallel else 1)
    return unit * (
        outside + 24.0 / tensor + (5.0 * shape.heads * shape.seq_length / (shape.hidden * tensor) if scores else 0.0)
    )


def step_seconds(
    shape: ModelShape, training: Training, hardware: Hardware, layout: Layout, micro_batch: int, recompute: str,
    slots_per_node: int = 8,
) -> float:  # fmt: skip
    """Seconds of one step: ``(m + (p−1)/v)·t_micro + reduction + optimizer``, m micro-batches a pipeline, v chunks.

    ``t_micro`` of a stage is its matrix products at ``matmul_efficiency`` of the peak, its element-wise traffic,
    its tensor-parallel all-reduces (two forward, two backward, the forward ones again with full recomputation, of
    ``2·s·b·h`` bytes each) and the messages to the next stage. An all-reduce of n bytes over r ranks takes
    ``2·(r−1)/r·n/link``.
    """
    tensor, pipeline, data = layout.tensor, layout.pipeline, layout.data
    count = ceil(training.global_batch / (data * micro_batch))
    stage_layers = ceil(shape.layers / pipeline)
    tokens = micro_batch * shape.seq_length
    unit = float(tokens * shape.hidden)
    forward = shape.layer_forward_flops(tokens)
    again = {"full": forward, "selective": 4.0 * tokens * shape.seq_length * shape.hidden, "none": 0.0}[recompute]
    flops = stage_layers * (3.0 * forward + again) + 6.0 * tokens * shape.hidden * shape.vocab / pipeline
    compute = flops / tensor / (hardware.peak_flops * hardware.matmul_efficiency)
    repeats = (3 + (recompute == "full")) / 3
    traffic = _layer_activations(shape, training, tensor, unit, scores=True) * stage_layers
    elementwise = traffic * hardware.elementwise_passes * repeats / hardware.memory_bytes_per_second
    link = hardware.node_link if tensor <= slots_per_node else hardware.cluster_link
    reduces = (6 if recompute == "full" else 4) * stage_layers
    collective = reduces * _all_reduce(2.0 * unit, tensor, link)
    hop = hardware.cluster_link if tensor * pipeline > slots_per_node else hardware.node_link
    chunks = training.virtual_stages if pipeline > 1 else 1
    messages = 2 * chunks * 2.0 * unit / tensor / hop if pipeline > 1 else 0.0
    micro = compute + elementwise + collective + messages
    weights = (stage_layers * shape.layer_parameters + shape.vocab * shape.hidden) / tensor
    spread = hardware.node_link if layout.workers <= slots_per_node else hardware.cluster_link
    reduction = _all_reduce(4.0 * weights, data, spread)
    if training.overlap_gradients:
        reduction = max(0.0, reduction - micro * 2 / 3)
    shard = data if training.distributed_optimizer else 1
    optimizer = weights * 40.0 / shard / hardware.memory_bytes_per_second
    return (count + (pipeline - 1) / chunks) * micro + reduction + optimizer


def _all_reduce(size: float, ranks: int, link: float) -> float:
    """Seconds of a ring all-reduce of ``size`` bytes."""
    return 2.0 * (ranks - 1) / ranks * size / link


def layouts(shape: ModelShape, workers: int, slots_per_node: int = 8) -> list[Layout]:
    """Every layout of ``workers`` ranks: tensor groups within a node and dividing heads, pipelines dividing layers."""
    found = []
    for tensor in range(1, min(workers, slots_per_node) + 1):
        if workers % tensor or shape.heads % tensor or shape.kv_heads % tensor or shape.ffn_hidden % tensor:
            continue
        if workers > slots_per_node and slots_per_node % tensor:
            continue
        for pipeline in range(1, min(workers // tensor, shape.layers) + 1):
            if (workers // tensor) % pipeline == 0 and shape.layers % pipeline == 0:
                found.append(Layout(tensor, pipeline, workers // tensor // pipeline))
    return found


def estimate(
    shape: ModelShape, training: Training, hardware: Hardware, layout: Layout, slots_per_node: int = 8
) -> Estimate | None:
    """The fastest way to run a layout that fits in memory, or None."""
    best: Estimate | None = None
    if layout.data > training.global_batch:
        return None
    for micro_batch in training.micro_batches:
        if micro_batch * layout.data > training.global_batch:
            continue
        for recompute in training.recompute:
            memory = memory_bytes(shape, training, layout, micro_batch, recompute)
            if memory > hardware.memory_bytes * hardware.usable_memory:
                continue
            seconds = step_seconds(shape, training, hardware, layout, micro_batch, recompute, slots_per_node)
            if best is None or seconds < best.step_seconds:
                flops = shape.model_flops(training.global_batch) / seconds
                best = Estimate(
                    layout=layout, micro_batch=micro_batch, recompute=recompute, step_seconds=seconds, flops=flops,
                    memory_bytes=memory,
                )  # fmt: skip
    return best


@lru_cache(maxsize=4096)
def best_estimate(
    shape: ModelShape, training: Training, hardware: Hardware, workers: int, slots_per_node: int = 8
) -> Estimate | None:
    """The best layout of ``workers`` ranks, or None if none fits; ties go to the smaller tensor, then pipeline size."""
    best: Estimate | None = None
    for layout in layouts(shape, workers, slots_per_node):
        found = estimate(shape, training, hardware, layout, slots_per_node)
        if found is not None and (best is None or found.step_seconds < best.step_seconds):
            best = found
    return best
