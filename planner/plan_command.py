"""``planaria plan``: the optimal slots per job, priced and explained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from planner.errors import BadInputError
from planner.plan_input import read_plan_input
from planner.program import TooLargeError
from planner.solver import decide
from planner.types import Cluster, Decision

RUNNERS_UP = 5
"""Alternatives that ``--explain`` shows."""


def plan_command(paths: Sequence[Path], json_output: bool = False, explain: bool = False) -> None:
    """Plan each file and print the plans: one JSON document (a list if there are several files), or tables.

    Every file is read and planned before anything is printed.

    Raises:
        BadInputError: the first thing that is wrong in any of the files.
    """
    planned = [(path, *plan_file(path, explain)) for path in paths]
    if json_output:
        documents = [to_json(decision, explain) for _, _, decision in planned]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, allow_nan=False))
        return
    _print_tables(planned)


def plan_file(path: Path, explain: bool = False) -> tuple[Cluster, Decision]:
    """The cluster that a file describes and the decision for it."""
    cluster, jobs = read_plan_input(path)
    try:
        decision = decide(cluster, jobs, explain=explain)
    except (BadInputError, TooLargeError) as error:
        raise BadInputError(f"{path}: {error}") from error
    if not isfinite(decision.plan.objective):
        raise BadInputError(f"{path}: jobs: the objective is beyond floating point; use smaller throughputs")
    return cluster, decision


def to_json(decision: Decision, explain: bool = False) -> dict[str, Any]:
    """The document of DESIGN.md; ``runner_ups`` is there only with ``--explain``."""
    document: dict[str, Any] = {
        "assignments": dict(decision.plan.assignments),
        "unassigned": decision.plan.unassigned,
        "objective": decision.plan.objective,
        "reason": decision.reason,
        "jobs": {},
    }
    for price in decision.prices:
        entry: dict[str, Any] = {"waf": price.waf, "transition_cost": price.transition_cost}
        if price.layout is not None:
            entry["parallel"] = price.layout.to_json()
        document["jobs"][price.name] = entry
    if explain:
        document["runner_ups"] = [
            {
                "label": other.label,
                "assignments": dict(other.plan.assignments),
                "unassigned": other.plan.unassigned,
                "objective": other.plan.objective,
                "cost": other.cost,
            }
            for other in decision.alternatives[:RUNNERS_UP]
        ]
    return document


def _print_tables(planned: Sequence[tuple[Path, Cluster, Decision]]) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    for path, cluster, decision in planned:
        _print_plan(console, path, cluster, decision)


def _print_plan(console: Any, path: Path, cluster: Cluster, decision: Decision) -> None:
    from rich.markup import escape
    from rich.table import Table

    plan = decision.plan
    table = Table(title=escape(f"{path}: {cluster.gpus} slots, D_running {cluster.running_seconds:.0f} s"))
    table.add_column("job", overflow="fold")
    for name in ("now", "plan", "WAF (FLOP/s)", "transition (FLOP)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout", no_wrap=True)
    for price in decision.prices:
        layout = price.layout
        table.add_row(
            escape(price.name),
            str(price.old),
            str(price.new) if price.old == price.new else f"[bold]{price.new}[/bold]",
            f"{price.waf:.4g}",
            f"{price.transition_cost:.4g}",
            f"TP{layout.tensor} PP{layout.pipeline} DP{layout.data}" if layout else "",
        )
    table.add_section()
    total = sum(price.waf for price in decision.prices)
    cost = sum(price.transition_cost for price in decision.prices)
    table.add_row("unassigned", "", str(plan.unassigned), f"{total:.4g}", f"{cost:.4g}", "")
    console.print(table)
    console.print(f"objective {plan.objective:.9g} FLOP")
    console.print(escape(decision.reason))
    if decision.alternatives:
        console.print("Runner-up plans:")
    for other in decision.alternatives[:RUNNERS_UP]:
        counts = ", ".join(f"{name} {count}" for name, count in other.plan.assignments.items())
        share = f" ({other.cost / abs(plan.objective):.2%})" if plan.objective else ""
        console.print(escape(f"  {other.label}: {counts}; costs {other.cost:.4g} FLOP{share} against the plan"))
