"""The metric ``code_eval`` of the package ``evaluate``, in the sandbox; lm-eval's own code tasks run unchanged with it.

HumanEval, its infilling variants and MBPP load ``code_eval`` when their files are imported and hand it every program
that a model wrote. The original comes from the network and runs programs in processes of the scoring machine's user;
this one has its interface and its numbers, needs no network, and runs each program behind the sandbox's walls.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

from evalsched.code_metrics import SOLUTION_LIMITS, run_allowed, verdict_text
from evalsched.sandbox import Limits

_loading: contextvars.ContextVar[bool] = contextvars.ContextVar("loading", default=False)


@contextlib.contextmanager
def loading_tasks() -> Iterator[None]:
    """While task files are imported nothing is run: they try the metric on a program of their own."""
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


class SandboxedCodeEval:
    """What ``evaluate.load("code_eval")`` gives here."""

    def compute(
        self,
        *,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1, 10, 100),
        timeout: float = 3.0,
        num_workers: int = 4,
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        """(pass@k per k for which every task has enough candidates, verdicts by task and candidate).

        ``timeout`` counts CPU seconds, so that verdicts do not depend on what else runs here; ``num_workers`` has no
        effect, programs run on as many cores as there are.

        Raises:
            MissingServiceError: there is no sandbox here, and nobody accepted the risk.
        """
        rows = [
            (task, number, f"{candidate}\n{test}")
            for task, (candidates, test) in enumerate(zip(predictions, references, strict=True))
            for number, candidate in enumerate(candidates)
        ]
        texts = ["not run"] * len(rows) if _loading.get() else _run([program for *_, program in rows], timeout)
        results: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for (task, number, _), text in zip(rows, texts, strict=True):
            verdict = {"task_id": task, "passed": text == "passed", "result": text, "completion_id": number}
            results.setdefault(task, []).append((number, verdict))
        counts = [(len(found), sum(one["passed"] for _, one in found)) for _, found in sorted(results.items())]
        shares = {
            f"pass@{one}": numpy.array([_pass_at(one, total, correct) for total, correct in counts]).mean()
            for one in k
            if all(total >= one for total, _ in counts)
        }
        return shares, results


def _run(programs: Sequence[str], timeout: float) -> list[str]:
    bounds: Limits = replace(SOLUTION_LIMITS, cpu_seconds=max(1, math.ceil(timeout)))
    return [verdict_text(one) for one in run_allowed(programs, bounds)]


def _pass_at(k: int, total: int, correct: int) -> float:
    """The unbiased estimate 1 - C(total - correct, k) / C(total, k), as ``code_eval`` computes it."""
    if total - correct < k:
        return 1.0
    return float(1.0 - numpy.prod(1.0 - k / numpy.arange(total - correct + 1, total + 1)))


def install() -> None:
    """Let ``evaluate.load("code_eval")`` give the sandboxed one in this process.

    ``evaluate`` itself is imported by the first task that needs it: it takes longer than lm-eval and all else together.
    """
    if "evaluate" in sys.modules:
        _sandbox(sys.modules["evaluate"])
    elif not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _sandbox(evaluate: Any) -> None:
    real = evaluate.load
    if getattr(real, "sandboxes_code_eval", False):
        return

    def load(path: str, *arguments: Any, **named: Any) -> Any:
        return SandboxedCodeEval() if path == "code_eval" else real(path, *arguments, **named)

    load.sandboxes_code_eval = True  # type: ignore[attr-defined]
    evaluate.load = load


class _Finder(MetaPathFinder):
    """Finds ``evaluate`` where it is, with a loader that changes it before whoever imports it sees it."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "evaluate" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _sandbox(module)


# ---------------------------------------------------------------- does a task run programs in no other way?


_RUNNERS = frozenset({"exec", "eval", "compile", "__import__"})
_MODULES = frozenset({"subprocess", "multiprocessing", "ctypes", "pty", "runpy", "code", "importlib", "concurrent"})
_OF_OS = ("system", "popen", "exec", "spawn", "posix_spawn", "fork")


def own_ways(source: str) -> list[str]:
    """Names by which a task's source could run a program by itself, such as ``subprocess`` or ``exec``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id in _RUNNERS:
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and node.attr.startswith(_OF_OS) and _name(node.value) == "os":
            found.add(f"os.{node.attr}")
        elif isinstance(node, ast.Import):
            found.update(_MODULES & {alias.name.partition(".")[0] for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            found.update(_MODULES & {(node.module or "").partition(".")[0]})
            if node.module == "os":
                found.update(f"os.{alias.name}" for alias in node.names if alias.name.startswith(_OF_OS))
    return sorted(found)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def uses_only_the_sandbox(task: Any) -> bool:
    """Whether a task's own code runs programs through ``code_eval`` and names no other way to run one.

    It tells a task that needs the user's consent from one that does not; it is no defence against the task's author.
    """
    spaces = {str(space.get("__file__")): space for space in map(_space, _functions(task)) if space is not None}
    if not any(isinstance(value, SandboxedCodeEval) for space in spaces.values() for value in space.values()):
        return False
    return all(not own_ways(_source(file)) for file in spaces)


def _functions(task: Any) -> Iterator[Callable[..., Any]]:
    """The functions that a task file names: metrics, filters, everything in its configuration."""
    yield from (value for value in getattr(task, "_metric_fn_list", {}).values() if callable(value))
    for ensemble in getattr(task, "_filters", ()):
        for step in ensemble.filters:
            yield from (value for value in getattr(step, "keywords", {}).values() if callable(value))
    yield from (value for value in vars(task.config).values() if callable(value))


def _space(function: Callable[..., Any]) -> dict[str, Any] | None:
    """The names of the file that a function is from; None for lm-eval's own library."""
    own = getattr(function, "func", None) or getattr(function, "__self__", None)  # a partial; lm-eval's f.__call__
    function = own if callable(own) else function
    space: dict[str, Any] = getattr(function, "__globals__", None) or vars(sys.modules[type(function).__module__])
    return None if str(space.get("__name__")).startswith(("lm_eval.api", "lm_eval.filters", "builtins")) else space


def _source(file: str) -> str:
    """A file's text; what cannot be read counts as code that could do anything."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:
        return "exec"
