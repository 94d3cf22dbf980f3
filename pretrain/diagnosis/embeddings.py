"""Embeddings of logs and incidents by an OpenAI-compatible endpoint, for retrieval.

Off unless an endpoint is configured; nothing leaves the machine before that. The log is cut to what embedding models
read; the endpoint's answers are only compared, never followed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from pydantic import Field

from planner.errors import MissingServiceError, one_line
from planner.loading import Settings

MOST_CHARACTERS = 6000
"""Of one text; embedding models read some thousand tokens."""
AT_ONCE = 64
"""Texts of one request."""


class EmbeddingSettings(Settings):
    """Where texts are embedded."""

    base_url: str
    """OpenAI-compatible endpoint."""
    model: str
    """Name of the model there."""
    api_key_env: str = "PLANARIA_LLM_KEY"
    """Environment variable that holds the key; a local server may need none."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Longest wait for one answer."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> EmbeddingSettings | None:
        """From ``PLANARIA_EMBEDDING_URL`` and ``PLANARIA_EMBEDDING_MODEL``; None, and off, where they are not set."""
        source = os.environ if environment is None else environment
        url, model = source.get("PLANARIA_EMBEDDING_URL"), source.get("PLANARIA_EMBEDDING_MODEL")
        return cls(base_url=url, model=model) if url and model else None


def embed(settings: EmbeddingSettings, texts: Sequence[str]) -> list[list[float]]:
    """One vector for each text, in order.

    Raises:
        MissingServiceError: the endpoint cannot be reached, refuses us, or answers with something else.
    """
    import openai

    key = os.environ.get(settings.api_key_env, "none")
    found: list[list[float]] = []
    with openai.OpenAI(
        base_url=settings.base_url, api_key=key, timeout=settings.timeout_seconds, max_retries=1
    ) as client:
        for start in range(0, len(texts), AT_ONCE):
            given = [text[:MOST_CHARACTERS] or " " for text in texts[start : start + AT_ONCE]]
            try:
                reply = client.embeddings.create(model=settings.model, input=given, encoding_format="float")
                found += [one.embedding for one in sorted(reply.data, key=lambda one: one.index)]
            except (openai.OpenAIError, AttributeError, TypeError, ValueError) as error:
                why = f"{type(error).__name__}: {one_line(error)[:120]}"
                raise MissingServiceError(f"{settings.base_url}: no embeddings from the endpoint ({why})") from error
    if len(found) != len(texts) or len({len(vector) for vector in found}) != 1:
        raise MissingServiceError(f"{settings.base_url}: {len(found)} embeddings for {len(texts)} texts")
    return found
