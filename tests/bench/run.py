"""``make bench``: run the benchmarks, print tables, keep JSON. ``ARGS="allocator --quick"`` picks one."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

from tests.bench.figures import Figure, machine, table, to_json

HERE = Path(__file__).parent
HARNESS = {"run", "figures", "__init__"}


def names() -> list[str]:
    """Benchmarks: modules of this folder that define ``measure``."""
    return sorted(
        path.stem for path in HERE.glob("*.py") if path.stem not in HARNESS and "def measure(" in path.read_text()
    )


def run_one(name: str, quick: bool, results: Path) -> list[Figure]:
    """Run one benchmark and keep its figures as ``<results>/<name>.json``."""
    described, started = machine(), time.time()
    figures: list[Figure] = importlib.import_module(f"tests.bench.{name}").measure(quick)
    document = {"benchmark": name, "machine": described, "quick": quick, "seconds": time.time() - started,
                "figures": to_json(figures)}  # fmt: skip
    (results / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    return figures


def main() -> int:
    """Exit 1 when a benchmark could not be run; a figure under its bar is shown, not an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks to run; all when left out")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(names())
    if unknown:
        parser.error(f"unknown benchmark {sorted(unknown)}; there are {names()}")
    results = HERE.parent.parent / "bench-results"
    results.mkdir(exist_ok=True)
    failed, described = [], machine()
    print(
        f"machine: {described['cpu']}, {described['cores']} cores, {described['memory_gib']} GiB, "
        f"Python {described['python']}"
    )
    for name in arguments.names or names():
        print(f"\n## {name}", flush=True)
        try:
            print(table(run_one(name, arguments.quick, results)), flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    if failed:
        print(f"\nnot run to the end: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
