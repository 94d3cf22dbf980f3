"""Documents of the ``stdlib_*`` tasks, cut from the running interpreter's held-out library modules.

Deterministic for one Python version: files in name order, one seeded shuffle, no set order. Lengths fit a
window of 256 byte tokens. The YAML files in ``tasks/`` name the functions here as their custom datasets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from planner.stdlib_corpus import held_out_files

SEED = 2024
PASSAGE_BYTES = 1000
CONTEXT_BYTES = 200
END_BYTES = (4, 14)
"""Context and choice together stay below 254 bytes: a window of 256 less a begin-of-text and a new token."""
COMPLETE_CONTEXT_BYTES = 200
MAX_DOCUMENTS = {"passages": 1000, "next_lines": 1000, "completions": 500}

_WORD = re.compile(r"[A-Za-z_]{6,}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{5,23}")


def _sources(files: Iterable[Path] | None) -> Iterator[tuple[str, str]]:
    for path in held_out_files() if files is None else files:
        name = path.stem if path.stem != "__init__" else path.parent.name
        yield name, path.read_text(encoding="utf-8").expandtabs(8)


def _chosen(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """A seeded shuffle, so that a small ``limit`` meets all modules, and a bound on the number."""
    random.Random(f"{SEED}-{kind}").shuffle(documents)
    return documents[: MAX_DOCUMENTS[kind]]


def passages(files: Iterable[Path] | None = None) -> list[dict[str, Any]]:
    """Runs of whole lines of at most :data:`PASSAGE_BYTES` bytes: ``{"module", "text"}``."""
    found: list[dict[str, Any]] = []
    for module, source in _sources(files):
        block = ""
        for line in source.splitlines(keepends=True):
            if len((block + line).encode()) > PASSAGE_BYTES:
                if len(block) > PASSAGE_BYTES // 2:
                    found.append({"module": module, "text": block})
                block = ""
            block += line
    return _chosen(found, "passages")


def _tail(lines: list[str], limit: int) -> str:
    """As many of the last whole lines as fit ``limit`` bytes, each with its line end."""
    kept = ""
    for line in reversed(lines):
        if len((line + "\n" + kept).encode()) > limit:
            break
        kept = line + "\n" + kept
    return kept


def next_lines(files: Iterable[Path] | None = None) -> list[dict[str, Any]]:
    """How a line really goes on: ``{"module", "context", "choices" (4), "answer"}``.

    The context ends inside a word. The wrong choices are ends of other lines of the same file, cut inside a
    word too, those nearest in length from a random draw, so that neither length nor vocabulary gives the
    answer away. Whole lines were tried: a model of some million parameters learns nothing about them in the
    minutes of a demonstration, while ends of lines tell its first checkpoint from its last.
    """
    rng = random.Random(f"{SEED}-choices")
    found: list[dict[str, Any]] = []
    for module, source in _sources(files):
        lines = source.splitlines()
        cuts = [_cut(line, rng) for line in lines]
        ends = [line[cut:] for line, cut in zip(lines, cuts, strict=True) if cut]
        for number in range(4, len(lines)):
            cut = cuts[number]
            if not cut:
                continue
            truth, begun = lines[number][cut:], lines[number][:cut]
            context = _tail(lines[:number], CONTEXT_BYTES - len(begun.encode())) + begun
            wrong = _distractors(truth, ends, rng)
            if len(wrong) == 3 and "\n" in context:
                choices = [truth, *wrong]
                rng.shuffle(choices)
                found.append({"module": module, "context": context, "choices": choices, "answer": choices.index(truth)})
    return _chosen(found, "next_lines")


def _cut(line: str, rng: random.Random) -> int:
    """A place inside a word of six letters or more, three letters into it or later, near the line's end; 0: none."""
    places = [
        place
        for match in _WORD.finditer(line)
        for place in range(match.start() + 3, match.end() - 1)
        if END_BYTES[0] <= len(line[place:].encode()) <= END_BYTES[1] and len(line.encode()) <= CONTEXT_BYTES // 2
    ]
    return rng.choice(places) if places else 0


def _distractors(truth: str, ends: list[str], rng: random.Random) -> list[str]:
    """Three ends of other lines that begin with another letter than the true one and differ from each other."""
    drawn = dict.fromkeys(rng.sample(ends, min(40, len(ends))))
    unlike = [end for end in drawn if end[0] != truth[0]]
    return sorted(unlike, key=lambda end: abs(len(end) - len(truth)))[:3]


def completions(files: Iterable[Path] | None = None) -> list[dict[str, Any]]:
    """The rest of a name that the context already holds: ``{"module", "context", "target"}``."""
    found: list[dict[str, Any]] = []
    for module, source in _sources(files):
        lines = source.splitlines()
        for number in range(6, len(lines), 11):
            line = lines[number]
            for match in _IDENTIFIER.finditer(line):
                before = _tail(lines[:number], COMPLETE_CONTEXT_BYTES - len(line.encode()))
                if re.search(rf"\b{match.group()}\b", before):
                    cut = match.start() + 3
                    found.append({"module": module, "context": before + line[:cut], "target": match.group()[3:]})
                    break
    return _chosen(found, "completions")


def _dataset(make: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    import datasets

    return {"test": datasets.Dataset.from_list(make())}


def bits_per_byte_dataset(**_: Any) -> dict[str, Any]:
    """The test split of ``stdlib_bits_per_byte``."""
    return _dataset(passages)


def next_line_dataset(**_: Any) -> dict[str, Any]:
    """The test split of ``stdlib_next_line``."""
    return _dataset(next_lines)


def complete_dataset(**_: Any) -> dict[str, Any]:
    """The test split of ``stdlib_complete``."""
    return _dataset(completions)
