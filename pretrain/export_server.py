"""The resident exporter: ``python -m pretrain.export_server``, a JSON request per line in, a JSON answer per line out.

A request is ``{"checkpoint": folder or URL, "step", "target": folder}``, an answer ``{"ok": true}`` or
``{"ok": false, "reason"}``. It ends when its input does, so it never outlives the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from planner.errors import one_line


def serve() -> None:
    """Answer until the input ends. Only answers go to the output; whatever else is printed goes to the log."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from pretrain import export  # loads torch, while the first request is still to come

    for line in sys.stdin:
        answers.write(json.dumps(_answer(export.export, json.loads(line))) + "\n")


def _answer(export: Any, request: dict[str, Any]) -> dict[str, Any]:
    target = Path(request["target"])
    try:
        with contextlib.ExitStack() as stack:
            checkpoint = Path(request["checkpoint"])
            if "://" in request["checkpoint"]:
                checkpoint = _fetch(request["checkpoint"], int(request["step"]), target.parent, stack)
            export(checkpoint, target, created=time.time())
    except Exception as error:  # whatever one checkpoint does to us, the next one is to be exported
        return {"ok": False, "reason": f"{type(error).__name__}: {one_line(error)}"}
    return {"ok": True}


def _fetch(url: str, step: int, beside: Path, stack: contextlib.ExitStack) -> Path:
    """A checkpoint of an object store in a folder that goes when ``stack`` is left."""
    from planner import manifest
    from pretrain.targets import ObjectTarget

    beside.mkdir(parents=True, exist_ok=True)
    place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".fetched-", dir=beside)))
    checkpoint = place / manifest.step_dir_name(step)
    ObjectTarget(url.rpartition("/")[0], place).fetch(step, checkpoint)
    return checkpoint


if __name__ == "__main__":
    serve()
