"""Metrics that run code which a model wrote, in the sandbox; prepared task files name the functions here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evalsched.program_cache import remembered
from evalsched.sandbox import Limits, Verdict, available, run_programs
from planner.errors import MissingServiceError

SOLUTION_LIMITS = Limits(wall_seconds=20.0, cpu_seconds=3, memory_bytes=1 << 30)
"""The reference executor gives 3 s; counted as CPU time the verdict does not depend on what else runs here."""

ALLOW = "PLANARIA_ALLOW_UNSAFE_CODE"
"""Set to 1: accept code execution without a sandbox."""


def why_not(sandboxed: bool, allowed: bool) -> str | None:
    """Why a code-execution task must not be scored here; None where it may.

    ``sandboxed``: its metric runs programs in our sandbox; ``allowed``: the user accepts the risk.
    """
    if allowed or os.environ.get(ALLOW) == "1":
        return None
    hint = f"accept the risk with {ALLOW}=1"
    if not sandboxed:
        return f"its metric runs code that the model wrote in a way of its own, outside our sandbox; {hint}"
    try:
        available()
    except MissingServiceError as error:
        return f"{error}, or {hint}"
    return None


def human_eval_program(doc: Mapping[str, Any], completion: str) -> str:
    """The program that the reference executor builds: prompt, completion, test, call of the check."""
    return f"{doc['prompt']}{completion}\n{doc['test']}\ncheck({doc['entry_point']})"


def run_solutions(resps: Iterable[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """lm-eval filter: from completions to verdicts (``passed``, or how it failed), all run side by side."""
    found = [list(group) for group in resps]
    programs = [human_eval_program(doc, one) for group, doc in zip(found, docs, strict=True) for one in group]
    verdicts = iter(remembered(programs, SOLUTION_LIMITS, lambda new: run_allowed(new, SOLUTION_LIMITS)))
    return [[verdict_text(next(verdicts)) for _ in group] for group in found]


def run_allowed(programs: Sequence[str], limits: Limits) -> list[Verdict]:
    """Run programs in the sandbox; without its walls only where the user accepted the risk and there is no other way.

    Raises:
        MissingServiceError: there is no sandbox here, and nobody accepted the risk.
    """
    try:
        kind = available()
    except MissingServiceError:
        if os.environ.get(ALLOW) != "1":
            raise
        kind = "none"
    return run_programs(programs, limits, kind=kind)


def verdict_text(verdict: Verdict) -> str:
    """``passed``, or how it failed."""
    if verdict.outcome in ("passed", "failed"):
        return str(verdict.detail)
    return f"{verdict.outcome}: {verdict.detail}"


def pass_at_1(doc: Mapping[str, Any], results: Sequence[Sequence[str]]) -> dict[str, float]:
    """Share of a document's completions that passed (of one completion: 0 or 1)."""
    verdicts = results[0]
    return {"pass@1": sum(verdict == "passed" for verdict in verdicts) / len(verdicts)}
