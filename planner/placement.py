"""From counts to concrete slots: tensor groups within nodes, the least state moved, whole nodes for training.

What is proven. Let every job's count be a multiple of its group, let each group size divide the next larger one, and
for each group size g let the jobs with groups of g or more have at most ``C_g = Σ over nodes of g·⌊c/g⌋`` slots
together (c: a node's usable slots). Then :func:`place` succeeds. *Proof.* Groups are placed largest first. When
size g is up, only multiples of g have been taken from a node, so it has room for ``⌊c/g⌋ − taken/g`` more groups: on
no node does the way in which the larger ones lie lose any room. So there are ``C_g/g − (larger ones)/g`` free
places, and by assumption no more groups than that. ∎ The condition is necessary too. The solver plans under the same
ceilings (:func:`planner.ceilings.ceilings`; on undamaged nodes they are the capacity), so a plan that is optimal in
counts can be placed.

Moves: a slot that is new to its job needs state sent to it. Within one group size the placement is a minimum-cost
flow, so the bytes moved are the least possible given the larger groups; over all sizes they are the least possible
when all jobs have one group size. Smaller groups are pushed aside by larger ones only as far as the flow finds it
cheapest. Ties go to the job's own switch, then training takes the emptiest nodes and evaluation the fullest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

from planner.ceilings import usable
from planner.topology import Topology, is_chain
from planner.types import JobKind, Slot

Edges = Mapping[tuple[str, ...], Mapping[tuple[str, ...], Mapping[int, int]]]
"""A flow in a multigraph: from → to → key → amount."""


class NotPlaceableError(ValueError):
    """The counts cannot be placed; the message says which group size lacks how many slots."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One job to place: ``count`` slots in groups of ``group``; ``held`` are its slots now."""

    job: str
    count: int
    group: int = 1
    kind: JobKind = JobKind.PRETRAIN
    held: frozenset[Slot] = frozenset()
    state: int = 1
    """Relative size of the state that a new slot needs (an integer, 0 for none)."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Slots per job, in order of node and index: consecutive ones of a group form a tensor group."""

    slots: Mapping[str, tuple[Slot, ...]]
    new: Mapping[str, tuple[Slot, ...]]
    """Slots that the job did not hold before: state must be sent there."""
    released: Mapping[str, tuple[Slot, ...]]


def check(topology: Topology, requests: Sequence[Request]) -> None:
    """Whether the requests can be placed.

    Raises:
        NotPlaceableError: a count is no multiple of its group, the group sizes do not divide each other, or some
            group size lacks slots.
    """
    for request in requests:
        if request.count % request.group:
            raise NotPlaceableError(
                f"{request.job}: {request.count} slots are no multiple of its group {request.group}"
            )
    groups = sorted({request.group for request in requests if request.count})
    if not is_chain(groups):
        raise NotPlaceableError(f"group sizes {groups}: each must divide the next larger one")
    for group in groups:
        wanted = sum(request.count for request in requests if request.group >= group)
        most = usable(topology.capacities.values(), group)
        if wanted > most:
            raise NotPlaceableError(f"groups of {group} or more want {wanted} slots, the nodes have room for {most}")


def place(topology: Topology, requests: Sequence[Request]) -> Placement:
    """Slots for each request. Deterministic.

    Raises:
        NotPlaceableError: see :func:`check`.
    """
    check(topology, requests)
    left = dict(topology.capacities)
    per_node: dict[str, dict[str, int]] = {}
    ordered = sorted(requests, key=lambda request: (-request.group, request.kind is JobKind.EVALUATION, request.job))
    while ordered:
        first = ordered[0]
        batch = [
            r
            for r in ordered
            if (r.group, r.kind is JobKind.EVALUATION) == (first.group, first.kind is JobKind.EVALUATION)
        ]
        ordered = ordered[len(batch) :]
        for job, nodes in _Flow(topology, batch, ordered, left).solve().items():
            per_node[job] = nodes
            for node, count in nodes.items():
                left[node] -= count
    return _choose_slots(topology, requests, per_node)


class _Flow:
    """The minimum-cost flow of one batch: jobs of one group size and kind onto what is left of the nodes."""

    def __init__(
        self, topology: Topology, batch: Sequence[Request], later: Sequence[Request], left: Mapping[str, int]
    ) -> None:
        self.topology = topology
        self.group = batch[0].group
        self.evaluation = batch[0].kind is JobKind.EVALUATION
        self.batch = [request for request in batch if request.count]
        self.left = dict(left)
        self.later = _count_held(topology, later)
        self.held = _count_held(topology, batch)
        self.kept: dict[str, dict[str, int]] = {request.job: {} for request in batch}
        # One slot's unit of state outweighs all ties together (integers, as networkx needs).
        self.far = len(self.left) + 1
        self.move = 2 * self.far * (sum(request.count for request in batch) // self.group + 1)

    def solve(self) -> dict[str, dict[str, int]]:
        """Slots per job and node."""
        moving = [request for request in self.batch if not self._keeps(request)]
        if moving:
            self._flow(moving)
        return self.kept

    def _keeps(self, request: Request) -> bool:
        """A job that keeps its count on whole groups stays where it is, if larger groups leave it there."""
        held = self.held.get(request.job, {})
        if sum(held.values()) != request.count or any(count % self.group for count in held.values()):
            return False
        if any(self.left[node] < count for node, count in held.items()):
            return False
        started = (other.get(node, 0) for other in self.held.values() for node in held)
        if any(count % self.group for count in started):
            return False  # another job could complete a group here: that is for the flow to weigh
        for node, count in held.items():
            self._take(request.job, node, count)
        return True

    def _take(self, job: str, node: str, count: int) -> None:
        self.kept[job][node] = self.kept[job].get(node, 0) + count
        self.left[node] -= count

    def _flow(self, moving: Sequence[Request]) -> None:
        graph: nx.MultiDiGraph[Any] = nx.MultiDiGraph()
        total = 0
        for request in moving:
            need = request.count // self.group
            total += need
            graph.add_node(("job", request.job), demand=-need)
            self._job_edges(graph, request)
        graph.add_node(("sink",), demand=total)
        for rank, node in enumerate(self._ranked()):
            self._node_edges(graph, node, rank)
        _, flow = nx.network_simplex(graph)
        for request in moving:
            for target, edges in flow[("job", request.job)].items():
                if target[0] == "node":
                    count = sum(edges.values())
                    if count:
                        self._take(request.job, target[1], count * self.group)
        self._spread(flow, moving)

    def _spread(self, flow: Edges, moving: Sequence[Request]) -> None:
        """Groups that went through a switch come down on its nodes, in the nodes' order, job by job."""
        for switch in sorted({node.switch for node in self.topology.nodes}):
            hub = ("switch", switch)
            if hub not in flow:
                continue
            places = [(node[1], sum(edges.values())) for node, edges in flow[hub].items()]
            free = [node for node, count in sorted(places) for _ in range(count)]
            for request in moving:
                count = sum(flow[("job", request.job)].get(hub, {}).values())
                for node in free[:count]:
                    self._take(request.job, node, self.group)
                free = free[count:]

    def _job_edges(self, graph: nx.MultiDiGraph[Any], request: Request) -> None:
        """To nodes where it holds slots: whole groups free, one started group at what it lacks; anywhere by switch."""
        unit = request.state * self.move
        held = self.held.get(request.job, {})
        for node, count in sorted(held.items()):
            whole, rest = divmod(count, self.group)
            if whole:
                graph.add_edge(("job", request.job), ("node", node), capacity=whole, weight=0)
            if rest:
                graph.add_edge(("job", request.job), ("node", node), capacity=1, weight=(self.group - rest) * unit)
        near = {self.topology.by_name[node].switch for node in held}
        for switch in sorted({node.switch for node in self.topology.nodes}):
            away = 0 if switch in near or not held else self.far
            graph.add_edge(("job", request.job), ("switch", switch), weight=self.group * unit + away)

    def _ranked(self) -> list[str]:
        """Training goes to the emptiest nodes first, evaluation to the fullest: fragments."""
        free = {node: left - self._displaced(node) for node, left in self.left.items()}
        sign = 1 if self.evaluation else -1
        return sorted(self.left, key=lambda node: (sign * free[node], node))

    def _displaced(self, node: str) -> int:
        """Slots that jobs placed later hold there now."""
        return sum(held.get(node, 0) for held in self.later.values())

    def _node_edges(self, graph: nx.MultiDiGraph[Any], node: str, rank: int) -> None:
        """Room for whole groups: first what nobody else holds, then what pushes later jobs aside, group by group."""
        room = self.left[node] // self.group
        if not room:
            return
        graph.add_edge(("switch", self.topology.by_name[node].switch), ("node", node), weight=0)
        unheld = max(0, self.left[node] - self._displaced(node))
        clear = min(room, unheld // self.group)
        if clear:
            graph.add_edge(("node", node), ("sink",), capacity=clear, weight=rank)
        if room > clear:
            part = self.group - (unheld - clear * self.group)
            graph.add_edge(("node", node), ("sink",), capacity=1, weight=rank + min(part, self.group) * self.move)
        if room > clear + 1:
            graph.add_edge(("node", node), ("sink",), capacity=room - clear - 1, weight=rank + self.group * self.move)


def _count_held(topology: Topology, requests: Sequence[Request]) -> dict[str, dict[str, int]]:
    """Per job and node, the usable slots that it holds now."""
    found: dict[str, dict[str, int]] = {}
    for request in requests:
        nodes: dict[str, int] = {}
        for slot in request.held:
            node = topology.by_name.get(slot.node)
            if node is not None and not node.cordoned and slot not in topology.lost:
                nodes[slot.node] = nodes.get(slot.node, 0) + 1
        found[request.job] = nodes
    return found


def _choose_slots(
    topology: Topology, requests: Sequence[Request], per_node: Mapping[str, Mapping[str, int]]
) -> Placement:
    """On each node a job keeps its own slots first; others then take the free ones by index."""
    taken: set[Slot] = set()
    chosen: dict[str, list[Slot]] = {request.job: [] for request in requests}
    usable_slots = {node.name: topology.slots_of(node) for node in topology.nodes}
    for request in requests:
        for node, count in per_node.get(request.job, {}).items():
            own = [slot for slot in usable_slots[node] if slot in request.held][:count]
            chosen[request.job] += own
            taken.update(own)
    for request in requests:
        for node, count in per_node.get(request.job, {}).items():
            lacking = count - sum(slot.node == node for slot in chosen[request.job])
            free = [slot for slot in usable_slots[node] if slot not in taken][:lacking]
            chosen[request.job] += free
            taken.update(free)
    slots = {job: tuple(sorted(found)) for job, found in chosen.items()}
    held = {request.job: request.held for request in requests}
    return Placement(
        slots=slots,
        new={job: tuple(slot for slot in found if slot not in held[job]) for job, found in slots.items()},
        released={job: tuple(sorted(held[job] - set(found))) for job, found in slots.items()},
    )
