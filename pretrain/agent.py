"""The node agent: starts, watches and ends ranks, rendezvous stores and workers on its node's slots.

One thread owns all state: it waits in a selector for exits (pidfds), rank messages and what three helper threads
bring: sealed commands, the beat (heartbeat, leases, quarantine) and nothing else. What is said to the coordinator
goes through a fourth thread, in order, so that a Redis that is away blocks neither supervision nor ranks.

Killed and started again under the same node name and state directory, it adopts what still runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import selectors
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from planner.auth import job_token
from planner.cluster import connect, state_home
from planner.errors import BadInputError, MissingServiceError, PlanariaError, one_line
from planner.events import TERMINAL, JobState
from planner.leases import RenewStatus
from planner.local_checks import Check, broken, changes, judge
from planner.messages import (
    CommandFailed,
    LeaseLost,
    Leave,
    LocalCheck,
    LogVerdict,
    MessageRefused,
    NodeChecked,
    NodeLeaving,
    NodeLeft,
    NodeReady,
    Persisted,
    ProbeNode,
    RankDone,
    RankExited,
    RankHello,
    RankSaid,
    RankStep,
    Reform,
    Report,
    StartRanks,
    StartStore,
    StartWorker,
    StopRanks,
    StopStore,
    StopWorker,
    TellRanks,
    WorkerExited,
)
from planner.scratch import remove_scratch, renew_scratch
from planner.store import ClusterStore, NodeFacts
from pretrain.agent_check import NodeProbe
from pretrain.agent_devices import Devices, find_devices
from pretrain.agent_memory import NodeMemory, PeerTier, find_memory, find_peers
from pretrain.agent_processes import Exit, ProcessTable, Watched, become_subreaper
from pretrain.agent_socket import RankChannel
from pretrain.agent_work import AgentWork, train_python
from pretrain.local_probe import DeviceProbe, nvml_module, read

BEAT_SECONDS = 1.0
CHECK_SECONDS = 10.0
"""Pause between two looks at the node's own health."""
ABANDON_SECONDS = 120.0
"""Seconds without a successful renewal after which everything under a lease is ended: the cluster has given it up.

Longer than a restart of Redis, whose absence counts against no lease; a slot of this node cannot be granted to
anyone else meanwhile, since that needs this agent's word.
"""
PERSISTER_GRACE = 2.0
"""Seconds that persisters get after the ranks, which have waited for the last publication themselves."""
UNKNOWN_SECONDS = 60.0
"""Seconds after which the memory of a job that the cluster does not know is given back."""
PEERS_SECONDS = 5.0
"""Seconds between looks at the table of nodes for keepers of snapshots."""
STORE_GRACE = 3.0
"""Seconds that rendezvous stores outlive the ranks of a node that leaves."""
LEAVE_GRACE = 8.0
"""Seconds that ranks and workers get to publish when the agent itself is told to leave."""


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """What an agent is told at its start."""

    node: str
    address: str
    slots: int | None
    run_dir: Path
    """Folder of its own files: socket, specs, process states."""
    state_dir: Path | None
    secret_file: Path | None
    rank_program: tuple[str, ...] | None = None
    """Program of a rank instead of ``python -m pretrain.rank`` (another interpreter, a test's own)."""
    abandon_seconds: float = ABANDON_SECONDS


class Agent:
    """One node's agent. :meth:`run` returns when it was told to leave."""

    def __init__(self, store: ClusterStore, settings: AgentSettings) -> None:
        if store.secret is None:
            raise MissingServiceError("an agent needs the cluster secret: give --secret-file or --state-dir")
        self.store = store
        self.settings = settings
        self.node = settings.node
        self.boot = uuid.uuid4().hex
        self.devices: Devices = find_devices(settings.slots)
        self._selector = selectors.DefaultSelector()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = threading.Event()
        self._leaving_since: float | None = None
        self._lock = _lock_run_dir(settings.run_dir)
        self._renewed: dict[str, float] = {}
        self._unrenewed_since: dict[str, float] = {}
        self._done: set[int] = set()
        self._unknown: dict[str, float] = {}
        self.table = ProcessTable(settings.run_dir / "processes", self._selector, renew_scratch(settings.run_dir))
        self.channel = RankChannel(
            settings.run_dir / "agent.sock",
            self._selector,
            store.secret,
            self._expected,
            self._rank_said,
            self._refused,
        )
        self.memory = NodeMemory(
            find_memory(self.node), settings.run_dir, self._selector, self.table, self._tell_persisted, self.report,
            train_python(),
        )  # fmt: skip
        self.peers: PeerTier | None = None
        if self.memory.folder is not None:
            secret = store.secret
            self.peers = PeerTier(self.memory.folder, self.node, settings.address, lambda job: job_token(secret, job))
        probed = "cuda-0" if self.devices.kind == "cuda" else "cpu-0"
        self._check = NodeProbe(probed, self.report, self._now, self.table.tolerate)
        self.work = AgentWork(
            store, settings, self.devices, self.table, self.channel, self.report, self.memory, self.peers
        )
        self._selector.register(self._wake, selectors.EVENT_READ, lambda mask: self._drain_inbox())

    # ------------------------------------------------------------------ life

    def run(self) -> None:
        """Register, serve until told to leave, end everything, say goodbye."""
        become_subreaper()
        sender = threading.Thread(target=self._send_all, name="sender", daemon=True)
        sender.start()
        if self.peers is not None:
            self.peers.start()
        after = self.store.end_of(f"commands:{self.node}")
        self._adopt_and_register()
        for target in (lambda: self._read_commands(after), self._beat, self._watch_node, _learn_to_diagnose):
            threading.Thread(target=target, daemon=True).start()
        try:
            self._serve()
        finally:
            self.report(NodeLeaving(time=self._now()))
            self._check.close()
            self._end_everything()
            self.work.end_nursery()
            self._stop.set()
            self.memory.close(PERSISTER_GRACE)
            if self.peers is not None:
                self.peers.close()
            self.report(NodeLeft(time=self._now()))
            self._outbox.put(None)
            sender.join(timeout=3.0)
            self._sign_off()
            self.channel.close()
            remove_scratch(self.settings.run_dir)
            os.close(self._lock)

    def leave(self) -> None:
        """Ask the main loop to leave; safe in a signal handler and in threads."""
        self._leaving_since = self._leaving_since or time.monotonic()
        os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        next_sweep = 0.0
        while self._leaving_since is None:
            now = time.monotonic()
            deadlines = [next_sweep, self.table.next_deadline() or next_sweep]
            for key, mask in self._selector.select(max(0.0, min(deadlines) - now)):
                if isinstance(key.data, Watched):
                    self._exited(key.data)
                else:
                    key.data(mask)
            now = time.monotonic()
            self.table.kill_overdue(now)
            if now >= next_sweep:
                self.table.reap_orphans()
                self.memory.sweep()
                self._abandon_overdue()
                next_sweep = now + BEAT_SECONDS

    def _end_everything(self) -> None:
        """SIGTERM to all, SIGKILL after the grace; exits are reported and ranks are told what is decided as ever."""
        stores = self._of("store")
        for process in self.table:
            if process not in stores:
                self.table.end(process, LEAVE_GRACE)
        deadline = time.monotonic() + LEAVE_GRACE + 2.0
        while len(self.table) and time.monotonic() < deadline:
            if stores and all(process in stores for process in self.table):
                # The other nodes' ranks may be about to re-form by them; the supervisor says when it has others.
                for process in stores:
                    process.kill_at = time.monotonic() + STORE_GRACE
                stores = []
            due = self.table.next_deadline() or deadline
            for key, mask in self._selector.select(max(0.0, min(due, deadline) - time.monotonic())):
                if isinstance(key.data, Watched):
                    self._exited(key.data)
                else:
                    key.data(mask)
            self.table.kill_overdue(time.monotonic())

    def _sign_off(self) -> None:
        """Give all leases of this node back and take it off the list; without Redis they end by themselves."""
        with contextlib.suppress(PlanariaError):
            for lease in self.store.leases(node=self.node):
                self.store.release(lease, confirmed=not len(self.table), reason="the node leaves")
            self.store.remove_node(self.node)

    # ------------------------------------------------------------------ coming up

    def _adopt_and_register(self) -> None:
        alive, gone = self.table.adopt()
        for end in gone:
            self._report_exit(end)
        adopt = {(p.lease, int(p.about.get("lease_token", 0))) for p in alive if p.lease is not None}
        self.store.register_node(self._facts(), sorted(adopt))
        for process in alive:
            if process.about["kind"] == "store":
                # Its parent is gone, so it is about to end; incarnations to come get a new one.
                self.table.kill(process)
        ranks = [(str(p.about["job"]), int(p.about["incarnation"]), int(p.about["rank"])) for p in self._of("rank")]
        workers = [str(p.about["worker"]) for p in self._of("worker")]
        self.report(NodeReady(time=self._now(), slots=self.devices.slots, ranks=ranks, workers=workers))

    def _facts(self) -> NodeFacts:
        return NodeFacts(
            name=self.node,
            address=self.settings.address,
            slots=self.devices.slots,
            boot=self.boot,
            threads_per_slot=self.devices.threads_per_slot,
            memory_bytes=self.devices.memory_bytes,
            device=self.devices.kind,
            pid=os.getpid(),
            labels=self._labels(),
        )

    def _labels(self) -> dict[str, str]:
        labels = {"switch": os.environ["PLANARIA_SWITCH"]} if os.environ.get("PLANARIA_SWITCH") else {}
        if self.peers is not None:
            labels["peer"] = ":".join(map(str, self.peers.server.address))
        return labels

    def _of(self, kind: str) -> list[Watched]:
        return [process for process in self.table if process.about["kind"] == kind]

    # ------------------------------------------------------------------ helper threads

    def _post(self, action: Callable[[], None]) -> None:
        """Have the main thread do something."""
        self._inbox.put(action)
        os.eventfd_write(self._wake, 1)

    def _drain_inbox(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while True:
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return
            action()

    def report(self, report: Report) -> None:
        """Send a report, after all earlier ones."""
        self._outbox.put(lambda: self.store.send_report(self.node, report))

    def _send_all(self) -> None:
        while (send := self._outbox.get()) is not None:
            while True:
                try:
                    send()
                    break
                except MissingServiceError as error:
                    _log("report.waits", reason=one_line(error))
                    if self._stop.wait(1.0):
                        return

    def _read_commands(self, after: str) -> None:
        while not self._stop.is_set():
            try:
                entries = self.store.read_commands(self.node, after, block=1.0)
            except MissingServiceError as error:
                _log("commands.wait", reason=one_line(error))
                self._stop.wait(1.0)
                continue
            for entry in entries:
                after = entry.id
                if entry.payload is not None:
                    self._post(partial(self._command, entry.payload))

    def _beat(self) -> None:
        """Each second: live, keep what is ours, answer for free slots, see which jobs in memory are over."""
        look_at_peers = 0.0
        while not self._stop.is_set():
            try:
                if not self.store.heartbeat(self.node):
                    held = {(p.lease, int(p.about.get("lease_token", 0))) for p in self.table if p.lease}
                    self.store.register_node(self._facts(), sorted(held))
                self._renew()
                if marks := self.store.quarantine(self.node):
                    self._post(partial(self._free, marks))
                self._see_what_is_over()
                if self.peers is not None and time.monotonic() >= look_at_peers:
                    self.peers.peers = find_peers(self.store.nodes(), self.node)
                    look_at_peers = time.monotonic() + PEERS_SECONDS
            except PlanariaError as error:
                _log("beat.failed", reason=one_line(error))
            self._stop.wait(BEAT_SECONDS)

    def _see_what_is_over(self) -> None:
        """Jobs that have state in this node's memory, are over (or unknown) and have no rank here give it back."""
        held, now = self.memory.held(), time.monotonic()
        self._unknown = {job: since for job, since in self._unknown.items() if job in held}
        for job in held:
            record = self.store.job(job)
            if record is not None:
                self._unknown.pop(job, None)
                over = JobState(record["state"]) in TERMINAL
            else:  # a Redis that comes up may not have all its data yet
                over = now - self._unknown.setdefault(job, now) > UNKNOWN_SECONDS
            if over:
                self._post(partial(self._drop_memory, job))

    def _drop_memory(self, job: str) -> None:
        if not any(process.about["job"] == job for process in self._of("rank")):
            self.memory.drop(job)

    def _watch_node(self) -> None:
        """Look at the node itself now and then; what changed is reported."""
        devices = DeviceProbe(nvml_module())
        before: tuple[Check, ...] = ()
        while not self._stop.is_set():
            checks = judge(read(devices, self._folders(), self._clock_offset))
            if changed := [check.name for check in changes(before, checks)]:
                told = [LocalCheck(name=one.name, state=one.state, reason=one.reason) for one in checks]
                self.report(NodeChecked(time=self._now(), checks=told, changed=changed, broken=broken(checks)))
            before = checks
            self._stop.wait(CHECK_SECONDS)
        devices.close()

    def _folders(self) -> list[Path]:
        """Folders that must have room: the agent's own and those of the jobs (checkpoints too) whose ranks run here."""
        jobs = {folder for process in self.table for folder in process.about.get("folders", [])}
        return [self.settings.run_dir, *(Path(folder).expanduser() for folder in sorted(jobs))]

    def _clock_offset(self) -> float | None:
        try:
            return time.time() - self.store.server_time()
        except PlanariaError:
            return None

    def _renew(self) -> None:
        held = {process.lease for process in self.table if process.lease}
        leases = {lease.id: lease for lease in self.store.leases(node=self.node)}
        for lease in held - leases.keys():
            self._post(partial(self._lost, lease, "the lease does not exist any more"))
        answers = self.store.table.renew([(lease.id, lease.token) for lease in leases.values()])
        for lease, answer in zip(leases, answers, strict=True):
            if answer.status is RenewStatus.LOST:
                self._post(partial(self._lost, lease, "the lease ended"))
        self._renewed = dict.fromkeys(leases, time.monotonic())

    def _abandon_overdue(self) -> None:
        """End what runs under leases that nobody could renew for too long; the beat itself may be stuck by then."""
        now, renewed = time.monotonic(), self._renewed
        self._unrenewed_since = {
            lease: max(renewed.get(lease, 0.0), self._unrenewed_since.get(lease, now)) for lease in self.table.leases()
        }
        for lease, since in self._unrenewed_since.items():
            if now - since > self.settings.abandon_seconds:
                self._lost(lease, f"not renewed for {self.settings.abandon_seconds:.0f} s")

    # ------------------------------------------------------------------ what happens

    def _now(self) -> float:
        return self.store.clock.time()

    def _command(self, command: Any) -> None:
        try:
            self._dispatch(command)
        except (OSError, ValueError, PlanariaError) as error:
            _log("command.failed", command=command.kind, reason=one_line(error))
            self.report(
                CommandFailed(
                    time=self._now(),
                    command=command.kind,
                    job=getattr(command, "job", None) or _job_of(command),
                    incarnation=getattr(command, "incarnation", None) or _incarnation_of(command),
                    worker=getattr(command, "worker", None),
                    reason=one_line(f"{type(error).__name__}: {error}")[:500],
                )
            )

    def _dispatch(self, command: Any) -> None:
        if self._leaving_since is not None and not isinstance(command, (TellRanks, StopRanks, StopStore)):
            raise ValueError("this node leaves")
        if isinstance(command, StartStore):
            self.work.start_store(command)
        elif isinstance(command, StopStore):
            self.work.stop_store(command)
        elif isinstance(command, StartRanks):
            self.work.start_ranks(command)
        elif isinstance(command, StopRanks):
            self.work.stop_ranks(command)
        elif isinstance(command, TellRanks):
            self.work.tell_ranks(command)
            if isinstance(command.message, Reform):
                for word in self.memory.words(command.job):
                    self._tell_persisted(command.job, word)
        elif isinstance(command, StartWorker):
            self.work.start_worker(command)
        elif isinstance(command, StopWorker):
            self.work.stop_worker(command)
        elif isinstance(command, ProbeNode):
            self._check.take(command)
        elif isinstance(command, Leave):
            self.leave()
        else:
            self.work.stage(command)

    def _exited(self, process: Watched) -> None:
        self.channel.drain(process.pid)
        if process.pid not in self._done:
            self.work.tell_peers(process)  # first of all: they must not wait for it
        self._done.discard(process.pid)
        self._report_exit(self.table.reap(process))

    def _report_exit(self, end: Exit) -> None:
        about, process = end.process.about, end.process
        common: dict[str, Any] = {
            "time": self._now(),
            "pid": process.pid,
            "exit_code": end.exit_code,
            "signal": end.signal,
            "asked": process.asked,
            "tail": end.tail,
        }
        if about["kind"] == "rank":
            self.work.forget_spec(about)
            where = {key: about[key] for key in ("job", "incarnation", "rank")}
            verdict = _verdict(end)
            self.report(RankExited(**common, **where, leftovers=end.leftovers, verdict=verdict))
        elif about["kind"] == "worker":
            self.report(WorkerExited(**common, worker=about["worker"]))
        elif about["kind"] == "store" and not process.asked:
            self.report(
                CommandFailed(
                    time=self._now(),
                    command="start_store",
                    job=about["job"],
                    reason=f"the rendezvous store ended: {one_line(end.tail)[-300:]}",
                )
            )

    def _lost(self, lease: str, reason: str) -> None:
        """End what runs under a lease that is gone: no grace, the grace was before its end."""
        hit = [process for process in self.table if process.lease == lease]
        for process in hit:
            self.table.kill(process)
        if hit:
            _log("lease.lost", lease=lease, reason=reason)
            self.report(LeaseLost(time=self._now(), lease=lease, reason=reason))

    def _free(self, marks: dict[str, str]) -> None:
        """Answer for slots in quarantine: those that no process of ours holds are free; holders are ended."""
        busy = {f"{self.node}/{slot}": process for process in self.table for slot in process.slots}
        for name in marks.keys() & busy.keys():
            self.table.kill(busy[name])
        free = {name: mark for name, mark in marks.items() if name not in busy}
        if free:
            self._outbox.put(lambda: self.store.confirm_free(self.node, free))

    # ------------------------------------------------------------------ rank channel

    def _expected(self, job: str, incarnation: int, rank: int, pid: int) -> bool:
        process = self.table.get(f"rank:{job}:{incarnation}:{rank}")
        return process is not None and process.pid == pid

    def _rank_said(self, who: tuple[str, int, int], message: BaseModel, pid: int, seq: int) -> None:
        job, incarnation, rank = who
        if isinstance(message, RankHello):
            for word in self.memory.words(job):
                self.channel.send(who, word)
        if isinstance(message, RankDone) and (process := self.table.get(f"rank:{job}:{incarnation}:{rank}")):
            self._done.add(process.pid)
        if isinstance(message, RankStep):
            self.work.begin_nursery()
        said = RankSaid(
            time=self._now(), job=job, incarnation=incarnation, rank=rank, pid=pid, seq=seq, message=message
        )
        self.report(said)
        if seq:
            self._outbox.put(partial(self._post, partial(self.channel.acknowledge, pid, seq)))

    def _tell_persisted(self, job: str, word: Persisted) -> None:
        for process in self._of("rank"):
            if process.about["job"] == job:
                self.channel.send((job, int(process.about["incarnation"]), int(process.about["rank"])), word)

    def _refused(self, reason: str) -> None:
        _log("message.refused", reason=reason)
        self.report(MessageRefused(time=self._now(), source="ranks", reason=reason))


def _job_of(command: Any) -> str | None:
    return command.specs[0].job if isinstance(command, StartRanks) and command.specs else None


def _incarnation_of(command: Any) -> int | None:
    return command.specs[0].incarnation if isinstance(command, StartRanks) and command.specs else None


def _learn_to_diagnose() -> None:
    from pretrain.diagnosis.verdicts import warm_up

    warm_up()


def _verdict(end: Exit) -> LogVerdict | None:
    """What the log of a rank that ended by itself says is the cause."""
    from pretrain.diagnosis.verdicts import of_log

    return None if end.process.asked or not (end.exit_code or end.signal) else of_log(end.process.log)


def _log(action: str, **details: object) -> None:
    shown = " ".join(f"{key}={value}" for key, value in details.items())
    print(f"{time.strftime('%H:%M:%S')} action={action} {shown}", flush=True)


def _lock_run_dir(run_dir: Path) -> int:
    """Only one agent serves a node name in a state directory.

    Raises:
        BadInputError: another agent does, or the folder cannot be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BadInputError(f"--state-dir: {run_dir} cannot be written ({error.strerror}); name another") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BadInputError(
            f"--node {run_dir.name}: an agent of that name runs already in this state directory"
        ) from None
    return fd


def agent_command(
    *,
    url: str | None,
    node: str | None,
    slots: int | None,
    address: str,
    state_dir: Path | None,
    secret_file: Path | None,
    rank_program: Sequence[str] | None = None,
    abandon_seconds: float = ABANDON_SECONDS,
) -> int:
    """``planaria agent``: serves until SIGTERM, SIGINT or a ``leave`` command."""
    name = node or os.uname().nodename
    if "/" in name or ":" in name or name.startswith("."):
        raise BadInputError(f"--node {name}: a node name holds neither '/' nor ':' and does not begin with '.'")
    store, found = connect(url, state_dir, secret_file=secret_file, daemon=True)
    place = (state_dir or found.state_dir or state_home() / "agent").expanduser().absolute()
    secret = secret_file or (Path(named) if (named := os.environ.get("PLANARIA_SECRET_FILE")) else place / "secret")
    settings = AgentSettings(
        node=name,
        address=address,
        slots=slots,
        run_dir=place / "nodes" / name,
        state_dir=place,
        secret_file=secret if secret.exists() else None,
        rank_program=tuple(rank_program) if rank_program else None,
        abandon_seconds=abandon_seconds,
    )
    agent = Agent(store, settings)

    def on_signal(number: int, frame: object) -> None:
        store.link.patience = min(store.link.patience, 2.0)
        agent.leave()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        agent.run()
    finally:
        store.close()
    return 0
