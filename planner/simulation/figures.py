"""The document of a simulation as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ettr import LOSSES

WIDTH = 170
"""Columns that the widest table needs."""


def print_tables(document: Mapping[str, Any]) -> None:
    """Policies side by side, then where the rest of the time went."""
    from rich.console import Console

    # A table that is cut off hides figures: wider than the terminal is better (pipe it to less -S).
    console = Console(highlight=False, width=max(WIDTH, Console().width))
    _print(console, f"{document['scenario']}, seed {document['seed']}", document["policies"])
    if document.get("variants"):
        _print(console, "variants", document["variants"])
    for name, gain in document.get("gains", {}).items():
        console.print(f"accumulated WAF of planaria over {name}: {_between(gain, '.3f')}")
    for name, gain in document.get("gains_with_evaluation", {}).items():
        console.print(f"the same with evaluation counted, over {name}: {_between(gain, '.3f')}")
    for name, ratio in document.get("speedup", {}).items():
        console.print(f"{name}: {ratio:.2f} x as quick as one job per dataset")
    if document.get("cells"):
        _print_cells(console, document["cells"])
        _print_rules(console, document["lending_rules"])


def _print(console: Any, title: str, policies: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=title, box=None, title_justify="left")
    table.add_column("policy", no_wrap=True)
    heads = (
        "accumulated WAF (FLOP)", "ETTR", "useful FLOP/GPU-h", "GPU-h", "cost", "makespan (s)", "p50 (s)", "p95", "p99",
        "utilised",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for name, entry in policies.items():
        latency = entry["evaluation_latency"]
        table.add_row(
            name, f"{entry['accumulated_waf']:.4g}", f"{entry['ettr']:.4f}", f"{entry['useful_flop_per_gpu_hour']:.4g}",
            f"{entry['gpu_hours']:.0f}", f"{entry['cost']:.0f}", f"{entry['makespan_seconds']:.0f}",
            *(f"{latency[key]:.0f}" if latency[key] is not None else "" for key in ("p50", "p95", "p99")),
            f"{entry['utilisation']:.1%}",
        )  # fmt: skip
    console.print(table)
    losses = Table(title="share of the wall time lost", box=None, title_justify="left")
    losses.add_column("policy", no_wrap=True)
    shown = [name for name in LOSSES if any(entry["losses"][name] > 0 for entry in policies.values())]
    for name in shown:
        losses.add_column(name, justify="right", no_wrap=True)
    for name, entry in policies.items():
        wall = entry["makespan_seconds"] or 1.0
        losses.add_row(name, *(f"{entry['losses'][loss] / wall:.3%}" for loss in shown))
    if shown:
        console.print(losses)


def _between(entry: Mapping[str, float], digits: str) -> str:
    return f"{entry['mean']:{digits}} ({entry['low']:{digits}}..{entry['high']:{digits}})"


def _print_cells(console: Any, cells: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(
        title="shared pool against fixed partitions (mean and 95% interval over seeds)", box=None, title_justify="left"
    )
    heads = (
        "failure rate", "load", "nodes", "gain over sized", "p95 shared (s)", "p95 sized (s)", "as quick",
        "gain over it",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for cell in cells:
        quick = cell["best_partition_as_quick"]
        table.add_row(
            f"{cell['failure_rate']:g}", f"{cell['evaluation_load']:g}", str(cell["nodes"]),
            _between(cell["gain_over_fixed_partition"], ".3f"),
            _between(cell["policies"]["planaria"]["p95_latency_seconds"], ".0f"),
            _between(cell["policies"]["fixed-partition"]["p95_latency_seconds"], ".0f"),
            f"{quick['nodes']} nodes" if quick else "none", _between(quick["gain"], ".3f") if quick else "",
        )  # fmt: skip
    console.print(table)


def _print_rules(console: Any, rules: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table(title="rules of lending in the reference cell", box=None, title_justify="left")
    table.add_column("rule", no_wrap=True)
    for head in ("useful FLOP/GPU-h", "p95 latency (s)", "as quick", "gain over it"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, entry in rules.items():
        quick = entry["best_partition_as_quick"]
        table.add_row(
            name, _between(entry["useful_flop_per_gpu_hour"], ".4g"), _between(entry["p95_latency_seconds"], ".0f"),
            f"{quick['nodes']} nodes" if quick else "none", _between(quick["gain"], ".3f") if quick else "",
        )  # fmt: skip
    console.print(table)
