"""The simulator's figures (issue "The simulator"): speed, and each claim of docs/reproduction.md."""

from __future__ import annotations

import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from planner.simulation.parameters import default_path
from planner.simulation.run import simulate
from tests.bench.figures import Figure

SCENARIOS = default_path().parent


def measure(quick: bool = False) -> list[Figure]:
    """All figures; ``quick`` takes fewer seeds and leaves the sweep out."""
    figures = [*_speed(), *_traces(quick), *_llama(1 if quick else 5), *_trials()]
    return figures if quick else [*figures, *_sweep()]


def _timed(path: Path) -> tuple[float, dict[str, Any]]:
    started = time.process_time()
    document = simulate(path)
    return time.process_time() - started, document


def _speed() -> list[Figure]:
    small, first = _timed(SCENARIOS / "trace-a.yaml")
    large, _ = _timed(SCENARIOS / "llama3-16k.yaml")
    again = simulate(SCENARIOS / "trace-a.yaml")
    same = json.dumps(first) == json.dumps(again)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [
        Figure(
            name="8 weeks × 128 GPUs × 6 jobs, 8 policies, 10 traces, CPU",
            value=small,
            unit="s",
            bar="< 5 s",
            reached=small < 5,
        ),
        Figure(name="54 days × 16,384 GPUs, 3 policies, CPU", value=large, unit="s", bar="< 60 s", reached=large < 60),
        Figure(name="peak memory", value=memory, unit="GiB", bar="< 2 GiB", reached=memory < 2),
        Figure(name="same seed, same bytes", value=float(same), unit="", bar="1", reached=same),
    ]


def _ratio(name: str, values: list[float], bar: float, note: str = "") -> Figure:
    mean = statistics.mean(values)
    return Figure(name=name, value=mean, unit="×", bar=f"≥ {bar:g} ×", reached=mean >= bar, runs=len(values),
                  low=min(values), high=max(values), note=note)  # fmt: skip


def _gain(name: str, gain: dict[str, float], bar: float, runs: int) -> Figure:
    return Figure(
        name=name, value=gain["mean"], unit="×", bar=f"≥ {bar:g} ×" if bar else "",
        reached=gain["mean"] >= bar if bar else None, runs=runs, low=gain["low"], high=gain["high"],
    )  # fmt: skip


def _traces(quick: bool) -> list[Figure]:
    figures = []
    for name, bar in (("trace-a", 1.2), ("trace-b", 1.9)):
        document = simulate(SCENARIOS / f"{name}.yaml")
        for other, gain in document["gains"].items():
            least = {"megatron-restart": bar, "unicron": 1.0}.get(other, 0.0)
            figures.append(_gain(f"{name}: accumulated WAF against {other}", gain, least, document["seeds"]))
        if name == "trace-b" or not quick:
            document = simulate(SCENARIOS / f"{name}-evaluation.yaml")
            for what, key, least in (
                ("training alone", "gains", 0.0), ("evaluation counted", "gains_with_evaluation", 1.05)
            ):  # fmt: skip
                gain = document[key]["fixed-partition"]
                figures.append(
                    _gain(f"{name} beside evaluation, {what}: against Unicron and a partition", gain, least,
                          document["seeds"])
                )  # fmt: skip
    return figures


def _llama(seeds: int) -> list[Figure]:
    values = [
        simulate(SCENARIOS / "llama3-16k.yaml", seed)["policies"]["planaria"]["ettr"] for seed in range(1, seeds + 1)
    ]
    mean = statistics.mean(values)
    return [
        Figure(name="Llama-3-like trace: ETTR", value=mean, unit="", bar="≥ 0.97", reached=mean >= 0.97,
               runs=len(values), low=min(values), high=max(values))
    ]  # fmt: skip


def _trials() -> list[Figure]:
    figures = []
    for nodes, acme, bar in ((1, 1.3, 1.6), (4, 1.8, 2.5)):
        document = simulate(SCENARIOS / f"acme-eval-{nodes}node.yaml")
        speedup = document["speedup"]
        figures.append(_ratio(f"63 datasets, {nodes} node(s): Acme's own method against its baseline",
                              [speedup["fixed-partition"]], acme, f"theirs {acme} ×"))  # fmt: skip
        figures.append(_ratio(f"63 datasets, {nodes} node(s): ours against the baseline", [speedup["planaria"]], bar))
        over = document["policies"]["planaria"]["makespan_seconds"] / document["lower_bound_seconds"] - 1
        figures.append(Figure(name=f"63 datasets, {nodes} node(s): makespan over the lower bound", value=100 * over,
                              unit="%", bar="≤ 5 %", reached=over <= 0.05))  # fmt: skip
    return figures


def _sweep() -> list[Figure]:
    document = simulate(SCENARIOS / "joint-sweep.yaml")
    figures = []
    for name, rule in document["lending_rules"].items():
        quick = rule["best_partition_as_quick"]
        if quick:
            gain = quick["gain"]
            figures.append(
                Figure(name=f"Acme's mix, {name}: against the best partition as quick ({quick['nodes']} nodes)",
                       value=gain["mean"], unit="×", bar="≥ 1.15 ×", reached=gain["mean"] >= 1.15,
                       runs=document["seeds"], low=gain["low"], high=gain["high"])
            )  # fmt: skip
    for cell in document["cells"]:
        name = f"rate {cell['failure_rate']:g}, load {cell['evaluation_load']:g}, {cell['nodes']} nodes"
        for what, gain in (
            ("sized partition", cell["gain_over_fixed_partition"]),
            ("best partition as quick", (cell["best_partition_as_quick"] or {}).get("gain")),
        ):
            if gain is not None:
                figures.append(
                    Figure(name=f"sharing against {what}: {name}", value=gain["mean"], unit="×", bar="≥ 1.15 ×",
                           reached=gain["mean"] >= 1.15, runs=document["seeds"], low=gain["low"], high=gain["high"])
                )  # fmt: skip
    return figures
