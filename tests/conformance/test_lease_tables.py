"""The Lua script and the pure model are one table: the same calls give the same answers and the same state."""

from __future__ import annotations

import re
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from planner.errors import PlanariaError
from planner.lease_model import LeaseModel
from planner.leases import GrantRequest, Lease, Leases, LeaseTable, Revocation
from planner.store import ClusterStore

NODES = {"a": 3, "b": 2}
SLOTS = [(node, index) for node, count in NODES.items() for index in range(count)]


def _plain(answer: Any) -> Any:
    """An answer without what is random by design (marks name the server's run)."""
    if isinstance(answer, list):
        return [_plain(one) for one in answer]
    if isinstance(answer, dict):
        return {slot: re.sub(r"run:.*:", "run:", mark) for slot, mark in answer.items()}
    return answer


def _try(call: Any) -> Any:
    try:
        return _plain(call())
    except PlanariaError as error:
        return type(error).__name__, getattr(error, "slots", None)


def make_machine(store: ClusterStore) -> type[RuleBasedStateMachine]:
    """The state machine over both tables; ``store`` gives the real one."""

    class Tables(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.now = 1000.0
            store.link.call(lambda client: client.flushall())
            self.model: LeaseTable = LeaseModel(lambda: self.now)
            self.real: LeaseTable = Leases(store.link.call, now=lambda: self.now)
            self.count = 0
            self.highest = 0
            self.fences: dict[str, int] = {}
            self.known: list[tuple[str, int]] = [("never", 7)]

        def both(self, call: Any) -> Any:
            expected, found = _try(lambda: call(self.model)), _try(lambda: call(self.real))
            assert found == expected
            return found

        @initialize()
        def nodes(self) -> None:
            for node, slots in NODES.items():
                self.both(lambda table, n=node, s=slots: table.register(n, {"boot": "first", "slots": s}))

        @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 2.5, 3.5, 9.0, 11.0]))
        def wait(self, seconds: float) -> None:
            self.now += seconds

        @rule(owner=st.sampled_from(["c1", "c2"]), epoch=st.integers(1, 4))
        def lock(self, owner: str, epoch: int) -> None:
            found = self.both(lambda table: table.lock(owner, epoch, 5.0))
            if isinstance(found, int):
                assert found > self.highest, "a token that does not grow"
                self.highest = found
                self.fences[owner] = found

        @rule(owner=st.sampled_from(["c1", "c2"]), what=st.sampled_from(["keep", "keep", "unlock"]))
        def hold(self, owner: str, what: str) -> None:
            token = self.fences.get(owner, 0)
            if what == "keep":
                self.both(lambda table: table.keep(owner, token, 5.0))
            else:
                self.both(lambda table: table.unlock(owner, token))

        @rule(
            slots=st.lists(st.sampled_from(SLOTS), min_size=1, max_size=3, unique=True),
            owner=st.sampled_from(["c1", "c2", None]),
            repeat=st.booleans(),
        )
        def grant(self, slots: list[tuple[str, int]], owner: str | None, repeat: bool) -> None:
            fence = None if owner is None else self.fences.get(owner, 0)
            self.count += 1
            by_node: dict[str, list[int]] = {}
            for node, index in slots:
                by_node.setdefault(node, []).append(index)
            requests = [
                GrantRequest(holder="job:x", node=node, slots=tuple(indices), id=f"l{self.count}-{node}")
                for node, indices in by_node.items()
            ]
            found = self.both(lambda table: table.grant(requests, fence=fence))
            if isinstance(found, list):
                assert all(lease.token > self.highest for lease in found)
                self.highest = max(lease.token for lease in found)
                self.known += [(lease.id, lease.token) for lease in found]
                if repeat:  # the answer was lost and the call made again
                    assert self.both(lambda table: table.grant(requests, fence=fence)) == found

        @rule(data=st.data())
        def renew(self, data: st.DataObject) -> None:
            some = data.draw(st.lists(st.sampled_from(self.known), max_size=4))
            self.both(lambda table: table.renew(some))

        @rule(data=st.data(), grace=st.sampled_from([0.0, 2.0, 8.0]), owner=st.sampled_from(["c1", "c2", None]))
        def revoke(self, data: st.DataObject, grace: float, owner: str | None) -> None:
            fence = None if owner is None else self.fences.get(owner, 0)
            some = data.draw(st.lists(st.sampled_from(self.known), min_size=1, max_size=2, unique=True))
            wanted = [Revocation(lease=lease, grace_seconds=grace, reason="r") for lease, _ in some]
            self.both(lambda table: table.revoke(wanted, fence=fence))

        @rule(data=st.data(), confirmed=st.booleans(), off=st.sampled_from([0, 0, 0, 1]))
        def release(self, data: st.DataObject, confirmed: bool, off: int) -> None:
            lease, token = data.draw(st.sampled_from(self.known))
            self.both(lambda table: table.release(lease, token + off, confirmed=confirmed))

        @rule(owner=st.sampled_from(["c1", "c2", None]))
        def expire(self, owner: str | None) -> None:
            fence = None if owner is None else self.fences.get(owner, 0)
            self.both(lambda table: table.expire(fence=fence))

        @rule(stale=st.booleans())
        def confirm(self, stale: bool) -> None:
            names = sorted(self.model.quarantine())
            answers = []
            for table in (self.model, self.real):
                marks = table.quarantine()
                answers.append(table.confirm_free([(name, "old" if stale else marks[name]) for name in names]))
            assert answers[0] == answers[1]

        @rule(node=st.sampled_from(sorted(NODES)), boot=st.sampled_from(["first", "second"]), adopt=st.booleans())
        def register(self, node: str, boot: str, adopt: bool) -> None:
            kept = self.known if adopt else []
            self.both(lambda table: table.register(node, {"boot": boot, "slots": NODES[node]}, kept))

        @rule()
        def restart(self) -> None:
            # What a restart looks like to the script: the run that the epoch was raised under is another one.
            store.link.call(lambda client: client.hset("planaria:fencing", "run", "an earlier one"))
            assert isinstance(self.model, LeaseModel)
            self.model.restart(f"run-{self.now}-{self.count}-{self.highest}-{id(object())}")

        @invariant()
        def same_state(self) -> None:
            leases = self.model.leases()
            assert self.real.leases() == leases
            assert _plain(self.real.quarantine()) == _plain(self.model.quarantine())
            _check(leases, self.model.quarantine())

    return Tables


def _check(leases: list[Lease], quarantine: dict[str, str]) -> None:
    held = [name for lease in leases for name in lease.slot_names]
    assert len(held) == len(set(held)), "a slot is leased twice"
    assert not set(held) & quarantine.keys(), "a leased slot is in quarantine"
    assert len({lease.token for lease in leases}) == len(leases)


@pytest.mark.timeout(120)
def test_script_and_model_agree(store: ClusterStore) -> None:
    machine = make_machine(store)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
