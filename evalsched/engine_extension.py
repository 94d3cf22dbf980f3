"""What the engine asks of vLLM's workers, which with tensor parallelism are processes of their own."""

from __future__ import annotations

from typing import Any

from evalsched.scored_tail import ScoredTail


class EngineExtension(ScoredTail):
    """vLLM mixes it into its worker (``worker_extension_cls``); its methods are called by ``collective_rpc``."""

    def first_rows(self, name: str, count: int) -> tuple[tuple[int, ...], Any] | None:
        """(shape, the first rows on CPU) of a parameter; None where it has none of that name (merged ones have not)."""
        held = dict(self.model_runner.get_model().named_parameters()).get(name)
        return None if held is None else (tuple(held.shape), held[:count].detach().cpu())
