"""Verdicts on programs between scorings: what is known is not run again, what a bound ended is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evalsched.program_cache import NAME, remembered, remembering
from evalsched.sandbox import Limits, Verdict

ran: list[str] = []


def run(programs: Sequence[str]) -> list[Verdict]:
    ran.extend(programs)
    return [Verdict(outcome="timed out" if "loop" in one else "passed", detail=one, seconds=0.1) for one in programs]


def test_only_what_is_not_known_is_run(tmp_path: Path) -> None:
    ran.clear()
    limits = Limits()
    first = remembered(["a"], limits, run)
    assert not (tmp_path / NAME).exists(), "outside of a scoring nothing is kept"
    with remembering(tmp_path):
        assert [one.detail for one in remembered(["a", "loop", "b"], limits, run)] == ["a", "loop", "b"]
    with (tmp_path / NAME).open("a") as stream:
        stream.write('{"key": "cut of')
    ran.clear()
    with remembering(tmp_path):
        found = remembered(["b", "loop", "a", "c"], limits, run)
        assert remembered(["a"], Limits(wall_seconds=1.0), run)[0].passed
    assert [one.detail for one in found] == ["b", "loop", "a", "c"]
    assert ran == ["loop", "c", "a"], "other limits are another question"
    assert found[2] == first[0]
