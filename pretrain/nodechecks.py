"""The coordinator's fourth loop: node checks across the cluster, by themselves and on request.

A node that was cordoned for a fault (SEV1), or that a straggler or a hang puts under suspicion, is tested beside nodes
known good by the two rounds of :mod:`planner.node_check`; what fails is cordoned, and un-cordoned by a later test that
it passes. Marks that a person set are left alone. The policy is pure; here commands go out and answers come in.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.events import Action
from planner.messages import NodeProbed, ProbeNode
from planner.node_check import CheckVerdict, GroupResult, NodeResult, NodeState, first_round, judge, second_round
from planner.store import ClusterStore
from planner.types import CHECK_MARK
from pretrain.nodecheck import to_json

READER = "nodechecks"
PARTNERS = 2
"""Nodes beside a suspect."""
AGAIN_SECONDS = 600.0
"""A node that failed, or was suspected, is tested again after so long."""
START_SECONDS = 60.0
"""Longest start of a probe with its matrix products."""
LISTEN_SECONDS = 5.0
GATHER_SECONDS = 2.0
"""Longest all-gather; its partners wait as long."""
SUSPICIOUS = frozenset({Action.RANK_STRAGGLER.value, Action.RANK_HUNG.value})
BACK = frozenset({Action.NODE_JOINED.value, Action.NODE_RECOVERED.value})
SURE_SECONDS = 60.0
"""A node that is found slow while it may be busy is tested once more after so long, before it is cordoned for it."""
_SPARE = 5.0
"""Seconds that a report may be on its way."""


@dataclass
class _Group:
    """A group being measured; ``port`` is known once its first node listens."""

    nodes: tuple[str, ...]
    name: str
    deadline: float
    port: int | None = None
    seconds: dict[str, float | None] = field(default_factory=dict)


class ClusterCheck:
    """One check, driven by answers and time: start and compute, first round, second round, verdict.

    Args:
        id: never reused.
        addresses: node → address, at least two.
        send: hands a command to a node's agent.
        now: monotonic seconds.
    """

    def __init__(self, id: str, addresses: Mapping[str, str], send: Any, now: float) -> None:
        self.id = id
        self.started = now
        self.verdict: CheckVerdict | None = None
        self._addresses, self._send = dict(addresses), send
        self.nodes = frozenset(addresses)
        self._compute: dict[str, float | None] = {}
        self._compute_until = now + 2 * START_SECONDS + _SPARE
        self._waiting: list[tuple[str, ...]] = []
        self._running: list[_Group] = []
        self._first: list[GroupResult] | None = None
        self._results: list[GroupResult] = []
        self._groups = 0
        for node in self._addresses:
            send(node, ProbeNode(check=id, op="start", seconds=START_SECONDS))

    def answered(self, node: str, report: NodeProbed, now: float) -> None:
        """Take an answer."""
        if report.check != self.id or node not in self._addresses:
            return
        group = next((group for group in self._running if group.name == report.group), None)
        if report.op == "start":
            self._compute.setdefault(node, report.value)
        elif report.op == "listen" and group is not None and group.port is None and report.value is not None:
            self._gather(group, int(report.value), now)
        elif group is not None and node in group.nodes:
            group.seconds[node] = report.value if report.op == "gather" else None
        self.proceed(now)

    def gone(self, node: str) -> None:
        """The node does not beat any more: nothing is to be waited for."""
        self._compute.setdefault(node, None)

    def proceed(self, now: float) -> None:
        """Go on as far as answers and time allow."""
        if self.verdict is not None or not self._all_computed(now):
            return
        if self._first is None:
            self._first, self._waiting = [], first_round(sorted(self._addresses))
        while True:
            self._finish(now)
            self._begin(now)
            if self._running or self._waiting:
                return
            if not self._results:
                break
            if not self._first:
                self._first, self._results = self._results, []
                self._waiting = second_round(self._first)
                if self._waiting:
                    continue
            break
        self.verdict = judge(self._first, self._results)
        for node in self._addresses:
            self._send(node, ProbeNode(check=self.id, op="end"))

    def _all_computed(self, now: float) -> bool:
        if len(self._compute) < len(self._addresses) and now < self._compute_until:
            return False
        for node in self._addresses:
            self._compute.setdefault(node, None)
        return True

    def _begin(self, now: float) -> None:
        """Start the groups whose nodes are free; one with a dead node needs no test."""
        busy = {node for group in self._running for node in group.nodes}
        for nodes in list(self._waiting):
            if busy & set(nodes):
                continue
            self._waiting.remove(nodes)
            if any(self._compute[node] is None for node in nodes):
                self._results.append(self._result(nodes, {}))
                continue
            busy |= set(nodes)
            self._groups += 1
            group = _Group(nodes, f"g{self._groups}", now + LISTEN_SECONDS + _SPARE)
            self._running.append(group)
            self._send(nodes[0], ProbeNode(check=self.id, op="listen", group=group.name, seconds=LISTEN_SECONDS))

    def _gather(self, group: _Group, port: int, now: float) -> None:
        group.port, group.deadline = port, now + 3 * GATHER_SECONDS + _SPARE
        for rank, node in enumerate(group.nodes):
            command = ProbeNode(
                check=self.id, op="gather", group=group.name, rank=rank, size=len(group.nodes),
                host=self._addresses[group.nodes[0]], port=port, seconds=GATHER_SECONDS,
            )  # fmt: skip
            self._send(node, command)

    def _finish(self, now: float) -> None:
        for group in list(self._running):
            if len(group.seconds) == len(group.nodes) or now >= group.deadline:
                self._running.remove(group)
                self._results.append(self._result(group.nodes, group.seconds))

    def _result(self, nodes: tuple[str, ...], seconds: Mapping[str, float | None]) -> GroupResult:
        return GroupResult(nodes, {node: NodeResult(self._compute[node], seconds.get(node)) for node in nodes})


class NodeChecks:
    """The loop; see :class:`planner.coordinator.Loop`."""

    pause_seconds = 0.3

    def __init__(self, store: ClusterStore, state_dir: Path) -> None:
        del state_dir
        self._store = store
        self._check: ClusterCheck | None = None
        self._asked: list[tuple[str, list[str] | None]] = []
        self._requests = store.position(f"{READER}:requests")
        self._events = store.end_of("events")
        self._reports = ""
        self._not_before: dict[str, float] = {}
        self._suspects: list[str] = []
        self._slow_once: set[str] = set()

    def tick(self, now: float) -> None:
        """Read, go on with the check at hand, or begin one."""
        del now
        clock = time.monotonic()
        self._read_requests()
        self._read_events()
        if self._check is None:
            self._begin(clock)
        if self._check is None:
            return
        for entry in self._store.read_reports(self._reports, block=0.2):
            self._reports = entry.id
            if entry.payload is not None and entry.payload.report.kind == "node_probed":
                self._check.answered(entry.payload.node, entry.payload.report, clock)
        for node in self._check.nodes - self._alive().keys():
            self._check.gone(node)
        self._check.proceed(time.monotonic())
        if self._check.verdict is not None:
            self._conclude(self._check, self._check.verdict, time.monotonic())
            self._check = None

    def _read_requests(self) -> None:
        for entry in self._store.read_requests(self._requests):
            self._requests = entry.id
            self._store.save_position(f"{READER}:requests", entry.id)
            if entry.payload is not None and entry.payload.kind == "nodecheck":
                nodes = entry.payload.payload.get("nodes")
                self._asked.append((str(entry.payload.payload["check"]), list(nodes) if nodes else None))

    def _read_events(self) -> None:
        """Who is slow or hangs is under suspicion; who comes back may be tested at once."""
        for entry in self._store.read_events(self._events):
            self._events = entry.id
            event = entry.payload
            node = event.details.get("node") if event is not None else None
            if event is None or not isinstance(node, str):
                continue
            if event.action in BACK:
                self._not_before.pop(node, None)
            elif event.action in SUSPICIOUS and node not in self._suspects:
                self._suspects.append(node)

    def _begin(self, clock: float) -> None:
        addresses = self._alive()
        if self._asked:
            request, named = self._asked.pop(0)
            chosen = [node for node in named or addresses if node in addresses]
            missing = sorted(set(named or ()) - set(addresses))
            if len(chosen) < 2 or missing:
                reason = f"no such live node: {', '.join(missing)}" if missing else "two live nodes are needed"
                self._store.put_document(f"nodecheck:{request}", {"error": reason})
                return
            self._start(request, chosen, addresses, clock)
            return
        marked = [node for node, mode in self._store.cordoned().items() if mode == CHECK_MARK]
        due = [node for node in dict.fromkeys([*marked, *self._suspects])
               if node in addresses and self._not_before.get(node, 0.0) <= clock]  # fmt: skip
        self._suspects = [node for node in self._suspects if node in self._slow_once and node not in due]
        good = [node for node in addresses if node not in due and node not in self._store.cordoned()]
        if due and good:
            partners = good[: max(PARTNERS, len(due))]
            for node in due:
                self._not_before[node] = clock + AGAIN_SECONDS
            self._start(f"auto-{time.time_ns()}", [*due, *partners], addresses, clock)

    def _alive(self) -> dict[str, str]:
        """Nodes that beat, with their addresses."""
        beats, now = self._store.heartbeats(), self._store.server_time()
        return {facts.name: facts.address for facts in self._store.nodes() if now - beats.get(facts.name, 0.0) < 5.0}

    def _start(self, id: str, nodes: Sequence[str], addresses: Mapping[str, str], clock: float) -> None:
        self._reports = self._store.end_of("reports")
        self._check = ClusterCheck(id, {node: addresses[node] for node in nodes}, self._store.send_command, clock)

    def _conclude(self, check: ClusterCheck, verdict: CheckVerdict, clock: float) -> None:
        document = to_json(verdict, clock - check.started)
        self._store.put_document(f"nodecheck:{check.id}", document)
        self._store.tell(Action.NODE_CHECKED, reason=_in_words(verdict), check=check.id, **document)
        marks, alive = self._store.cordoned(), self._alive()
        for node, state in verdict.nodes.items():
            if node not in alive:
                continue  # nothing is granted on it anyway; it is judged when it is back
            if state is NodeState.SLOW and node not in marks and node not in self._slow_once:
                self._slow_once.add(node)
                self._suspects.append(node)
                self._not_before[node] = clock + SURE_SECONDS
                continue
            self._slow_once.discard(node)
            if state is not NodeState.GOOD and node not in marks:
                self._store.cordon(node, CHECK_MARK)
                self._not_before[node] = clock + AGAIN_SECONDS
                self._store.tell(
                    Action.NODE_CORDONED, node=node, new=CHECK_MARK, reason=verdict.reasons.get(node, state.value)
                )
            elif state is NodeState.GOOD and marks.get(node) == CHECK_MARK:
                self._store.uncordon(node)
                self._store.tell(Action.NODE_UNCORDONED, node=node, old=CHECK_MARK, reason="passed the node check")


def _in_words(verdict: CheckVerdict) -> str:
    bad: Iterable[str] = (
        f"{node} is {state.value}" for node, state in verdict.nodes.items() if state is not NodeState.GOOD
    )
    links = (f"the link between {one} and {other} is bad" for one, other in verdict.bad_links)
    return "; ".join([*bad, *links]) or f"{len(verdict.nodes)} nodes are good"
