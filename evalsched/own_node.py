"""A worker started by hand or by a batch system: a small node of its own that brings and answers for its slots."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from dataclasses import dataclass

from evalsched.worker import Place
from planner.errors import MissingServiceError, PlanariaError
from planner.leases import Lease
from planner.store import ClusterStore, NodeFacts

log = logging.getLogger("planaria.worker")

BEAT_SECONDS = 1.0
WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class Granted:
    """The lease that the cluster gave for the slots that were brought."""

    worker: str
    place: Place


class OwnNode:
    """Registers, beats, renews and confirms, as an agent does for its node."""

    def __init__(self, store: ClusterStore, name: str, slots: tuple[int, ...]) -> None:
        self.store = store
        self.facts = NodeFacts(
            name=name,
            address="127.0.0.1",
            slots=len(slots),
            boot=uuid.uuid4().hex,
            threads_per_slot=max(1, int(os.environ.get("OMP_NUM_THREADS", "1") or 1)),
            pid=os.getpid(),
            kind="worker",
            device="cuda" if os.environ.get("CUDA_VISIBLE_DEVICES") else "cpu",
        )

    def register(self) -> None:
        """Say hello; the slots are this process's own, so nothing else can hold them."""
        self.store.register_node(self.facts)
        self._confirm()

    def _confirm(self) -> None:
        marks = self.store.quarantine(self.facts.name)
        if marks:
            self.store.confirm_free(self.facts.name, marks)

    def beat(self) -> list[Lease]:
        """One heartbeat; renews and returns the node's leases."""
        if not self.store.heartbeat(self.facts.name):
            self.register()
        leases = self.store.leases(node=self.facts.name)
        self.store.table.renew([(lease.id, lease.token) for lease in leases])
        if not leases:
            self._confirm()
        return leases

    def beat_forever(self) -> None:
        """Keep the node alive; ends with the process."""
        while True:
            try:
                self.beat()
            except PlanariaError as error:
                log.warning("action=node.beat reason=%s", error)
            time.sleep(BEAT_SECONDS)


def lease_by_hand(store: ClusterStore, name: str, slots: tuple[int, ...], wait: float = WAIT_SECONDS) -> Granted:
    """Join the cluster as a node with ``slots`` and wait until evaluation is given them.

    Raises:
        MissingServiceError: nobody granted them in ``wait`` seconds (no coordinator?).
    """
    node = OwnNode(store, name, slots)
    node.register()
    deadline = time.monotonic() + wait
    while time.monotonic() < deadline:
        held = [lease for lease in node.beat() if lease.holder.startswith("evaluation:") and lease.revoked is None]
        if held:
            threading.Thread(target=node.beat_forever, name="node", daemon=True).start()
            lease = held[0]
            place = Place(node=name, lease=lease.id, token=lease.token, slots=lease.slots, own_node=True)
            return Granted(f"{name}-{lease.token & 0xFFFFFFFF}", place)
        time.sleep(0.2)
    store.remove_node(name)
    raise MissingServiceError(f"worker {name}: nobody granted its slots in {wait:.0f} s; is a coordinator running?")
