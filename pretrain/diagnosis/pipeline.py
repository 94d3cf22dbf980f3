"""One call from files to verdicts: read, collect, decide."""

from __future__ import annotations

from pathlib import Path

from pretrain.diagnosis.reading import LogReader
from pretrain.diagnosis.root import Collector, Verdict, decide


def collect(path: Path) -> Collector:
    """Everything the decision needs of one log, in one pass and bounded memory."""
    reader = LogReader(path)
    collected = Collector(str(path))
    for line in reader:
        collected.feed(line)
    collected.cut, collected.lines = reader.cut, reader.lines
    return collected


def diagnose(path: Path) -> Verdict:
    """The root cause of one log by rules."""
    return decide(collect(path))
