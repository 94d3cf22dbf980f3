"""The policies that are compared, by name."""

from __future__ import annotations

from planner.simulation.parameters import Parameters
from planner.simulation.policies.base import Policy
from planner.simulation.policies.elastic import Bamboo, Oobleck, Recycle, Varuna
from planner.simulation.policies.planaria import Planaria
from planner.simulation.policies.restart import MegatronRestart
from planner.simulation.policies.unicron import Unicron

_CLASSES: dict[str, type[Policy]] = {
    "planaria": Planaria,
    "unicron": Unicron,
    "fixed-partition": Unicron,
    "one-job-per-dataset": Unicron,
    "megatron-restart": MegatronRestart,
    "oobleck": Oobleck,
    "varuna": Varuna,
    "bamboo": Bamboo,
    "recycle": Recycle,
}


def policy(name: str, parameters: Parameters) -> Policy:
    """A fresh policy. ``fixed-partition`` is Unicron on the nodes that evaluation does not have."""
    return _CLASSES[name](parameters)


__all__ = ["Policy", "policy"]
