"""``planaria simulate``: a scenario under several policies, as JSON, a table, or a page with plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner.errors import BadInputError


def simulate_command(path: Path, json_output: bool = False, html: Path | None = None, seed: int | None = None) -> None:
    """Run a scenario and print its document (DESIGN.md, Contracts), or a table; ``html`` writes a page besides.

    Raises:
        BadInputError: the scenario cannot run; one line with file, field and value.
    """
    # numpy is loaded only here, the command line stays quick
    from planner.simulation.run import simulate

    if seed is not None and seed < 0:
        raise BadInputError(f"--seed {seed}: a seed is not negative")
    if html is not None and not html.parent.is_dir():
        raise BadInputError(f"--html {html}: the folder {html.parent} is not there; create it first")
    document = simulate(path, seed)
    if html is not None:
        from planner.simulation.page import write_page

        write_page(document, html)
    if json_output:
        print(json.dumps(document, allow_nan=False))
        return
    _print_table(document)


def _print_table(document: dict[str, Any]) -> None:
    from planner.simulation.figures import print_tables

    print_tables(document)
