"""``planaria.json`` inside a checkpoint: the settings and vocabulary that rebuild its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from planner import manifest
from planner.errors import BadInputError
from planner.loading import validate
from planner.pretrain_config import PretrainConfig

NAME = manifest.DESCRIPTION
FORMAT = 1


def describe(config: PretrainConfig, vocabulary: int) -> dict[str, Any]:
    """The document; ``vocabulary`` counts the embedding's rows, padding included."""
    return {"format": FORMAT, "config": config.to_json(), "vocabulary": vocabulary}


def read_description(path: Path) -> tuple[PretrainConfig, int]:
    """The settings and padded vocabulary that a checkpoint was made with.

    Raises:
        BadInputError: the file is missing or of another format.
    """
    source = path / NAME
    try:
        data = json.loads(source.read_text())
        if data.get("format") != FORMAT:
            raise BadInputError(f"{source}: format {data.get('format')!r} is not known (this version reads {FORMAT})")
        return validate(PretrainConfig, data["config"], str(source)), int(data["vocabulary"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError(f"{source}: no description of the model ({error})") from error
