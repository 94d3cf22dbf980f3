"""The evaluation scheduler: the coordinator's third loop. Every published export becomes trials, slots, a report.

It follows the cluster's events and requests, says how much work waits (the allocator answers with leases), has
agents start workers on leased slots, and lets the :class:`~evalsched.conductor.Conductor` run the evaluations.
Everything that must survive it is in Redis, the ledger and the jobs' folders.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evalsched import outlook
from evalsched.app import make_app
from evalsched.arrears import Arrears
from evalsched.conductor import Conductor
from evalsched.costs import CPU_FLOPS, GPU_FLOPS
from evalsched.ledger import Ledger, sqlite_url
from evalsched.messages import ModelRef
from evalsched.runs import Run, RunSpec
from evalsched.types import EvalSettings
from planner.errors import FencedError, PlanariaError, one_line
from planner.events import TERMINAL, Action, Event, TrialState
from planner.leases import Lease
from planner.manifest import step_dir_name
from planner.messages import CommandFailed, Stage, StartWorker, StopWorker, WorkerExited
from planner.packing import slots_wanted
from planner.store import ClusterStore, Demand, Request

log = logging.getLogger("planaria.evaluation")

HOLDER = "evaluation"
START_SECONDS = 15.0
"""What it costs to give evaluation a slot: a worker's start."""
LINGER_SECONDS = 20.0
"""How long slots are kept after the last work, so that the next checkpoint finds a loaded engine."""
START_TIMEOUT = 60.0
"""Seconds after which a worker that was asked for and never spoke is asked for again."""
STAGED_AHEAD = 8
"""Most nodes that a model is brought to before evaluation has slots there."""
FRUITLESS_STARTS = 3
GRACE_SECONDS = 5.0
STATUS_SECONDS = 0.5
MAX_ROWS = 500
"""Runs that the status shows, the newest."""


@dataclass
class _Post:
    """A lease of ours and the worker on it."""

    lease: Lease
    starts: int = 0
    fruitless: int = 0
    worker: str | None = None
    asked: float = 0.0
    stopping: bool = False


@dataclass
class _Positions:
    """How far the streams were read; saved after their effects are durable."""

    events: str
    requests: str
    reports: str
    changed: set[str] = field(default_factory=set, init=False)


class EvaluationScheduler:
    """The loop; see :class:`planner.coordinator.Loop`.

    Args:
        store: cluster store with the secret and the coordinator's fence.
        state_dir: holds the ledger (unless ``PLANARIA_LEDGER`` names a database) and the jobs' folders.
    """

    def __init__(self, store: ClusterStore, state_dir: Path) -> None:
        self._store = store
        self._state_dir = state_dir
        self._ledger_url = os.environ.get("PLANARIA_LEDGER") or sqlite_url(state_dir / "ledger.sqlite")
        self._token = self._fence()
        self._conductor = Conductor(
            store, Ledger(self._ledger_url, self._token), make_app(store.url), device=self._device(),
            kill_worker=self._kill_worker, stage=self._stage,
        )  # fmt: skip
        self._posts: dict[int, _Post] = {}
        self._read_to = _Positions(
            *(store.position(f"evaluation.{name}") for name in ("events", "requests", "reports"))
        )
        self._busy_until = 0.0
        self._status: tuple[float, dict[str, Any]] = (0.0, {})
        self._metric_post = _MetricPost(store, self._conductor)
        self._arrears = Arrears(self._conductor)
        self._finished = _finished_rows(store.document("evaluation"))
        self._conductor.restore()

    @property
    def conductor(self) -> Conductor:
        """What runs the evaluations."""
        return self._conductor

    def _fence(self) -> int:
        token = self._store.fence()
        if token is None:
            raise FencedError("the coordinator's lock is not held")
        return token

    def _device(self) -> str:
        return "cuda" if any(node.device == "cuda" for node in self._store.nodes()) else "cpu"

    # ------------------------------------------------------------------ the tick

    def tick(self, now: float) -> None:
        """One round.

        Raises:
            FencedError: another coordinator took over.
        """
        self._renew_ledger()
        self._read_events(now)
        self._read_requests(now)
        self._read_reports(now)
        self._conductor.expected_workers = max(1, len(self._posts))
        self._arrears.tend(now)
        self._conductor.tick(now)
        self._say_demand(now)
        self._tend_posts(now)
        self._metric_post.tend(now)
        self._publish_status(now)
        self._save_positions()

    def close(self) -> None:
        """Give up what runs beside the ticks; workers go on."""
        self._conductor.close()
        self._conductor.ledger.close()

    def _renew_ledger(self) -> None:
        """A coordinator whose lock was renewed under a new epoch writes under its new token."""
        token = self._fence()
        if token != self._token:
            old, self._token = self._conductor.ledger, token
            self._conductor.ledger = Ledger(self._ledger_url, token)
            old.close()

    def _save_positions(self) -> None:
        for name in sorted(self._read_to.changed):
            self._store.save_position(f"evaluation.{name}", getattr(self._read_to, name))
        self._read_to.changed.clear()

    def _moved(self, stream: str, position: str) -> None:
        setattr(self._read_to, stream, position)
        self._read_to.changed.add(stream)

    # ------------------------------------------------------------------ what asks for evaluations

    def _read_events(self, now: float) -> None:
        for entry in self._store.read_events(self._read_to.events):
            event = entry.payload
            if event is not None and event.action is Action.EXPORT_PUBLISHED:
                self._take_export(event, now)
            self._moved("events", entry.id)

    def _take_export(self, event: Event, now: float) -> None:
        """A checkpoint's export is there: evaluate it as its job says."""
        record = self._store.job(event.job) if event.job else None
        wanted = event.details.get("evaluate")
        if not wanted or record is None or event.job is None:
            return
        ask = wanted if isinstance(wanted, Mapping) else record["config"].get("evaluate", {})
        tasks = tuple(ask.get("tasks", ()))
        if not tasks:
            return
        step = int(event.details["step"])
        settings = EvalSettings(tasks=tasks, limit=ask.get("limit"), num_fewshot=ask.get("num_fewshot"))
        folder = Path(record["folder"]) / "reports" / step_dir_name(step)
        deadline = ask.get("deadline_seconds")
        spec = RunSpec(
            model=str(event.details["path"]),
            settings=settings,
            output=str(folder),
            created=event.time,
            job=event.job,
            step=step,
            weight=float(record["config"].get("weight", 1.0)),
            stage=True,
            deadline=event.time + float(deadline) if deadline else None,
            behind=str(ask.get("behind", "all")),
        )
        self._conductor.add(self._arrears.fitted(spec))

    def _read_requests(self, now: float) -> None:
        for entry in self._store.read_requests(self._read_to.requests):
            request = entry.payload
            if request is not None and request.kind in ("evaluate", "retry"):
                try:
                    self._take_request(request)
                except (PlanariaError, KeyError, TypeError, ValueError) as error:
                    self._store.refuse("requests", str(dict(request.payload)), one_line(error)[:300])
            self._moved("requests", entry.id)

    def _take_request(self, request: Request) -> None:
        if request.kind == "evaluate":
            self._conductor.add(RunSpec.from_json({**request.payload["spec"], "created": request.time}))
        else:
            self._conductor.retry(str(request.payload["trial"]))

    # ------------------------------------------------------------------ what agents say

    def _read_reports(self, now: float) -> None:
        for entry in self._store.read_reports(self._read_to.reports):
            self._moved("reports", entry.id)
            if entry.payload is None:
                continue
            report = entry.payload.report
            if isinstance(report, WorkerExited):
                self._worker_exited(report, now)
            elif isinstance(report, CommandFailed) and report.command == "start_worker" and report.worker:
                self._start_failed(report.worker, report.reason, now)

    def _worker_exited(self, report: WorkerExited, now: float) -> None:
        self._metric_post.ended(report.worker)
        how = f"signal {report.signal}" if report.signal else f"exit code {report.exit_code}"
        last = report.tail.strip().splitlines()[-1:] or [""]
        self._conductor.worker_gone(
            report.worker, f"{how}; last line: {last[0][:200]}", now, orderly=report.asked or report.exit_code == 4
        )
        self._post_ended(report.worker, now)

    def _start_failed(self, worker: str, reason: str, now: float) -> None:
        log.warning("action=worker.start worker=%s reason=%s", worker, reason)
        self._post_ended(worker, now)

    def _post_ended(self, worker: str, now: float) -> None:
        for post in self._posts.values():
            if post.worker == worker:
                post.fruitless = 0 if worker in self._conductor.served else post.fruitless + 1
                post.worker, post.asked = None, now
                if post.lease.revoked is not None or post.stopping:
                    self._store.release(post.lease, reason="its worker is gone")

    # ------------------------------------------------------------------ demand

    def _say_demand(self, now: float) -> None:
        """Tell the allocator how many slots evaluation can use, or that it wants none."""
        active = [run for run in self._conductor.runs.values() if not run.over]
        backlog, shards = outlook.backlog(self._conductor)
        early = [run for run in active if run.state in (TrialState.QUEUED, TrialState.RECORDING)]
        if active:
            self._busy_until = now + LINGER_SECONDS
        training = any(record.get("state") not in TERMINAL for record in self._store.jobs().values())
        expecting = training and self._has_evaluating_jobs()
        if not active and not expecting and now > self._busy_until:
            self._store.drop_demand(HOLDER)
            return
        most = sum(node.slots for node in self._store.nodes() if node.kind == "agent")
        wanted = max(slots_wanted(backlog, shards, most), 1 if early or expecting or not active else 0)
        wanted = min(most, max(wanted, 1))
        if wanted == 0:
            return
        rate = GPU_FLOPS if self._device() == "cuda" else CPU_FLOPS
        load = outlook.load_seconds(self._conductor) or START_SECONDS
        counts = tuple(range(1, wanted + 1))
        self._store.set_demand(
            HOLDER,
            Demand(
                holder=HOLDER,
                kind="evaluation",
                weight=max((run.spec.weight for run in active), default=1.0),
                min_slots=0,
                max_slots=wanted,
                feasible=counts,
                throughput={count: count * rate for count in counts},
                transition_seconds=load,
                backlog_seconds=max(backlog, 1.0),
                since=min((run.spec.created for run in active), default=now),
                details={
                    "shards": shards,
                    "runs": len(active),
                    "keep_warm": not active,
                    "reports": outlook.reports(self._conductor, now),
                    "load_seconds": load,
                    "resident": outlook.resident(self._conductor),
                },
            ),
        )

    def _has_evaluating_jobs(self) -> bool:
        return any(
            record.get("state") not in TERMINAL and (record.get("config", {}).get("evaluate") or {}).get("tasks")
            for record in self._store.jobs().values()
        )

    # ------------------------------------------------------------------ workers on leases

    def _tend_posts(self, now: float) -> None:
        """One worker per lease: started where there is none, drained where the lease is taken back."""
        nodes = {node.name: node for node in self._store.nodes()}
        leases = {lease.token: lease for lease in self._store.leases(f"{HOLDER}:")}
        for token in self._posts.keys() - leases.keys():
            del self._posts[token]
        for token, lease in leases.items():
            node = nodes.get(lease.node)
            if node is None or node.kind != "agent":
                continue  # a worker started by hand tends its own lease
            post = self._posts.get(token)
            if post is None:
                post = self._posts[token] = _Post(lease, worker=self._worker_on(lease))
            post.lease = lease
            if lease.revoked is not None:
                self._drain(post)
            elif post.fruitless >= FRUITLESS_STARTS:
                self._store.release(lease, confirmed=False, reason="workers do not come up on it")
            elif post.worker is None or (
                post.worker not in self._conductor.roster.records and now - post.asked > START_TIMEOUT
            ):
                self._start(post, now)

    def _worker_on(self, lease: Lease) -> str | None:
        """The worker that runs on a lease already, after a restart of the scheduler."""
        for name, record in self._conductor.roster.records.items():
            if record.facts.get("token") == lease.token:
                return name
        return None

    def _start(self, post: _Post, now: float) -> None:
        if post.starts and now - post.asked < post.fruitless * 1.0:
            return
        lease = post.lease
        post.starts += 1
        base = f"{lease.holder.removeprefix(f'{HOLDER}:')}-{lease.token & 0xFFFFFFFF}"
        post.worker = base if post.starts == 1 else f"{base}-{post.starts}"
        post.asked = now
        slots = list(lease.slots)
        command = StartWorker(
            worker=post.worker, worker_kind="infer", lease=lease.id, lease_token=lease.token, slots=slots
        )
        self._store.send_command(lease.node, command)
        self._store.tell(
            Action.WORKER_STARTED, worker=post.worker, node=lease.node, lease=lease.id, slots=slots, starts=post.starts
        )

    def _drain(self, post: _Post) -> None:
        if post.stopping:
            return
        post.stopping = True
        if post.worker is None:
            self._store.release(post.lease, reason="no worker was on it")
            return
        self._store.send_command(post.lease.node, StopWorker(worker=post.worker, grace_seconds=GRACE_SECONDS))

    def _stage(self, model: ModelRef) -> None:
        """Nodes that evaluation has slots of, then those with the most: as many as it may come to use."""
        nodes = [node for node in self._store.nodes() if node.kind == "agent"]
        mine = {post.lease.node for post in self._posts.values()}
        nodes.sort(key=lambda node: (node.name not in mine, -node.slots, node.name))
        _, shards = outlook.backlog(self._conductor)
        for node in nodes[: max(1, len(mine), min(shards, STAGED_AHEAD))]:
            self._store.send_command(node.name, Stage(path=model.path, digest=model.digest))

    def _kill_worker(self, worker: str, reason: str) -> None:
        for post in self._posts.values():
            if post.worker == worker:
                self._store.send_command(post.lease.node, StopWorker(worker=worker, grace_seconds=0.0))

    # ------------------------------------------------------------------ status

    def _publish_status(self, now: float) -> None:
        last, old = self._status
        if now - last < STATUS_SECONDS:
            return
        workers = len(self._conductor.live())
        rows = {run.id: _run_row(run, workers, now) for run in self._conductor.runs.values()}
        earlier = [row for row in self._finished if row["run"] not in rows]
        status = outlook.status(self._conductor)
        status["done"] += sum(len(row["tasks"]) - len(row["failed"]) for row in earlier if row["state"] == "done")
        status["runs"] = [*earlier, *rows.values()][-MAX_ROWS:]
        if status != old:
            self._store.put_document("evaluation", status)
        self._status = (now, status)


class _MetricPost:
    """Keeps one metric worker on the coordinator's own host while there are runs: it holds no lease."""

    def __init__(self, store: ClusterStore, conductor: Conductor) -> None:
        self._store, self._conductor = store, conductor
        self._name: str | None = None
        self._asked = 0.0
        self._starts = 0

    def tend(self, now: float) -> None:
        """Start it where it is wanted and missing."""
        desk = self._conductor.desk
        wanted = any(not run.over for run in self._conductor.runs.values())
        there = bool(self._conductor.roster.metric())
        coming = self._name is not None and now - self._asked < START_TIMEOUT
        desk.expected = there or coming
        if not wanted or there or coming or self._starts >= FRUITLESS_STARTS:
            self._starts = 0 if there else self._starts
            return
        node = next((one for one in self._store.nodes() if one.kind == "agent" and is_local(one.address)), None)
        if node is None:
            return  # a subprocess does it
        self._name, self._asked = f"metric-{uuid.uuid4().hex[:8]}", now
        self._starts += 1
        command = StartWorker(worker=self._name, worker_kind="metric", lease=None, lease_token=0, slots=[])
        self._store.send_command(node.name, command)
        desk.expected = True

    def ended(self, worker: str) -> None:
        """A worker is gone; if it was this one, another is started."""
        if worker == self._name:
            self._name = None


def is_local(address: str) -> bool:
    """Whether an address is one of this host's: results lie on the coordinator's file system."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _finished_rows(document: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Runs that an earlier scheduler finished, as its last status told them."""
    over = {TrialState.DONE.value, TrialState.FAILED.value, TrialState.SKIPPED.value}
    return [row for row in (document or {}).get("runs", []) if row.get("state") in over]


def _run_row(run: Run, workers: int, now: float) -> dict[str, Any]:
    share, left = run.progress(workers, now)
    return {
        "run": run.id,
        "job": run.spec.job,
        "step": run.spec.step,
        "state": run.state.value,
        "reason": run.reason,
        "failed": sorted(run.failed),
        "tasks": list(run.spec.settings.tasks),
        "share": round(share, 3),
        "seconds_left": None if left is None else round(left, 1),
    }
