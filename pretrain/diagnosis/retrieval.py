"""Retrieval: a log that no rule explains is compared with incidents that were diagnosed before.

Source: Acme, section 6.1 (compressed log looked up in a vector store). The embedded default is TF-IDF from
scikit-learn over words and word pairs; below a threshold the answer is "unknown", which is an answer too. Where an
endpoint for embeddings is configured (:mod:`pretrain.diagnosis.embeddings`) its vectors are compared instead. Any two
texts are alike to such a model, so what all incidents have in common (their mean) is taken off first: what is left
is near 0 for a log that is like none of them, and the same threshold holds (unverified with models of size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from planner.errors import BadInputError
from planner.files import append_json_line, read_json_lines
from planner.loading import Settings, validate
from pretrain.diagnosis.rules import classes

HERE = Path(__file__).parent
THRESHOLD = 0.22
"""Cosine similarity below which a neighbour says nothing."""
MARGIN = 1.25
"""How far the best class must be ahead of the next one."""

Embedder = Callable[[Sequence[str]], Sequence[Sequence[float]]]


class Incident(Settings):
    """A diagnosed incident."""

    root: str
    """Class of failure."""
    text: str
    """The telling lines of its compressed log."""
    note: str = ""
    """What it was, in a few words."""


@dataclass(frozen=True)
class Neighbour:
    """A diagnosed incident and how alike it is (cosine, 0 to 1)."""

    incident: Incident
    similarity: float


@dataclass(frozen=True)
class Retrieved:
    """The class that the neighbours agree on, or None; the neighbours themselves; a confidence."""

    root: str | None
    confidence: float
    neighbours: tuple[Neighbour, ...]


@lru_cache(maxsize=1)
def shipped_incidents() -> tuple[Incident, ...]:
    """The incidents that travel with the package."""
    path = HERE / "incidents.yaml"
    return tuple(validate(Incident, item, str(path)) for item in yaml.safe_load(path.read_text()))


class IncidentMemory:
    """Incidents of a site: one JSON-lines file below ``folder``, added to as persons confirm verdicts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "incidents.jsonl"

    def add(self, incident: Incident) -> None:
        """Remember a diagnosed incident.

        Raises:
            BadInputError: its root is no known class.
        """
        if incident.root not in classes():
            raise BadInputError(f"incident root {incident.root!r}: no class of failure; see classes.yaml")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_json_line(self.path, incident.model_dump())

    def all(self) -> list[Incident]:
        """Shipped incidents and the site's own."""
        return [
            *shipped_incidents(),
            *(validate(Incident, item, str(self.path)) for item in read_json_lines(self.path)),
        ]


def look_up(text: str, incidents: Sequence[Incident], embed: Embedder | None = None, count: int = 3) -> Retrieved:
    """The neighbours of a compressed log and the class they speak for.

    ``embed`` replaces TF-IDF (an OpenAI-compatible endpoint's embeddings); it gets all texts, the log's last.
    """
    if not text.strip() or not incidents:
        return Retrieved(None, 0.0, ())
    similarities = _by_embedding(text, incidents, embed) if embed is not None else _by_tfidf(text, incidents)
    order = sorted(range(len(incidents)), key=lambda index: (-similarities[index], index))
    neighbours = tuple(Neighbour(incidents[index], float(similarities[index])) for index in order[:count])
    best = neighbours[0]
    rival = next((item.similarity for item in neighbours if item.incident.root != best.incident.root), 0.0)
    clear = best.similarity >= THRESHOLD and best.similarity >= MARGIN * rival
    return Retrieved(best.incident.root if clear else None, min(0.6, best.similarity), neighbours)


def _by_tfidf(text: str, incidents: Sequence[Incident]) -> Sequence[float]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(
        lowercase=True,
        ngram_range=(1, 2),
        sublinear_tf=True,
        token_pattern=r"[A-Za-z][A-Za-z]{2,}",
        stop_words="english",
    )
    matrix = vectorizer.fit_transform([item.text for item in incidents])
    try:
        asked = vectorizer.transform([text])
    except ValueError:
        return [0.0] * len(incidents)
    scores: Sequence[float] = (matrix @ asked.T).toarray().ravel().tolist()
    return scores


def _by_embedding(text: str, incidents: Sequence[Incident], embed: Embedder) -> Sequence[float]:
    import numpy as np

    vectors = np.asarray(embed([*(item.text for item in incidents), text]), dtype=float)
    norms = np.linalg.norm(vectors, axis=1)
    norms[norms == 0] = 1.0
    unit = vectors / norms[:, None]
    unit -= unit[:-1].mean(axis=0)
    norms = np.linalg.norm(unit, axis=1)
    norms[norms == 0] = 1.0
    unit /= norms[:, None]
    scores: Sequence[float] = (unit[:-1] @ unit[-1]).tolist()
    return scores
