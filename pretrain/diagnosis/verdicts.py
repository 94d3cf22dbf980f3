"""Verdicts for the healing supervisor: what the end of a rank's log, or the traceback it sent, says is the cause.

By rules alone and within milliseconds: healing waits for it. Retrieval and the model are for people's questions.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planner.messages import LogVerdict
from pretrain.diagnosis.reading import AFTER_FRAME, LogLine, LogReader
from pretrain.diagnosis.root import Collector, Verdict, decide

LAST_BYTES = 256 * 1024
"""How much of a log's end is read: a rank's own log has its root near its end."""


def warm_up() -> None:
    """Load and compile the rules, so that the first verdict is as quick as any; for a thread of its own."""
    of_text(["Traceback (most recent call last):", "RuntimeError: warm up"])


def of_log(path: Path) -> LogVerdict | None:
    """What the end of a log says; None where it cannot be read or shows no root."""
    collected = Collector(str(path))
    try:
        reader = LogReader(path, last_bytes=LAST_BYTES)
        for block in reader.blocks():
            collected.feed_block(block)
    except Exception:  # a log may hold anything; what it does to us must not keep an exit from being reported
        return None
    lines = {item.line.number: item.line.text for item in collected.evidence}
    return _brief(decide(collected), lines)


def of_text(lines: Iterable[str]) -> LogVerdict | None:
    """What some lines, a traceback or an exception's words, say."""
    collected, texts, framed = Collector("exception"), dict(enumerate(lines, start=1)), 0
    for number, text in texts.items():
        collected.feed(LogLine("exception", number, text), framed > 0)
        framed = AFTER_FRAME if '  File "' in text else max(0, framed - 1)
    return _brief(decide(collected), texts)


def examined(message: Any) -> Any:
    """A rank's message, with a verdict where it speaks of an exception of its own."""
    if message.kind == "exception":
        lines = [*message.traceback.splitlines(), f"{message.type}: {message.message}"]
    elif message.kind == "left" and message.own:
        lines = f"{message.type}: {message.message}".splitlines()
    else:
        return message
    return message.model_copy(update={"verdict": of_text(lines)})


def _brief(verdict: Verdict, lines: dict[int, str]) -> LogVerdict | None:
    if verdict.method != "rule":
        return None
    evidence = lines.get(verdict.evidence[0], "") if verdict.evidence else ""
    return LogVerdict(root=verdict.root, confidence=verdict.confidence, evidence=evidence.strip()[:500])
