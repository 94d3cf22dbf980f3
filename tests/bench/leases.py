"""Lease operations through Redis: how many a second, and a hunt for double grants.

``python -m tests.bench.leases [--seconds 60] [--seed N]`` runs the hunt alone and prints what it saw as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from planner.leases import GrantRequest
from planner.redis_server import start_redis
from planner.store import ClusterStore, NodeFacts
from tests.bench.figures import Figure
from tests.support.lease_hunt import as_json, hunting

ONE_BY_ONE_BAR = 2_000
BATCHED_BAR = 20_000
BATCH = 1_000
NODES = 128
SLOTS = 8


def _rate(operation: Callable[[], int], seconds: float) -> float:
    """Operations per second; ``operation`` returns how many it did."""
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        done += operation()
    return done / (time.perf_counter() - begun)


def _figure(name: str, rates: list[float], bar: int) -> Figure:
    value = statistics.median(rates)
    return Figure(
        name=name, value=value, unit="/s", bar=f"≥ {bar}/s", reached=value >= bar, runs=len(rates), low=min(rates),
        high=max(rates),
    )  # fmt: skip


def rates(quick: bool) -> list[Figure]:
    """Grants, renewals and releases one by one, and renewals in batches of a thousand leases."""
    seconds, runs = (1.0, 2) if quick else (4.0, 5)
    with tempfile.TemporaryDirectory() as folder:
        server = start_redis(Path(folder))
        store = ClusterStore(server.url)
        try:
            fence = store.table.lock("bench:1:x", 1, 3600.0)
            for k in range(NODES):
                store.register_node(NodeFacts(name=f"n{k}", address="127.0.0.1", slots=SLOTS, boot="b"))
                store.confirm_free(f"n{k}", store.quarantine(f"n{k}"))
            held: list[tuple[str, int]] = []

            def cycle() -> int:
                request = GrantRequest(holder="job:x", node="n0", slots=(0,))
                (lease,) = store.table.grant([request], fence=fence)
                store.table.renew([(lease.id, lease.token)])
                store.table.release(lease.id, lease.token)
                return 3

            one_by_one = [_rate(cycle, seconds) for _ in range(runs)]
            for k in range(BATCH):
                request = GrantRequest(holder="job:y", node=f"n{k // SLOTS}", slots=(k % SLOTS,), ttl=3600.0)
                held += [(lease.id, lease.token) for lease in store.table.grant([request], fence=fence)]
            batched = [_rate(lambda: len(store.table.renew(held)), seconds) for _ in range(runs)]
        finally:
            store.close()
            os.kill(server.pid, signal.SIGKILL)
            os.waitpid(server.pid, 0)
    return [
        _figure("lease operations one by one (grant, renew, release)", one_by_one, ONE_BY_ONE_BAR),
        _figure(f"lease renewals in batches of {BATCH}", batched, BATCHED_BAR),
    ]


def hunt_figures(seconds: float, seed: int) -> tuple[list[Figure], dict[str, object]]:
    """The hunt's outcome as figures, and all that it counted."""
    with tempfile.TemporaryDirectory() as folder, hunting(Path(folder) / "hunt", seed) as hunt:
        result = hunt.run(seconds)
    seen = as_json(result)
    note = (
        f"{seen.get('granted', 0)} grants, {seen.get('expired', 0)} expired, {seen.get('revoked', 0)} revoked, "
        f"{seen.get('redis restarts', 0)} Redis restarts without the last second, "
        f"{seen.get('coordinators killed', 0)} coordinators killed"
    )
    figure = Figure(
        name=f"double grants under 8 racing clients for {seconds:.0f} s", value=float(len(result.violations)), unit="",
        bar="0", reached=not result.violations, note=note,
    )  # fmt: skip
    return [figure], seen | {"first violation": (result.violations or [None])[0]}


def measure(quick: bool) -> list[Figure]:
    """All figures of this file."""
    return rates(quick) + hunt_figures(10.0 if quick else 60.0, 1)[0]


def main() -> None:
    """The hunt alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    _, seen = hunt_figures(arguments.seconds, arguments.seed)
    print(json.dumps(seen, indent=2))


if __name__ == "__main__":
    main()
