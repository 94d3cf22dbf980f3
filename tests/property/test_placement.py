"""Placement: what is proven is tried on random clusters, and least movement is compared with trying everything."""

from __future__ import annotations

import itertools
import random
from functools import cache

import networkx as nx
import pytest

from planner.ceilings import ceilings
from planner.placement import NotPlaceableError, Placement, Request, check, place
from planner.solver import solve
from planner.topology import Distance, Topology, is_chain
from planner.types import Cluster, Job, JobKind, Node, Slot, ThroughputProfile


def random_requests(rng: random.Random, groups: list[int]) -> tuple[Topology, list[Request]]:
    nodes = tuple(Node(name=f"n{i}", slots=rng.choice([4, 8]), switch=f"s{i % 2}") for i in range(rng.randint(1, 5)))
    everything = [slot for node in nodes for slot in node.slot_list()]
    lost = frozenset(rng.sample(everything, rng.randint(0, 3)))
    pool = [slot for slot in everything if slot not in lost or rng.random() < 0.5]
    rng.shuffle(pool)
    requests = []
    for index in range(rng.randint(1, 4)):
        group = rng.choice(groups)
        held = frozenset(pool.pop() for _ in range(min(len(pool), rng.randint(0, 6))))
        count, kind, state = group * rng.randint(0, 6), rng.choice(list(JobKind)), rng.randint(0, 3)
        requests.append(Request(job=f"j{index}", count=count, group=group, held=held, kind=kind, state=state))
    return Topology(nodes, lost), requests


def verify(topology: Topology, requests: list[Request], placement: Placement) -> None:
    used = [slot for slots in placement.slots.values() for slot in slots]
    assert len(used) == len(set(used)), "a slot has two holders"
    for slot in used:
        assert slot in topology.slots_of(topology.by_name[slot.node])
    for request in requests:
        slots = placement.slots[request.job]
        assert len(slots) == request.count
        per_node: dict[str, int] = {}
        for slot in slots:
            per_node[slot.node] = per_node.get(slot.node, 0) + 1
        assert all(count % request.group == 0 for count in per_node.values()), "a group spans nodes"
        assert set(placement.new[request.job]) == set(slots) - request.held
        assert set(placement.released[request.job]) == set(request.held) - set(slots)


@pytest.mark.parametrize("block", range(4))
def test_whatever_meets_the_ceilings_is_placed(block: int) -> None:
    placed = 0
    for number in range(300):
        topology, requests = random_requests(random.Random(f"{block}/{number}"), [1, 2, 4])
        try:
            check(topology, requests)
        except NotPlaceableError:
            continue
        verify(topology, requests, place(topology, requests))
        placed += 1
    assert placed > 80


def fits(topology: Topology, requests: list[Request]) -> bool:
    """By trying: whether groups can be dealt out to nodes at all."""
    groups = tuple(sorted((r.group for r in requests for _ in range(r.count // r.group)), reverse=True))

    @cache
    def deal(position: int, left: tuple[int, ...]) -> bool:
        if position == len(groups):
            return True
        return any(
            deal(position + 1, tuple(sorted((*left[:i], room - groups[position], *left[i + 1 :]))))
            for i, room in enumerate(left)
            if room >= groups[position]
        )

    return deal(0, tuple(sorted(topology.capacities.values())))


@pytest.mark.parametrize("block", range(3))
def test_the_condition_is_necessary_too(block: int) -> None:
    refused = 0
    for number in range(100):
        topology, requests = random_requests(random.Random(f"need/{block}/{number}"), [1, 2, 4])
        try:
            check(topology, requests)
        except NotPlaceableError:
            refused += 1
            assert not fits(topology, requests), (block, number)
    assert refused > 10


def least_moved(topology: Topology, requests: list[Request]) -> int:
    """By trying: the least state sent to new slots, over all ways to give nodes whole groups of one size."""
    nodes = list(topology.capacities)
    usable = {node.name: set(topology.slots_of(node)) for node in topology.nodes}
    best = 10**9

    def splits(groups: int, left: dict[str, int], group: int) -> itertools.chain[dict[str, int]]:
        rooms = [range(min(groups, left[node] // group) + 1) for node in nodes]
        return itertools.chain(
            dict(zip(nodes, chosen, strict=True)) for chosen in itertools.product(*rooms) if sum(chosen) == groups
        )

    def descend(index: int, left: dict[str, int], moved: int) -> None:
        nonlocal best
        if moved >= best:
            return
        if index == len(requests):
            best = moved
            return
        request = requests[index]
        for split in splits(request.count // request.group, left, request.group):
            cost = 0
            for node, groups in split.items():
                held = len(request.held & usable[node])
                cost += max(0, groups * request.group - held) * request.state
            after = {node: left[node] - split[node] * request.group for node in nodes}
            descend(index + 1, after, moved + cost)

    descend(0, dict(topology.capacities), 0)
    return best


@pytest.mark.parametrize("group", [1, 2, 4])
def test_the_least_state_moves_when_all_groups_have_one_size(group: int) -> None:
    compared = 0
    for number in range(150):
        rng = random.Random(f"moved/{group}/{number}")
        topology, requests = random_requests(rng, [group])
        requests = [Request(job=r.job, count=r.count, group=group, held=r.held, state=r.state) for r in requests[:3]]
        if len(topology.nodes) > 3:
            continue
        try:
            placement = place(topology, requests)
        except NotPlaceableError:
            continue
        moved = sum(len(placement.new[request.job]) * request.state for request in requests)
        assert moved == least_moved(topology, requests), number
        compared += 1
    assert compared > 10


def test_an_unchanged_cluster_moves_nothing_and_training_gets_whole_nodes() -> None:
    nodes = tuple(Node(name=f"n{i}", slots=8) for i in range(4))
    topology = Topology(nodes)
    fresh = [
        Request(job="evaluation", count=3, kind=JobKind.EVALUATION),
        Request(job="small", count=4, group=4),
        Request(job="large", count=16, group=8),
    ]
    first = place(topology, fresh)
    assert len({slot.node for slot in first.slots["large"]}) == 2
    assert {slot.node for slot in first.slots["evaluation"]} == {slot.node for slot in first.slots["small"]}, (
        "fragments"
    )
    again = place(
        topology,
        [
            Request(job=r.job, count=r.count, group=r.group, kind=r.kind, held=frozenset(first.slots[r.job]))
            for r in fresh
        ],
    )
    assert again.slots == first.slots
    assert not any(again.new.values())


def test_a_larger_job_pushes_aside_the_cheapest_smaller_ones() -> None:
    topology = Topology(tuple(Node(name=f"n{i}", slots=4) for i in range(3)))
    held = {
        "a": [Slot("n0", 0)],
        "b": [Slot("n1", 0), Slot("n1", 1), Slot("n1", 2)],
        "c": [Slot("n2", i) for i in range(3)],
    }
    requests = [Request(job=name, count=len(slots), held=frozenset(slots)) for name, slots in held.items()]
    placement = place(topology, [*requests, Request(job="wide", count=4, group=4)])
    assert {slot.node for slot in placement.slots["wide"]} == {"n0"}
    assert sum(map(len, placement.new.values())) == 5, "the wide job's four slots and the one that it pushed aside"


def test_growth_stays_near_and_loss_is_made_good_on_the_same_switch() -> None:
    nodes = tuple(Node(name=f"n{i}", slots=8, switch=f"s{i // 2}") for i in range(4))
    dead = frozenset(Slot("n2", index) for index in range(8))
    held = frozenset((*nodes[2].slot_list(), *nodes[3].slot_list()))
    one_left = Topology(nodes, dead)
    placement = place(one_left, [Request(job="a", count=8, group=8, held=held)])
    assert {slot.node for slot in placement.slots["a"]} == {"n3"}
    grown = place(Topology(nodes), [Request(job="a", count=16, group=8, held=frozenset(nodes[3].slot_list()))])
    assert {slot.node for slot in grown.slots["a"]} == {"n2", "n3"}


def test_optimal_counts_on_damaged_nodes_can_be_placed() -> None:
    for number in range(40):
        rng = random.Random(f"damaged/{number}")
        topology, _ = random_requests(rng, [1])
        jobs = []
        for index in range(3):
            group = rng.choice([1, 2, 4])
            counts = sorted({group * rng.randint(1, 5) for _ in range(4)})
            rates = {count: count ** rng.uniform(0.5, 1.0) for count in counts}
            jobs.append(Job(name=f"j{index}", profile=ThroughputProfile.of(rates), group=group))
        cluster = Cluster(gpus=max(topology.capacity, 1))
        plan = solve(cluster, jobs, ceilings(list(topology.capacities.values()), [job.group for job in jobs]))
        requests = [Request(job=job.name, count=plan.assignments[job.name], group=job.group) for job in jobs]
        verify(topology, requests, place(topology, requests))


def test_undamaged_nodes_need_no_ceilings() -> None:
    topology = Topology(tuple(Node(name=f"n{i}", slots=8) for i in range(3)))
    assert ceilings(list(topology.capacities.values()), [1, 2, 8]) == ()
    damaged = Topology(topology.nodes, frozenset({Slot("n0", 3)}))
    assert ceilings(list(damaged.capacities.values()), [1, 8]) == ((1, 23), (8, 16))
    cordoned = Topology((Node(name="n0", slots=8, cordoned=True), Node(name="n1", slots=8)))
    assert cordoned.capacity == 8


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([Request(job="a", count=6, group=4)], "a: 6 slots are no multiple of its group 4"),
        ([Request(job="a", count=4, group=2), Request(job="b", count=3, group=3)], "each must divide"),
        ([Request(job="a", count=16, group=8)], "groups of 8 or more want 16 slots, the nodes have room for 8"),
    ],
)
def test_what_cannot_be_placed_is_named(requests: list[Request], message: str) -> None:
    topology = Topology((Node(name="n0", slots=8), Node(name="n1", slots=7)))
    with pytest.raises(NotPlaceableError, match=message):
        place(topology, requests)


def test_distances_are_the_paths_of_the_graph() -> None:
    topology = Topology(
        (Node(name="a", slots=2, switch="x"), Node(name="b", slots=1, switch="x"), Node(name="c", slots=1, switch="y"))
    )
    slots = [slot for node in topology.nodes for slot in node.slot_list()]
    for one, other in itertools.product(slots, repeat=2):
        path = nx.shortest_path_length(topology.graph, ("slot", one.node, one.index), ("slot", other.node, other.index))
        assert topology.distance(one, other) == path
    assert topology.node_distance("a", "gone") == Distance.ACROSS
    assert is_chain([1, 2, 8, 2])
    assert not is_chain([2, 3])


def test_a_cluster_of_2048_nodes_is_placed_in_seconds() -> None:
    topology = Topology(tuple(Node(name=f"n{i:04d}", slots=8, switch=f"s{i // 32:02d}") for i in range(2048)))
    pool = [slot for node in topology.nodes for slot in node.slot_list()]
    held = [frozenset(pool[index * 240 : (index + 1) * 240]) for index in range(64)]
    counts = [256 if index % 2 else 224 for index in range(64)]
    requests = [Request(job=f"j{i:02d}", count=counts[i], group=8, held=held[i]) for i in range(64)]
    placement = place(topology, requests)
    verify(topology, requests, placement)
    assert sum(map(len, placement.new.values())) == 32 * 16
