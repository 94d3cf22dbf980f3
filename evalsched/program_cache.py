"""Verdicts on programs that a model wrote, kept between scorings of one run.

A task's programs are run as soon as its last response is in, while others are still being answered
(:func:`evalsched.finishing.score_early`); the scoring at the end, which needs all tasks at once, then finds their
verdicts here. Only plain ends are kept: what a bound ended is run again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evalsched.sandbox import Limits, Verdict
from evalsched.types import digest_of

NAME = ".programs.jsonl"
_folders: list[Path] = []


@contextlib.contextmanager
def remembering(folder: Path) -> Iterator[None]:
    """Keep verdicts of the scoring inside in ``folder``."""
    _folders.append(folder)
    try:
        yield
    finally:
        _folders.remove(folder)


def remembered(programs: Sequence[str], limits: Limits, run: Callable[[Sequence[str]], list[Verdict]]) -> list[Verdict]:
    """The verdict on each program; ``run`` gives those that are not known."""
    if not _folders:
        return run(programs)
    path = _folders[-1] / NAME
    keys = [digest_of([one, asdict(limits)]) for one in programs]
    known = _read(path)
    missing = [number for number, key in enumerate(keys) if key not in known]
    fresh = dict(zip(missing, run([programs[number] for number in missing]), strict=True)) if missing else {}
    with path.open("a", encoding="utf-8") as stream:
        for number, verdict in fresh.items():
            if verdict.outcome in ("passed", "failed"):
                stream.write(json.dumps({"key": keys[number], "verdict": asdict(verdict)}) + "\n")
    return [fresh[number] if number in fresh else known[key] for number, key in enumerate(keys)]


def _read(path: Path) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a death cut off
                data: dict[str, Any] = json.loads(line)
                found[data["key"]] = Verdict(**data["verdict"])
    return found
