"""One call from files to verdicts: rules first, then retrieval, then (when configured) a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import MissingServiceError
from pretrain.diagnosis.reading import LogReader
from pretrain.diagnosis.root import Collector, Verdict, decide
from pretrain.diagnosis.rules import Rule, classes

if TYPE_CHECKING:
    from pretrain.diagnosis.retrieval import Incident, Retrieved


def collect(path: Path, extra_rules: Sequence[Rule] = ()) -> Collector:
    """Everything the decision needs of one log, in one pass and bounded memory."""
    reader = LogReader(path)
    collected = Collector(str(path), extra_rules=tuple(extra_rules))
    for block in reader.blocks():
        collected.feed_block(block)
    collected.cut, collected.lines = reader.cut, reader.lines
    return collected


def diagnose(path: Path, folder: Path | None = None) -> Verdict:
    """The root cause of one log.

    ``folder`` holds what a site has learned (incidents, accepted rules); without it only what is shipped is used.
    A verdict by retrieval or by a model never says STOP: it informs.
    """
    extra: list[Rule] = []
    if folder is not None:
        from pretrain.diagnosis.agent import ReviewFile

        extra = ReviewFile(folder).accepted()
    verdict = decide(collect(path, extra))
    if verdict.root != "unknown":
        return verdict
    return _open_question(path, verdict, folder)


def _open_question(path: Path, verdict: Verdict, folder: Path | None) -> Verdict:
    from pretrain.diagnosis.compression import compress
    from pretrain.diagnosis.kinds import is_echo
    from pretrain.diagnosis.progress import parse
    from pretrain.diagnosis.retrieval import IncidentMemory, shipped_incidents

    compressed = compress(path)
    firsts = [item.first for item in compressed.templates]
    telling = [line for line in firsts if not is_echo(line.text) and parse(line) is None]
    incidents = IncidentMemory(folder).all() if folder is not None else list(shipped_incidents())
    found, note = _neighbours("\n".join(line.text for line in telling), incidents)
    verdict = replace(verdict, explanation=verdict.explanation + note)
    if found.root is not None:
        lines = [line.number for line in telling[:3]]
        return _informing(verdict, found.root, found.confidence, lines, "retrieval")
    return _by_model(compressed, verdict, folder)


def _neighbours(text: str, incidents: Sequence[Incident]) -> tuple[Retrieved, str]:
    """What retrieval finds, by embeddings where they are configured and there; and a note where they are not there."""
    from pretrain.diagnosis.embeddings import EmbeddingSettings, embed
    from pretrain.diagnosis.retrieval import look_up

    settings = EmbeddingSettings.from_environment()
    if settings is None:
        return look_up(text, incidents), ""
    try:
        return look_up(text, incidents, embed=lambda texts: embed(settings, texts)), ""
    except MissingServiceError as error:
        return look_up(text, incidents), f"; compared by words, not by embeddings: {error}"


def _by_model(compressed: object, verdict: Verdict, folder: Path | None) -> Verdict:
    from pretrain.diagnosis.agent import AgentSettings, ReviewFile, ask, examine
    from pretrain.diagnosis.compression import Compressed

    settings = AgentSettings.from_environment()
    if settings is None or not isinstance(compressed, Compressed):
        return verdict
    try:
        opinion = ask(settings, compressed)
    except MissingServiceError as error:
        return replace(verdict, explanation=f"{verdict.explanation}; the model was not asked: {error}")
    if opinion.root is None:
        return verdict
    if opinion.rule is not None and folder is not None:
        texts = {item.first.number: item.first.text for item in compressed.templates}
        rule, _ = examine(opinion.rule, [texts[number] for number in opinion.evidence if number in texts])
        if rule is not None:
            ReviewFile(folder).propose(rule, verdict.file)
    answer = _informing(verdict, opinion.root, opinion.confidence, list(opinion.evidence), "llm")
    return replace(answer, action=opinion.remedy or answer.action)


def _informing(verdict: Verdict, root: str, confidence: float, lines: list[int], method: str) -> Verdict:
    known = classes()[root]
    severity = "SEV2" if known.severity == "STOP" else known.severity
    return replace(
        verdict, root=root, confidence=confidence, evidence=tuple(lines), method=method, category=known.category,
        severity=severity, action=known.action, explanation=known.explanation,
    )  # fmt: skip
