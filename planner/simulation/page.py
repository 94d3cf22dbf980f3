"""The document of a simulation as one self-contained HTML page with plots."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from planner.errors import BadInputError
from planner.ettr import LOSSES
from planner.simulation.parameters import sources

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px}"
    "td,th{padding:3px 10px;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child,td.source{text-align:left}"
)


def write_page(document: Mapping[str, Any], path: Path) -> None:
    """Write the page.

    Raises:
        BadInputError: it cannot be written there.
    """
    try:
        path.write_text(page(document), encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"--html {path}: cannot be written ({error.strerror})") from error


def page(document: Mapping[str, Any]) -> str:
    """The page's text; it needs nothing from the network."""
    title = escape(f"Simulation of {document['scenario']}, seed {document['seed']}")
    parts = [f"<h1>{title}</h1>", *_section(document["policies"], "")]
    if document.get("variants"):
        parts += ["<h2>Variants</h2>", *_section(document["variants"], " (variants)")]
    if document.get("cells"):
        parts += ["<h2>Cells</h2>", _cells(document["cells"]), _figure(_sweep(document["cells"]))]
    if document.get("lending_rules"):
        parts += ["<h2>Rules of lending, reference cell</h2>", _rules(document["lending_rules"])]
    parts += ["<h2>Parameters</h2>", _parameters()]
    script = f"<script>{get_plotlyjs()}</script>"
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>{script}'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _section(policies: Mapping[str, Any], what: str) -> list[str]:
    figures = [_table(policies)]
    if any(entry.get("series") for entry in policies.values()):
        figures.append(_figure(_over_time(policies, what)))
    figures.append(_figure(_losses(policies, what)))
    if any(entry["evaluation_latency"]["p50"] is not None for entry in policies.values()):
        figures.append(_figure(_latencies(policies, what)))
    return figures


def _figure(figure: go.Figure) -> str:
    figure.update_layout(template="plotly_white", height=420, margin={"l": 60, "r": 20, "t": 50, "b": 50})
    return str(figure.to_html(full_html=False, include_plotlyjs=False))


def _over_time(policies: Mapping[str, Any], what: str) -> go.Figure:
    figure = go.Figure()
    for name, entry in policies.items():
        days = [time / 86400 for time, _ in entry["series"]]
        figure.add_scatter(x=days, y=[value for _, value in entry["series"]], name=name, mode="lines")
    return figure.update_layout(title=f"Accumulated WAF{what}", xaxis_title="days", yaxis_title="weighted FLOP kept")


def _losses(policies: Mapping[str, Any], what: str) -> go.Figure:
    figure = go.Figure()
    names = list(policies)
    for loss in LOSSES:
        shares = [policies[name]["losses"][loss] / (policies[name]["makespan_seconds"] or 1.0) for name in names]
        if any(shares):
            figure.add_bar(x=names, y=shares, name=loss)
    figure.update_layout(barmode="stack", title=f"Where the time went{what}", yaxis_title="share of the wall time lost")
    return figure


def _latencies(policies: Mapping[str, Any], what: str) -> go.Figure:
    figure = go.Figure()
    for key in ("p50", "p95", "p99"):
        figure.add_bar(x=list(policies), y=[entry["evaluation_latency"][key] for entry in policies.values()], name=key)
    return figure.update_layout(title=f"From publication to report{what}", yaxis_title="seconds", yaxis_type="log")


def _sweep(cells: list[dict[str, Any]]) -> go.Figure:
    """Useful FLOP per GPU-hour against latency: sharing and every partition, cell by cell."""
    figure = go.Figure()
    for cell in cells:
        label = f"rate {cell['failure_rate']:g}, load {cell['evaluation_load']:g}, {cell['nodes']} nodes"
        points = [("shared", cell["policies"]["planaria"])]
        points += [(f"{count} nodes", entry) for count, entry in cell["partitions"].items()]
        figure.add_scatter(
            x=[entry["p95_latency_seconds"]["mean"] for _, entry in points],
            y=[entry["useful_flop_per_gpu_hour"]["mean"] for _, entry in points],
            text=[name for name, _ in points], mode="markers+text", textposition="top center", name=label,
        )  # fmt: skip
    return figure.update_layout(
        title="Shared pool and fixed partitions", xaxis_title="p95 latency (s)", xaxis_type="log",
        yaxis_title="weighted FLOP kept per GPU-hour",
    )  # fmt: skip


def _rows(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _table(policies: Mapping[str, Any]) -> str:
    head = [
        "policy",
        "accumulated WAF",
        "useful FLOP",
        "ETTR",
        "GPU-hours",
        "cost",
        "makespan (s)",
        "p50 (s)",
        "p95",
        "p99",
    ]
    rows = []
    for name, entry in policies.items():
        latency = entry["evaluation_latency"]
        rows.append([
            name, f"{entry['accumulated_waf']:.5g}", f"{entry['useful_flop']:.5g}", f"{entry['ettr']:.4f}",
            f"{entry['gpu_hours']:.1f}", f"{entry['cost']:.0f}", f"{entry['makespan_seconds']:.0f}",
            *("" if latency[key] is None else f"{latency[key]:.0f}" for key in ("p50", "p95", "p99")),
        ])  # fmt: skip
    return _rows(head, rows)


def _interval(entry: Mapping[str, float], digits: str = ".4g") -> str:
    return f"{entry['mean']:{digits}} ({entry['low']:{digits}} to {entry['high']:{digits}})"


def _cells(cells: list[dict[str, Any]]) -> str:
    head = ["failure rate", "load", "nodes", "gain over the sized partition", "p95 shared (s)", "p95 partition (s)",
            "partition that is as quick", "gain over it"]  # fmt: skip
    rows = []
    for cell in cells:
        quick = cell["best_partition_as_quick"]
        rows.append([
            f"{cell['failure_rate']:g}", f"{cell['evaluation_load']:g}", str(cell["nodes"]),
            _interval(cell["gain_over_fixed_partition"]),
            _interval(cell["policies"]["planaria"]["p95_latency_seconds"], ".0f"),
            _interval(cell["policies"]["fixed-partition"]["p95_latency_seconds"], ".0f"),
            f"{quick['nodes']} nodes" if quick else "none", _interval(quick["gain"]) if quick else "",
        ])  # fmt: skip
    return _rows(head, rows)


def _rules(rules: Mapping[str, Any]) -> str:
    rows = []
    for name, entry in rules.items():
        quick = entry["best_partition_as_quick"]
        rows.append([
            name, _interval(entry["useful_flop_per_gpu_hour"]), _interval(entry["p95_latency_seconds"], ".0f"),
            f"{quick['nodes']} nodes" if quick else "none", _interval(quick["gain"]) if quick else "",
        ])  # fmt: skip
    head = ["rule", "useful FLOP per GPU-hour", "p95 latency (s)", "partition that is as quick", "gain over it"]
    return _rows(head, rows)


def _parameters() -> str:
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td>{value:g}</td><td class="source">{escape(source)}</td></tr>'
        for name, value, source in sources()
    )
    return f"<table><tr><th>parameter</th><th>value</th><th>source</th></tr>{rows}</table>"
