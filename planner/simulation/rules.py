"""Simpler rules of lending, to compare the allocator's price with, and other settings of that price."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from planner.allocation import ClusterView
from planner.cost_aware import EVALUATION, CostAware
from planner.types import Decision, Plan

Planner = Callable[[ClusterView, int, float, Mapping[str, int]], Decision]


def fixed_loan(slots_lent: int) -> Callable[[CostAware], Planner]:
    """While reports wait, evaluation gets ``slots_lent`` slots off the top, and what training leaves."""

    def rule(planner: CostAware) -> Planner:
        def decide(view: ClusterView, slots: int, now: float, before: Mapping[str, int]) -> Decision:
            evaluation = next((demand for demand in view.demands if demand.holder == EVALUATION), None)
            if evaluation is None or evaluation.backlog_seconds <= 0:
                return planner(view, slots, now, before)
            training = replace(view, demands=tuple(d for d in view.demands if d.holder != EVALUATION))
            loan = min(slots_lent, max(0, slots - 1))
            decision = planner(training, slots - loan, now, before)
            plan = decision.plan
            counts = {**plan.assignments, EVALUATION: loan + plan.unassigned}
            return replace(decision, plan=Plan(counts, 0, plan.objective), reason=f"{loan} slots lent by rule")

        return decide

    return rule


def other_price(**settings: float) -> Callable[[CostAware], Planner]:
    """The allocator's price with other settings of :class:`planner.lending.LendingPolicy`."""

    def rule(planner: CostAware) -> Planner:
        lending = replace(planner.settings.lending, **settings)
        return replace(planner, settings=replace(planner.settings, lending=lending))

    return rule
