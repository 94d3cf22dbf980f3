"""``planaria diagnose``: JSON by contract, or a page a person can act on."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from planner.errors import BadInputError
from pretrain.diagnosis.pipeline import diagnose
from pretrain.diagnosis.root import Verdict


def diagnose_command(paths: Sequence[Path], json_output: bool) -> int:
    """Diagnose each file; exit 0 whatever the verdict, 2 when a file cannot be read."""
    for path in paths:
        if not path.is_file():
            raise BadInputError(f"{path}: no such log file; name one or more existing files")
    verdicts = [diagnose(path) for path in paths]
    if json_output:
        print(json.dumps([verdict.to_json() for verdict in verdicts], indent=2))
    else:
        for verdict in verdicts:
            _show(verdict)
    return 0


def _show(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    table = Table(title=verdict.file, show_header=False, title_justify="left", expand=False)
    where = ", ".join(part for part in (
        f"node {verdict.node}" if verdict.node else "",
        f"rank {verdict.rank}" if verdict.rank is not None else "") if part)  # fmt: skip
    table.add_row("root", f"[bold]{verdict.root}[/bold] ({verdict.category}), {verdict.severity}")
    table.add_row("what", verdict.explanation)
    table.add_row("where", where or "the log does not say")
    table.add_row("do", verdict.action)
    table.add_row("confidence", f"{verdict.confidence:.2f} by {verdict.method}")
    for number, text in _lines(Path(verdict.file), verdict.evidence[:3]):
        table.add_row(f"line {number}", text[:300])
    if verdict.cascades:
        table.add_row("cascades", ", ".join(f"{name} × {count}" for name, count in verdict.cascades))
    console.print(table)


def _lines(path: Path, numbers: Sequence[int]) -> list[tuple[int, str]]:
    from pretrain.diagnosis.reading import clean

    wanted = set(numbers)
    found: dict[int, str] = {}
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if number in wanted:
                found[number] = clean(raw)
                if len(found) == len(wanted):
                    break
    return [(number, found[number]) for number in numbers if number in found]
