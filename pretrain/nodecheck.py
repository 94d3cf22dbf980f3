"""``planaria nodecheck``: the two-round check with real processes; the policy is :mod:`planner.node_check`.

On a cluster one probe per node, asked by the coordinator (:mod:`pretrain.nodechecks`); else one per slot of this host.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.cluster import connect
from planner.errors import ExitCode, MissingServiceError, PlanariaError, WorkFailedError
from planner.node_check import CheckVerdict, GroupResult, NodeResult, first_round, judge, second_round

START_SECONDS = 60.0
CLUSTER_SECONDS = 180.0
"""Longest wait for a check of the cluster."""
GATHER_SECONDS = 2.0

ProbeCommand = Callable[[str], Sequence[str]]


def local_probe(node: str) -> list[str]:
    """The command of an ordinary probe; ``node`` is ``cpu-N`` or ``cuda-N``."""
    kind, _, index = node.rpartition("-")
    return [sys.executable, "-m", "pretrain.nodecheck_probe", f"cuda:{index}" if kind.endswith("cuda") else "cpu"]


@dataclass
class ProbeProcess:
    """A probe process; ``alive`` turns False for good at the first missed answer."""

    name: str
    process: subprocess.Popen[bytes]
    alive: bool = True
    compute_seconds: float | None = None

    def ask(self, request: dict[str, Any] | None, seconds: float) -> dict[str, Any] | None:
        """The next answer, None if none came in time or the probe is gone."""
        if not self.alive:
            return None
        assert self.process.stdin is not None
        try:
            if request is not None:
                self.process.stdin.write(json.dumps(request).encode() + b"\n")
                self.process.stdin.flush()
            line = self._line(time.monotonic() + seconds)
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError, TimeoutError):
            self.alive = False
            return None
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not buffer.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError(self.name)
                piece = os.read(self.process.stdout.fileno(), 4096)
                if not piece:
                    raise OSError("the probe ended")
                buffer += piece
        return buffer

    def end(self) -> None:
        """Kill the probe and reap it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class LocalCheck:
    """Runs a check among probes on this host; use as a context manager, so that nothing is left behind."""

    def __init__(self, names: Sequence[str], command: ProbeCommand = local_probe) -> None:
        self._command = command
        self._names = list(names)
        self._probes: dict[str, ProbeProcess] = {}
        self._store: subprocess.Popen[bytes] | None = None
        self._address = ("127.0.0.1", 0)
        self._round = 0

    def __enter__(self) -> LocalCheck:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        host, port = self._address = listener.getsockname()
        store = [sys.executable, "-m", "pretrain.store", "--fd", str(listener.fileno()), "--host", host]
        store += ["--port", str(port), "--parent", str(os.getpid())]
        self._store = subprocess.Popen(store, pass_fds=[listener.fileno()], start_new_session=True, env=environment)
        listener.close()
        for name in self._names:
            process = subprocess.Popen(
                list(self._command(name)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True, env=environment,
            )  # fmt: skip
            self._probes[name] = ProbeProcess(name, process)
        return self

    def __exit__(self, *_: object) -> None:
        for probe in self._probes.values():
            probe.end()
        if self._store is not None:
            self._store.kill()
            self._store.wait()

    def run(self) -> CheckVerdict:
        """Start, compute, two rounds, verdict."""
        with ThreadPoolExecutor(len(self._probes)) as pool:
            list(pool.map(lambda probe: probe.ask(None, START_SECONDS), self._probes.values()))
        for probe in self._probes.values():  # one after the other: they may share cores
            answer = probe.ask({"op": "compute"}, START_SECONDS)
            probe.compute_seconds = answer["compute_seconds"] if answer else None
        first = [self._measure(group) for group in first_round(self._names)]
        second = [self._measure(group) for group in second_round(first)]
        return judge(first, second)

    def _measure(self, group: tuple[str, ...]) -> GroupResult:
        self._round += 1
        requests = [
            {"op": "gather", "group": f"g{self._round}", "rank": rank, "size": len(group), "store": list(self._address),
             "timeout": GATHER_SECONDS}
            for rank in range(len(group))
        ]  # fmt: skip
        probes = [self._probes[name] for name in group]
        if any(probe.compute_seconds is None for probe in probes):
            results = {name: NodeResult(self._probes[name].compute_seconds, None) for name in group}
            return GroupResult(group, results)
        with ThreadPoolExecutor(len(group)) as pool:
            answers = list(
                pool.map(lambda pair: pair[0].ask(pair[1], 3 * GATHER_SECONDS), zip(probes, requests, strict=True))
            )
        results = {
            name: NodeResult(probe.compute_seconds, answer["gather_seconds"] if answer else None)
            for name, probe, answer in zip(group, probes, answers, strict=True)
        }
        return GroupResult(group, results)


def to_json(verdict: CheckVerdict, seconds: float) -> dict[str, Any]:
    """The document of ``planaria nodecheck --json``."""
    return {
        "healthy": verdict.healthy,
        "nodes": [
            {"node": node, "state": state.value, "reason": verdict.reasons.get(node, "")}
            for node, state in verdict.nodes.items()
        ],
        "bad_links": [list(link) for link in verdict.bad_links],
        "seconds": round(seconds, 3),
    }


def nodecheck_command(json_output: bool, state_dir: Path | None, url: str | None) -> int:
    """Check the cluster's nodes; without a cluster of two nodes this host's slots against each other.

    Exit 1 when something is wrong with one of them.
    """
    document = _check_cluster(state_dir, url) or _check_host()
    if json_output:
        print(json.dumps(document, indent=2))
    else:
        for item in document["nodes"]:
            print(f"{item['node']:12} {item['state']:8} {item['reason']}")
        for link in document["bad_links"]:
            print(f"bad link between {link[0]} and {link[1]}")
        print(f"{'all good' if document['healthy'] else 'something is wrong'} ({document['seconds']:.1f} s)")
    return int(ExitCode.DONE if document["healthy"] else ExitCode.FAILED)


def _check_cluster(state_dir: Path | None, url: str | None) -> dict[str, Any] | None:
    """The coordinator's check of all live nodes; None where there is no cluster or it has but one node.

    Raises:
        MissingServiceError: a cluster was named and does not answer, or no coordinator takes the request.
    """
    named = url is not None or state_dir is not None
    try:
        store, _ = connect(url, state_dir)
    except PlanariaError:
        if named:
            raise
        return None
    try:
        if len(store.nodes()) < 2:
            return None
        check = f"asked-{uuid.uuid4().hex[:12]}"
        store.send_request("nodecheck", check=check, nodes=None)
        deadline = time.monotonic() + CLUSTER_SECONDS
        while time.monotonic() < deadline:
            document = store.document(f"nodecheck:{check}")
            if document is not None and "error" in document:
                raise WorkFailedError(f"node check: {document['error']}")
            if document is not None:
                return document
            time.sleep(0.1)
    finally:
        store.close()
    raise MissingServiceError(f"node check: no answer within {CLUSTER_SECONDS:.0f} s; is a coordinator running?")


def _check_host() -> dict[str, Any]:
    from pretrain.agent_devices import DEFAULT_CPU_SLOTS, count_gpus

    gpus = count_gpus()
    names = (
        [f"cuda-{index}" for index in range(gpus)]
        if gpus > 1
        else [f"cpu-{index}" for index in range(DEFAULT_CPU_SLOTS)]
    )
    started = time.monotonic()
    with LocalCheck(names) as check:
        verdict = check.run()
    return to_json(verdict, time.monotonic() - started)
