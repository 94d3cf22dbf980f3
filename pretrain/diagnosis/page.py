"""The page of ``planaria diagnose`` without ``--json``: what happened, where, what to do, the lines that show it."""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pretrain.diagnosis.origin import find_rank
from pretrain.diagnosis.reading import clean
from pretrain.diagnosis.root import Verdict

MEANING = {
    "SEV1": "drain the node, re-plan on the rest",
    "SEV2": "restart the process",
    "SEV3": "retry in place",
    "STOP": "a person must act: it fails again",
    "NONE": "nothing to do",
}
SHOWN = 3
"""Lines of evidence shown; the rest is counted."""
LOOK_BACK = 400
"""Lines before an exception that are searched for the last frame of its traceback."""
INDENT = "    "


def page(verdict: Verdict, width: int = 110) -> str:
    """The text of one verdict; plain, so that it can be mailed and pasted."""
    where = ", ".join(part for part in (
        f"node {verdict.node}" if verdict.node else "",
        f"rank {verdict.rank}" if verdict.rank is not None else "") if part)  # fmt: skip
    rows = [
        verdict.file,
        f"  {verdict.root}"
        + (f" on {where}" if where else "")
        + f"  [{verdict.severity}: {MEANING[verdict.severity]}]",
        *_wrapped("what", verdict.explanation + _source(verdict), width),
        *_wrapped("do", verdict.action, width),
    ]
    if when := _when(verdict):
        rows += _wrapped("when", when, width)
    rows += _evidence(verdict, width)
    if verdict.cascades:
        folded = ", ".join(
            f"{name.replace('-', ' ')} × {count} (line {first})" for name, count, first in verdict.cascades
        )
        rows += _wrapped("echoes", folded, width)
    return "\n".join(rows) + "\n"


def _source(verdict: Verdict) -> str:
    if verdict.method == "none":
        return ""
    by = {"rule": "by rule", "retrieval": "by likeness to earlier incidents: check it", "llm": "by a model: check it"}
    return f" ({verdict.category}; confidence {verdict.confidence:.2f}, {by[verdict.method]})"


def _when(verdict: Verdict) -> str:
    parts = []
    if verdict.time is not None:
        stamp = datetime.fromtimestamp(verdict.time, tz=UTC)
        parts.append(stamp.strftime("%Y-%m-%d %H:%M:%S" if stamp.year != 2000 else "%m-%d %H:%M:%S"))
    if verdict.last_step is not None:
        parts.append(f"after step {verdict.last_step[0]} (line {verdict.last_step[1]})")
    return ", ".join(parts)


def _wrapped(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=f"  {label:<8}", subsequent_indent=" " * 10, break_on_hyphens=False
    )


def _evidence(verdict: Verdict, width: int) -> list[str]:
    rows = []
    for number, frame, text in _lines(Path(verdict.file), verdict.evidence[:SHOWN]):
        if frame:
            rows += _numbered(frame[0], frame[1], width, lines=1)
        rows += _numbered(number, text, width)
    more = len(verdict.evidence) - SHOWN
    return [*rows, f"{INDENT}{'…':>6}  {more} more like it"] if more > 0 else rows


def _numbered(number: int, text: str, width: int, lines: int = 3) -> list[str]:
    head = f"{INDENT}{number:>6}  "
    pieces = textwrap.wrap(text.strip(), width - len(head), break_on_hyphens=False) or [""]
    if len(pieces) > lines:
        pieces = [*pieces[:lines]]
        pieces[-1] = pieces[-1][: width - len(head) - 2] + " …"
    return [head + pieces[0], *(" " * len(head) + piece for piece in pieces[1:])]


def _lines(path: Path, numbers: Sequence[int]) -> Iterator[tuple[int, tuple[int, str] | None, str]]:
    """The named lines in the order asked, each with the last frame of its own rank's traceback before it, if any."""
    wanted, found = set(numbers), dict[int, tuple[tuple[int, str] | None, str]]()
    before: deque[tuple[int, bytes]] = deque(maxlen=LOOK_BACK)
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if number in wanted:
                text = clean(raw)
                found[number] = (_frame_before(before, find_rank(text)), text)
                if len(found) == len(wanted):
                    break
            before.append((number, raw))
    return ((number, *found[number]) for number in numbers if number in found)


def _frame_before(before: Sequence[tuple[int, bytes]], rank: int | None) -> tuple[int, str] | None:
    """The nearest frame above, of the same rank; none once its traceback's head or another rank-less line is passed."""
    for number, raw in reversed(before):
        text = clean(raw)
        if find_rank(text) != rank:
            continue
        if '  File "' in text:
            return number, text
        if "Traceback (most recent" in text or (rank is None and not text.startswith(" ")):
            return None
    return None
