"""State goes to new ranks from the nearest source of one and the same step."""

from __future__ import annotations

import random

import pytest

from planner.topology import Topology
from planner.transfer import NoSourceError, Snapshot, SourceKind, plan_transfers
from planner.types import Node, Slot

TOPOLOGY = Topology(tuple(Node(name=f"n{i}", slots=4, switch=f"s{i // 2}") for i in range(4)))
NEW = Slot("n0", 3)


def test_a_live_replica_on_the_same_node_is_nearest() -> None:
    peers = {Slot("n0", 0): (0, 0), Slot("n1", 0): (0, 0), Slot("n0", 1): (1, 0)}
    (found,) = plan_transfers(TOPOLOGY, {NEW: (0, 0)}, peers, 10, [Snapshot(node="n0", coordinate=(0, 0), step=10)], 5)
    assert (found.kind, found.source, found.step) == (SourceKind.PEER, Slot("n0", 0), 10)


def test_then_the_replica_on_the_same_switch_and_only_of_the_same_coordinate() -> None:
    peers = {Slot("n3", 0): (0, 0), Slot("n1", 2): (0, 0), Slot("n0", 0): (1, 0)}
    (found,) = plan_transfers(TOPOLOGY, {NEW: (0, 0)}, peers, 10)
    assert found.source == Slot("n1", 2)


def test_without_a_replica_a_snapshot_of_the_live_step_saves_it() -> None:
    peers = {Slot("n0", 0): (1, 0)}
    snapshots = [Snapshot(node="n1", coordinate=(0, 0), step=10), Snapshot(node="n0", coordinate=(0, 0), step=8)]
    (found,) = plan_transfers(TOPOLOGY, {NEW: (0, 0)}, peers, 10, snapshots, 5)
    assert (found.kind, found.source, found.step) == (SourceKind.SNAPSHOT_ON_PEER, "n1", 10)
    here = [Snapshot(node="n0", coordinate=(0, 0), step=10), *snapshots]
    assert plan_transfers(TOPOLOGY, {NEW: (0, 0)}, peers, 10, here, 5)[0].kind == SourceKind.SNAPSHOT_ON_NODE


def test_what_no_peer_holds_takes_everybody_back_to_the_newest_whole_step() -> None:
    peers = {Slot("n0", 0): (1, 0)}
    whole = [Snapshot(node="n2", coordinate=c, step=8) for c in ((0, 0), (1, 0))]
    half = [Snapshot(node="n0", coordinate=(0, 0), step=9)]
    (found,) = plan_transfers(TOPOLOGY, {NEW: (0, 0)}, peers, 10, whole + half, 5)
    assert (found.step, found.kind, found.source) == (8, SourceKind.SNAPSHOT_ON_PEER, "n2")
    (stored,) = plan_transfers(TOPOLOGY, {NEW: (0, 0)}, peers, 10, half, 5)
    assert (stored.step, stored.kind, stored.source) == (5, SourceKind.STORAGE, None)


def test_a_newer_published_checkpoint_comes_before_an_older_snapshot() -> None:
    old = [Snapshot(node="n0", coordinate=(0, 0), step=4)]
    (found,) = plan_transfers(TOPOLOGY, {NEW: (0, 0)}, {}, None, old, 6)
    assert (found.step, found.kind) == (6, SourceKind.STORAGE)


def test_equally_near_replicas_share_the_work() -> None:
    peers = {Slot("n2", 0): (0, 0), Slot("n2", 1): (0, 0)}
    targets = {Slot("n3", i): (0, 0) for i in range(4)}
    found = plan_transfers(TOPOLOGY, targets, peers, 7)
    assert sorted(str(t.source) for t in found) == sorted([str(Slot("n2", 0)), str(Slot("n2", 1))] * 2)


def test_nothing_left_is_said() -> None:
    with pytest.raises(NoSourceError, match=r"ranks \[\(0, 0\)\]"):
        plan_transfers(TOPOLOGY, {NEW: (0, 0)}, {Slot("n0", 0): (1, 0)}, 10)


def test_no_target_needs_no_source() -> None:
    assert plan_transfers(TOPOLOGY, {}, {Slot("n0", 0): (0, 0)}, 3) == ()


@pytest.mark.parametrize("number", range(100))
def test_all_state_is_of_one_step_and_no_nearer_source_was_left(number: int) -> None:
    rng = random.Random(number)
    slots = [slot for node in TOPOLOGY.nodes for slot in node.slot_list()]
    rng.shuffle(slots)
    coordinates = [(t, p) for t in range(2) for p in range(2)]
    peers = {slot: rng.choice(coordinates) for slot in slots[:5]}
    targets = {slot: rng.choice(coordinates) for slot in slots[5:8]}
    snapshots = [
        Snapshot(node=f"n{rng.randrange(4)}", coordinate=rng.choice(coordinates), step=rng.choice([8, 10]))
        for _ in range(6)
    ]
    found = plan_transfers(TOPOLOGY, targets, peers, 10, snapshots, 5)
    assert len({transfer.step for transfer in found}) == 1
    assert {transfer.target: transfer.coordinate for transfer in found} == targets
    for transfer in found:
        if transfer.kind == SourceKind.PEER:
            assert isinstance(transfer.source, Slot)
            assert peers[transfer.source] == transfer.coordinate
            distance = TOPOLOGY.distance(transfer.target, transfer.source)
            assert all(
                TOPOLOGY.distance(transfer.target, p) >= distance for p, c in peers.items() if c == transfer.coordinate
            )
        elif transfer.step == 10:
            assert transfer.coordinate not in peers.values()
