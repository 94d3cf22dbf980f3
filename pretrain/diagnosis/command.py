"""``planaria diagnose``: JSON by contract, or a page a person can act on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from planner.errors import BadInputError
from pretrain.diagnosis.page import page
from pretrain.diagnosis.pipeline import collect, diagnose
from pretrain.diagnosis.together import together


def diagnose_command(paths: Sequence[Path], json_output: bool, one_job: bool = False) -> int:
    """Diagnose each file, or all as logs of ``one_job``; exit 0 whatever the verdict, 2 without a file."""
    for path in paths:
        if not path.is_file():
            raise BadInputError(f"{path}: no such log file; name one or more existing files")
    verdicts = [together([collect(path) for path in paths])] if one_job else [diagnose(path) for path in paths]
    if json_output:
        print(json.dumps([verdict.to_json() for verdict in verdicts], indent=2))
    else:
        print("\n".join(page(verdict) for verdict in verdicts), end="")
    return 0
