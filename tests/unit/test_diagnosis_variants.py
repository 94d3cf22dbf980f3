"""Many stacks' wordings: the root, where it happened, the line that shows it, and never a stop that is not due."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.diagnosis.pipeline import diagnose
from tests.support.failure_variants import Case, variants


@pytest.mark.parametrize("case", variants(), ids=lambda case: case.name)
def test_other_wordings(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "job.log"
    path.write_text(case.text())
    verdict = diagnose(path)
    assert verdict.root in (case.root, *case.alternatives)
    assert verdict.severity in case.severities, "a false STOP ends a job that could go on"
    assert case.node is None or verdict.node == case.node
    assert case.rank is None or verdict.rank == case.rank
    assert not case.evidence or set(verdict.evidence) & set(case.evidence)
