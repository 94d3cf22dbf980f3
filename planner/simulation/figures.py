"""The document of a simulation as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.ettr import LOSSES


def print_tables(document: Mapping[str, Any]) -> None:
    """Policies side by side, then where the rest of the time went."""
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    _print(console, f"{document['scenario']}, seed {document['seed']}", document["policies"])
    second = document.get("with_evaluation")
    if second:
        _print(console, f"{document['scenario']} with evaluation", second["policies"])


def _print(console: Any, title: str, policies: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    heads = ("accumulated WAF (FLOP)", "ETTR", "useful FLOP/GPU-h", "GPU-h", "cost", "makespan (s)", "p50 (s)", "p95", "p99",
             "utilised")  # fmt: skip
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
    losses = Table(title="share of the wall time lost")
    losses.add_column("policy", no_wrap=True)
    shown = [name for name in LOSSES if any(entry["losses"][name] > 0 for entry in policies.values())]
    for name in shown:
        losses.add_column(name, justify="right", no_wrap=True)
    for name, entry in policies.items():
        wall = entry["makespan_seconds"] or 1.0
        losses.add_row(name, *(f"{entry['losses'][loss] / wall:.3%}" for loss in shown))
    if shown:
        console.print(losses)
