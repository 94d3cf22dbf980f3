"""The evaluation scheduler: lm-eval requests recorded, cut into shards, run by vLLM through Celery, scored by replay.

``evalsched.evaluate(model, tasks, …)`` is the Python call beside ``planaria eval``. Names load when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalsched.evaluate import EvaluationResult, evaluate

__all__ = ["EvaluationResult", "evaluate"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("evalsched.evaluate"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
