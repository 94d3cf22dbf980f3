"""What a training job is at a step boundary, apart from weights and optimizer: the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1


@dataclass
class TrainState:
    """Where the job stands. Together with weights and optimizer it makes a resumed run equal the uninterrupted one.

    No generator state is kept: every step seeds its generators from ``(seed, step)``, so that the state
    holds for any number of ranks (:func:`step_seed`).
    """

    seed: int
    """Seed of weights, sample order and every step's generators."""
    step: int = 0
    """Optimizer steps completed."""
    consumed_samples: int = 0
    """Positions of the sample order that are used up, skipped ones included; the data position is this alone."""
    incarnation: int = 0
    """The incarnation that made this state."""
    skipped: list[int] = field(default_factory=list)
    """Sample ids that were drawn and left out, by a guard against bad gradients or a decision to skip data."""
    data_digest: str = ""
    """Content digest of the training tokens, so that a resumed run notices other data."""
    unheard: list[dict[str, Any]] = field(default_factory=list)
    """Completed steps (:class:`planner.messages.RankStep`, and ``job``: the job folder's name) that rank 0 had said and
    nobody had confirmed: whoever goes on from this state says them, since that rank may end with its agent gone."""

    def to_json(self) -> dict[str, Any]:
        """The state as the JSON that a checkpoint holds."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "incarnation": self.incarnation,
            "skipped": list(self.skipped),
            "data_digest": self.data_digest,
            "unheard": list(self.unheard),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainState:
        """The state that :meth:`to_json` wrote.

        Raises:
            ValueError: another format, or a key missing.
        """
        if value.get("format") != FORMAT:
            raise ValueError(f"training state of format {value.get('format')!r}; this version reads format {FORMAT}")
        try:
            return cls(
                seed=int(value["seed"]),
                step=int(value["step"]),
                consumed_samples=int(value["consumed_samples"]),
                incarnation=int(value["incarnation"]),
                skipped=[int(item) for item in value["skipped"]],
                data_digest=str(value["data_digest"]),
                unheard=list(value.get("unheard", [])),
            )
        except KeyError as error:
            raise ValueError(f"training state without the key {error}") from error


def step_seed(seed: int, step: int) -> int:
    """Seed of the random generators in ``step``: a function of the two numbers alone, in [0, 2^31)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed ^= mixed >> 31
    return (mixed * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF) >> 33
