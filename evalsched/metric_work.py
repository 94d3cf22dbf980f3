"""What a metric worker does: lm-eval's own code, kept imported between jobs, never on a device."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from evalsched.recording import OFFLINE, RecordJob, record, stdout_to_stderr
from evalsched.scoring import ScoreJob, score

_importing = threading.Lock()


def preload() -> None:
    """Import lm-eval, without a device and without the network."""
    with _importing:
        os.environ.update(OFFLINE | {"CUDA_VISIBLE_DEVICES": ""})
        import evalsched.lm_recording
        import evalsched.lm_scoring  # noqa: F401


def do(what: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Record or score; what the modules of these names print when they are run.

    Raises:
        BadInputError: a task is unknown or cannot be loaded.
        WorkFailedError: answers are missing, or lm-eval failed.
    """
    preload()
    with stdout_to_stderr():
        if what == "record":
            return {"folder": str(record(RecordJob.from_json(job)).folder)}
        return score(ScoreJob.from_json(job)).to_json()
