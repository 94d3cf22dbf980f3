"""One node's side of the node check: a process that times a matrix product and all-gathers on request.

Requests and answers are JSON lines on standard input and output: ``{"op": "compute"}`` answers
``{"compute_seconds": s}``; ``{"op": "listen", "group": name}`` answers ``{"port": p}``; ``{"op": "gather", "group":
name, "rank": r, "size": n, "store": [host, port], "timeout": s}`` answers ``{"gather_seconds": s or null, "error":
text}`` (a rank that listened uses its own store). The process ends with its input.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

MATRIX = 384
PRODUCTS = 6
GATHER_FLOATS = 1 << 18
REPEATS = 5


class Probe:
    """The measurements of one node."""

    def __init__(self, device: str = "cpu") -> None:
        import torch

        torch.set_num_threads(1)
        self.torch = torch
        self.device = device
        self._stores: dict[str, Any] = {}
        """Stores that this node serves, by group."""

    def compute(self) -> float:
        """Seconds of processor time (device: wall time) of the fastest of ``REPEATS`` runs of some matrix products."""
        torch = self.torch
        left = torch.ones(MATRIX, MATRIX, device=self.device)
        clock = time.perf_counter if self.device.startswith("cuda") else time.thread_time
        best = float("inf")
        for _ in range(REPEATS):
            started = clock()
            for _ in range(PRODUCTS):
                left @ left
            if self.device.startswith("cuda"):
                torch.cuda.synchronize()
            best = min(best, clock() - started)
        return best

    def gather(self, request: dict[str, Any]) -> float:
        """Seconds of the fastest of ``REPEATS`` all-gathers within the group.

        Raises:
            RuntimeError: a peer did not come, or left.
        """
        torch, distributed = self.torch, self.torch.distributed
        wait = timedelta(seconds=float(request["timeout"]))
        host, port = request["store"]
        store = self._stores.get(str(request["group"]))
        if store is None:
            store = distributed.TCPStore(host, int(port), is_master=False, timeout=wait)
        store.set_timeout(wait)
        store = distributed.PrefixStore(str(request["group"]), store)
        # A group object of its own, not the process-wide default one: a failed start leaves nothing behind.
        cuda = self.device.startswith("cuda")
        kind = distributed.ProcessGroupNCCL if cuda else distributed.ProcessGroupGloo
        group = kind(store, int(request["rank"]), int(request["size"]), wait)
        mine = torch.ones(GATHER_FLOATS, device=self.device)
        everyone = [[torch.empty_like(mine) for _ in range(int(request["size"]))]]
        best = float("inf")
        for _ in range(REPEATS):
            group.barrier().wait()
            started = time.perf_counter()
            group.allgather(everyone, [mine]).wait()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - started)
        return best

    def listen(self, group: str) -> int:
        """Serve a group's rendezvous store on a free port."""
        distributed = self.torch.distributed
        store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._stores = {group: store}  # one group at a time: the last one's store may go
        return int(store.port)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request; a failed all-gather is an answer too."""
        if request["op"] == "compute":
            return {"compute_seconds": self.compute()}
        if request["op"] == "listen":
            return {"port": self.listen(str(request["group"]))}
        try:
            return {"gather_seconds": self.gather(request), "error": ""}
        except (RuntimeError, OSError) as error:
            return {"gather_seconds": None, "error": " ".join(str(error).split())[:200]}


def serve(probe: Probe) -> None:
    """Answer requests until the input ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(probe.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(Probe(sys.argv[1] if len(sys.argv) > 1 else "cpu"))
