"""The job supervisor: one of the coordinator's loops, and the shell around :mod:`planner.job_machine`.

Each round it reads what people ask, what agents report and which leases the jobs hold, lets the machine decide, and
carries the decision out in an order that survives a kill at any point:

1. lines and events are appended to the job's folder;
2. the new record goes into Redis: the commit. It names the position in the reports up to which it speaks, the
   length of each file, and the commands and events that are still to be sent;
3. commands and events are sent.

A coordinator that starts cuts the files back to what the record says and sends what it names; what agents get twice
they do once.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from planner import ettr, job_healing, job_machine, manifest, retention
from planner.auth import job_token
from planner.errors import MissingServiceError, PlanariaError, one_line
from planner.events import Action, Event
from planner.files import read_json_lines
from planner.job_demand import demand
from planner.job_events import (
    Asked,
    CommandRefused,
    Cordon,
    Exited,
    ExportEnded,
    Holding,
    JobAction,
    JobEvent,
    NodeBroken,
    NodeLeaving,
    NodeUp,
    Persisted,
    Release,
    Said,
    Send,
    Spiked,
    Started,
    StartJoiners,
    StartSpecs,
    StoreAt,
    Stuck,
    Tell,
    Tick,
    Write,
)
from planner.job_record import JobRecord, RankRecord
from planner.leases import Lease
from planner.loss_watch import LossWatch, Spike
from planner.manifest import step_dir_name
from planner.messages import COMMANDS, RankCheckpoint, RankSpec, StartRanks
from planner.pretrain_config import PretrainConfig
from planner.store import ClusterStore, Entry, ReportEnvelope, Request
from planner.types import CHECK_MARK
from pretrain import published
from pretrain.diagnosis.verdicts import examined, warm_up
from pretrain.exports import Exporter, ExportResult
from pretrain.job_folder import JobFolder, checkpoint_folder, finite
from pretrain.watch import JobWatch

READER = "supervisor"
ROUND_SECONDS = 1.0
"""How long one tick stays in its loop: reports are answered as they come, not at the next tick."""
BLOCK_SECONDS = 0.2
"""Longest wait for reports; leases and time are looked at as often."""
ACCOUNT_SECONDS = 5.0
"""Least seconds between two accounts of a job's time."""


class Supervisor:
    """The loop; see :class:`planner.coordinator.Loop`.

    Args:
        store: with the cluster secret.
        state_dir: jobs' folders are below it.
    """

    pause_seconds = 0.0
    """A tick waits for reports by itself, so the next one follows at once."""

    def __init__(self, store: ClusterStore, state_dir: Path) -> None:
        if store.secret is None:
            raise MissingServiceError("the supervisor needs the cluster secret")
        self._store = store
        self._secret = store.secret
        self._jobs_dir = state_dir / "jobs"
        self._jobs: dict[str, JobRecord] = {}
        self._leases: dict[str, tuple[Lease, ...]] = {}
        self._watches: dict[str, JobWatch] = {}
        self._losses: dict[str, LossWatch] = {}
        self._spikes: dict[str, Spike] = {}
        """Spikes found in the lines just written, for the next round."""
        self._demands: dict[str, Any] = {}
        self._account_due: dict[str, float] = {}
        self._exporter = Exporter(state_dir / "logs" / "exporter.log")
        threading.Thread(target=warm_up, name="rules", daemon=True).start()
        self._last_round = 0.0
        self._requests = store.position(f"{READER}:requests")
        self._position = self._recover()

    def close(self) -> None:
        """End what runs here; ranks go on."""
        self._exporter.close()

    # ------------------------------------------------------------------ coming back

    def _recover(self) -> str:
        """Load all jobs, cut their files to the records, send what was not sent; the position to read on from."""
        for job, raw in self._store.jobs().items():
            record = JobRecord.model_validate(raw)
            self._jobs[job] = record
            if not record.over or record.outbox:
                JobFolder(Path(record.folder)).cut(record.files)
                self._send_outbox(record)
        open_jobs = [record for record in self._jobs.values() if not record.over]
        saved = self._store.position(READER)
        return min((record.cursor for record in open_jobs), key=_order, default=saved)

    # ------------------------------------------------------------------ a round

    def tick(self, now: float) -> None:
        """Serve for about a second.

        Raises:
            MissingServiceError: Redis is away for longer than the store's patience.
        """
        end = time.monotonic() + ROUND_SECONDS
        self._rebase(now)
        while True:
            self._read_requests()
            self._read_leases()
            self._round(self._reports(BLOCK_SECONDS))
            self._export()
            if time.monotonic() >= end:
                break
        self._account()
        self._store.save_position(READER, self._position)
        self._last_round = self._store.clock.time()

    def _rebase(self, now: float) -> None:
        """After a pause of ours, silence of the ranks proves nothing: their limits begin anew."""
        if now - self._last_round > 5.0:
            for job, record in self._jobs.items():
                job_healing.allow_time(record, now)
                if record.stage == "running":
                    self._watch(job).start(record, now)

    def _round(self, entries: Sequence[Entry[ReportEnvelope | None]]) -> None:
        now = self._store.clock.time()
        cursor = entries[-1].id if entries else self._position
        events = self._sort(entries)
        waiting = self._waiting()
        for job, record in list(self._jobs.items()):
            mine = [event for position, event in events[job] if _order(position) > _order(record.cursor)]
            if record.over:
                self._settle_over(record, mine, now, cursor)
                continue
            stuck: list[JobEvent] = [Stuck(found) for found in self._watch(job).observe(record, mine, now)]
            if (spike := self._spikes.pop(job, None)) is not None:
                stuck.append(Spiked(spike))
            held = Holding(self._leases.get(job, ()), waiting.get(record.holder, ""))
            self._apply(record, [*mine, *stuck, held, Tick()], now, cursor)
        self._position = cursor

    def _settle_over(self, record: JobRecord, events: list[JobEvent], now: float, cursor: str) -> None:
        """A job that is over still gives back what it holds."""
        if self._leases.get(record.id) or events:
            self._apply(record, [*events, Holding(self._leases.get(record.id, ()))], now, cursor)

    def _waiting(self) -> Mapping[str, str]:
        if all(record.over or record.stage != "none" for record in self._jobs.values()):
            return {}
        return dict((self._store.document("decision") or {}).get("waiting", {}))

    def _reports(self, block: float) -> list[Entry[ReportEnvelope | None]]:
        return self._store.read_reports(self._position, block=block)

    def _read_leases(self) -> None:
        found: dict[str, list[Lease]] = defaultdict(list)
        for lease in self._store.leases("job:"):
            found[lease.holder.removeprefix("job:")].append(lease)
        self._leases = {job: tuple(leases) for job, leases in found.items()}

    def _watch(self, job: str) -> JobWatch:
        if job not in self._watches:
            self._watches[job] = JobWatch(self._jobs[job].settings.health)
        return self._watches[job]

    # ------------------------------------------------------------------ requests

    def _read_requests(self) -> None:
        entries = self._store.read_requests(self._requests)
        for entry in entries:
            if entry.payload is not None:
                try:
                    self._request(entry.payload)
                except (PlanariaError, KeyError, ValueError, TypeError) as error:
                    self._store.tell(Action.MESSAGE_REFUSED, source="requests", reason=one_line(repr(error))[:500])
        if entries:
            self._requests = entries[-1].id
            self._store.save_position(f"{READER}:requests", self._requests)

    def _request(self, request: Request) -> None:
        payload = request.payload
        if request.kind == "submit":
            self._submit(str(payload["job"]), payload["config"], request.time)
        elif request.kind in ("cancel", "pause", "resume", "preempt"):
            record = self._jobs.get(str(payload["job"]))
            if record is None or record.over:
                reason = f"{request.kind}: job {payload['job']} is not known or over"
                self._store.tell(Action.MESSAGE_REFUSED, source="requests", reason=reason)
                return
            self._apply(record, [Asked(request.kind)], self._store.clock.time(), self._position)

    def _submit(self, job: str, raw: Mapping[str, Any], submitted: float) -> None:
        """Take a job; asked again for the same id, nothing happens, but a preempted one goes on."""
        config = PretrainConfig.model_validate(raw)
        known = self._jobs.get(job)
        if known is not None:
            self._resubmit(known)
            return
        folder = JobFolder(self._jobs_dir / job)
        folder.make(config.to_json())
        folder.cut({})
        record = JobRecord(
            id=job,
            name=config.name,
            folder=str(folder.path),
            config=config.to_json(),
            submitted=submitted,
            cursor=self._position,
        )
        self._jobs[job] = record
        event = Event(time=submitted, action=Action.JOB_SUBMITTED, job=job, reason="", details={"name": config.name})
        self._commit(record, [Tell(event)], self._position)

    def _resubmit(self, record: JobRecord) -> None:
        if record.state.value != "preempted":
            return
        self._apply(record, [Asked("again")], self._store.clock.time(), self._position)

    # ------------------------------------------------------------------ reports to events

    def _sort(self, entries: Iterable[Entry[ReportEnvelope | None]]) -> defaultdict[str, list[tuple[str, JobEvent]]]:
        """Events by job, each with its position in the stream."""
        found: defaultdict[str, list[tuple[str, JobEvent]]] = defaultdict(list)
        for entry in entries:
            if entry.payload is None:
                continue
            for job, event in self._events(entry.payload):
                found[job].append((entry.id, event))
        return found

    def _events(self, envelope: ReportEnvelope) -> Iterable[tuple[str, JobEvent]]:
        report, node = envelope.report, envelope.node
        match report.kind:
            case "rank_said":
                yield (
                    report.job,
                    Said(report.incarnation, report.rank, examined(report.message), report.pid, report.seq),
                )
            case "checkpoint_said":
                yield report.job, Persisted(report.message)
            case "rank_started":
                yield report.job, Started(report.incarnation, report.rank, report.pid)
            case "rank_exited":
                yield (
                    report.job,
                    Exited(
                        report.incarnation,
                        report.rank,
                        report.exit_code,
                        report.signal,
                        report.asked,
                        report.tail,
                        report.verdict,
                    ),
                )
            case "store_ready":
                yield report.job, self._store_at(node, report)
            case "command_failed":
                if report.job is not None:
                    yield report.job, CommandRefused(node, report.command, report.incarnation, report.reason)
            case "node_ready":
                for job, record in self._jobs.items():
                    yield job, NodeUp(node, frozenset((i, r) for j, i, r in report.ranks if j == job))
                    for event in _unheard(record):
                        yield job, event
            case "node_checked":
                self._checked(node, report)
                if report.broken:
                    for job in self._jobs:
                        yield job, NodeBroken(node, report.broken)
            case "node_leaving":
                for job in self._jobs:
                    yield job, NodeLeaving(node)
            case "node_left":
                for job in self._jobs:
                    yield job, NodeUp(node, frozenset(), ready=False)
            case "message_refused":
                self._store.tell(Action.MESSAGE_REFUSED, source=report.source, reason=report.reason, node=node)

    def _checked(self, node: str, report: Any) -> None:
        """A node's own checks: for the event log and ``planaria nodes``; a broken one takes no more work."""
        found = {check.name: {"state": check.state, "reason": check.reason} for check in report.checks}
        self._store.put_document("node_checks", (self._store.document("node_checks") or {}) | {node: found})
        for name in report.changed:
            details = {"node": node, "check": name, "state": found[name]["state"]}
            self._store.tell(Action.NODE_CHECKED, reason=f"{name}: {found[name]['reason']}", **details)
        if report.broken and node not in self._store.cordoned():
            self._store.cordon(node, "cordon")
            self._store.tell(Action.NODE_CORDONED, node=node, reason=report.broken)

    def _store_at(self, node: str, report: Any) -> StoreAt:
        record = self._jobs.get(report.job)
        resume, skip_to = None, 0
        if record is not None:
            folder = checkpoint_folder(record.settings, Path(record.folder))
            chosen = published.newest_sound(folder, record.roll_back)
            resume = str(chosen) if chosen is not None else None
            if record.roll_back is not None:
                skip_to = published.end_of_stretch(folder, record.roll_back, record.settings.batch.global_)
        named = manifest.parse_step_dir(Path(resume).name) if resume is not None else None
        step = named[0] if named else 0
        return StoreAt(report.incarnation, node, report.host, report.port, resume, step, skip_to)

    # ------------------------------------------------------------------ decisions to deeds

    def _apply(self, record: JobRecord, events: list[JobEvent], now: float, cursor: str) -> None:
        """Decide and commit; a record that did not change is not written again."""
        try:
            decision = job_machine.decide_all(record, events, now)
        except Exception:
            decision = self._without_the_poisonous(record, events, now)
        self._jobs[record.id] = decision.job
        reported = len(events) > 2 or not all(isinstance(event, (Holding, Tick)) for event in events)
        if decision.actions or decision.job != record:
            self._commit(decision.job, decision.actions, cursor)
        elif reported:
            decision.job.cursor = cursor
        self._ask(decision.job)

    def _without_the_poisonous(self, record: JobRecord, events: list[JobEvent], now: float) -> job_machine.Decision:
        """The same decision, leaving out each event that the machine cannot take: one job's trouble stays its own."""
        job, actions = record, list[JobAction]()
        for event in events:
            try:
                decision = job_machine.decide(job, event, now)
            except Exception as error:
                reason = one_line(f"{type(event).__name__}: {type(error).__name__}: {error}")[:500]
                self._store.tell(
                    Action.MESSAGE_REFUSED, job=record.id, source="supervisor", reason=reason,
                    traceback=traceback.format_exc()[-4000:],
                )  # fmt: skip
                continue
            job = decision.job
            actions += decision.actions
        return job_machine.Decision(job, tuple(actions))

    def _commit(self, record: JobRecord, actions: Sequence[JobAction], cursor: str) -> None:
        folder = JobFolder(Path(record.folder))
        told = [action.event for action in actions if isinstance(action, Tell)]
        self._watch_losses(record, [a.line for a in actions if isinstance(a, Write) and a.file == "metrics.jsonl"])
        for file in ("samples.jsonl", "metrics.jsonl"):
            folder.append(file, [finite(a.line) for a in actions if isinstance(a, Write) and a.file == file])
        folder.append("events.jsonl", [finite(event.to_json()) for event in told])
        for action in actions:
            record.outbox += self._to_send(record, action)
        record.cursor = cursor
        record.files = folder.sizes()
        self._store.put_job(record.id, record.to_store())
        self._send_outbox(record)
        for action in actions:
            self._carry_out(record, action)

    def _watch_losses(self, record: JobRecord, lines: Sequence[Mapping[str, Any]]) -> None:
        """Look for a spike in the steps about to be written."""
        if not lines:
            return
        watch = self._losses.get(record.id)
        if watch is None:
            watch = self._losses[record.id] = LossWatch()
            path = Path(record.folder) / "metrics.jsonl"
            known = read_json_lines(path) if path.exists() else []
            watch.replay((line["step"], line["loss"], line.get("grad_norm")) for line in known)
        for line in lines:
            spike = watch.feed(line["step"], line["loss"], line["grad_norm"])
            if spike is not None:
                self._spikes[record.id] = spike

    def _to_send(self, record: JobRecord, action: JobAction) -> list[dict[str, Any]]:
        if isinstance(action, Send):
            return [{"node": action.node, "command": action.command.model_dump(mode="json")}]
        if isinstance(action, StartSpecs):
            return [
                {"node": node, "command": command.model_dump(mode="json", by_alias=True)}
                for node, command in self._start_ranks(record, action)
            ]
        if isinstance(action, StartJoiners):
            return [
                {"node": node, "command": command.model_dump(mode="json", by_alias=True)}
                for node, command in self._start_joiners(record, action)
            ]
        if isinstance(action, Tell):
            return [{"event": finite(action.event.to_json())}]
        return []

    def _start_ranks(self, record: JobRecord, action: StartSpecs) -> Iterable[tuple[str, StartRanks]]:
        """One command per lease."""
        for lease in dict.fromkeys(rank.lease for rank in record.ranks):
            ranks = [rank for rank in record.ranks if rank.lease == lease]
            specs = [self._spec(record, rank, action.host, action.port, resume=action.resume) for rank in ranks]
            yield ranks[0].node, StartRanks(lease=lease, specs=specs, slots=[rank.slot for rank in ranks])

    def _start_joiners(self, record: JobRecord, action: StartJoiners) -> Iterable[tuple[str, StartRanks]]:
        """One command for each rank that is to join: one that cannot be started holds up no other."""
        for rank in record.joiners:
            if rank.rank in action.names:
                spec = self._spec(record, rank, record.store_host, record.store_port, joining=True)
                yield rank.node, StartRanks(lease=rank.lease, specs=[spec], slots=[rank.slot])

    def _spec(
        self,
        record: JobRecord,
        rank: RankRecord,
        host: str,
        port: int,
        *,
        resume: str | None = None,
        joining: bool = False,
    ) -> RankSpec:
        back = None if joining else record.roll_back
        return RankSpec(
            job=record.id,
            incarnation=record.incarnation,
            rank=rank.rank,
            origin_rank=rank.origin,
            world_size=record.size,
            store_host=host,
            store_port=port,
            token=job_token(self._secret, record.id),
            lease_token=rank.lease_token,
            agent_socket=None,
            job_folder=record.folder,
            config=record.settings,
            resume=resume,
            exact_resume=back is not None and published.from_before(resume, back),
            state_since=back.incarnation if back else 0,
            skip_to=back.skip_to if back else 0,
            fired_faults=record.fired,
            known_step=record.step if record.incarnation > 1 else None,
            joining=joining,
        )

    def _send_outbox(self, record: JobRecord) -> None:
        for entry in record.outbox:
            if "event" in entry:
                self._store.emit(Event.from_json(entry["event"]))
            else:
                self._store.send_command(entry["node"], COMMANDS.validate_python(entry["command"]))
        record.outbox = []

    def _carry_out(self, record: JobRecord, action: JobAction) -> None:
        if isinstance(action, Release):
            for lease in self._leases.get(record.id, ()):
                if action.leases is None or lease.id in action.leases:
                    self._store.release(lease, reason=f"given back by {record.holder}")
        elif isinstance(action, Cordon):
            if action.node not in self._store.cordoned():
                self._store.cordon(action.node, CHECK_MARK)
            self._store.tell(Action.NODE_CORDONED, node=action.node, reason=action.reason, job=record.id)
            for lease in self._leases.get(record.id, ()):
                if lease.node == action.node:
                    self._store.release(lease, confirmed=False, reason=action.reason)

    def _ask(self, record: JobRecord) -> None:
        """Tell the allocator what the job wants, where that changed."""
        wanted = demand(record)
        said = None if wanted is None else wanted.to_json()
        if record.id in self._demands and self._demands[record.id] == said:
            return
        if wanted is None:
            self._store.drop_demand(record.holder)
        else:
            self._store.set_demand(record.holder, wanted)
        self._demands[record.id] = said

    # ------------------------------------------------------------------ exports and the account

    def _export(self) -> None:
        result = self._exporter.poll()
        if result is not None:
            self._exported(result)
        if self._exporter.busy:
            return
        self._exporter.keep(
            any(job.exports or (job.progressed and job.settings.checkpoint.export and not job.over)
                for job in self._jobs.values())
        )  # fmt: skip
        now = self._store.clock.time()
        for record in sorted(self._jobs.values(), key=lambda record: record.submitted):
            for entry in record.exports:
                if entry.not_before <= now:
                    target = _export_target(record, entry.step)
                    at_once = self._exporter.start(record.id, entry.step, entry.path, target)
                    if at_once is not None:
                        self._exported(at_once)
                    return

    def _exported(self, result: ExportResult) -> None:
        event = ExportEnded(result.step, result.path, result.reason, result.seconds)
        self._apply(self._jobs[result.job], [event], self._store.clock.time(), self._position)

    def _retain_exports(self, record: JobRecord) -> None:
        """Delete the exports whose checkpoint is gone and that no trial needs."""
        reports = Path(record.folder) / "reports"
        gone = retention.deletable_exports(
            record.exported,
            published=record.published,
            evaluated=lambda step: (reports / step_dir_name(step) / "results.json").exists(),
        )
        for step in gone:
            with contextlib.suppress(OSError):  # what cannot be deleted now is looked at again
                published.remove_tree(_export_target(record, step))
                del record.exported[step]

    def _account(self) -> None:
        """ETTR of each job, from its events and metrics alone."""
        now = self._store.clock.time()
        for job, record in self._jobs.items():
            due = record.over or now >= self._account_due.get(job, 0.0)
            if record.accounted or not due:
                continue
            began = time.monotonic()
            record.accounted = record.over
            self._retain_exports(record)
            if record.started is not None:
                found = account(Path(record.folder), now, record.settings.workers.max)
                record.ettr, record.ettr_losses = found.ettr, dict(found.losses)
            # A long job's files take longer to read, so they are read less often.
            self._account_due[job] = now + max(ACCOUNT_SECONDS, 50.0 * (time.monotonic() - began))
            self._store.put_job(job, record.to_store())


def _unheard(record: JobRecord) -> Iterable[Persisted]:
    """Checkpoints of a job that are published and that nobody told of: the agent died with its persister's words."""
    if record.over or not record.incarnation:
        return
    for step, path in published.published(checkpoint_folder(record.settings, Path(record.folder))):
        if step not in record.published:
            try:
                said = manifest.read_manifest(path)
            except PlanariaError:
                continue
            if said.job == record.id:
                yield Persisted(RankCheckpoint(what="published", step=step, path=str(path), time=said.created))


def _export_target(record: JobRecord, step: int) -> Path:
    """Beside the checkpoint; in the job's own folder where that is at a URL."""
    return checkpoint_folder(record.settings, Path(record.folder)) / step_dir_name(step, export=True)


def account(folder: Path, now: float, full_workers: int | None = None) -> ettr.Account:
    """The account of a job's time from the files of its folder."""
    events = [Event.from_json(line) for line in read_json_lines(folder / "events.jsonl")]
    return ettr.account(events, read_json_lines(folder / "metrics.jsonl"), now, full_workers)


def _order(position: str) -> tuple[int, int]:
    """Stream positions in order."""
    milliseconds, _, sequence = position.partition("-")
    return int(milliseconds), int(sequence or 0)
