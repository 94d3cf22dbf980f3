"""A worker: one Celery consumer with a resident engine on leased slots (``infer``), or one that scores (``metric``).

Three threads: Celery's own, one that runs the work, one that beats. The beat says each half second how the worker
stands and looks at its lease. A worker that must leave stops at the engine's next step, hands back what is finished,
gives the lease back and ends by ``os._exit``: Celery's own shutdown takes seconds for which training would wait.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from evalsched.messages import (
    METRIC_QUEUE,
    WORK,
    Answers,
    Ended,
    Left,
    Message,
    Metric,
    Outcome,
    RunShard,
    Warm,
    infer_queue,
)
from evalsched.types import Request, Response
from planner.errors import BadInputError, ExitCode, MissingServiceError, PlanariaError, one_line
from planner.events import Action
from planner.leases import RenewStatus
from planner.store import ClusterStore
from planner.worker_table import WorkerTable

if TYPE_CHECKING:
    from evalsched.peer_staging import PeerStaging

log = logging.getLogger("planaria.worker")

BEAT_SECONDS = 0.5
FLUSH_SECONDS = 0.5
FLUSH_RESPONSES = 500
LEAVE_SECONDS = 1.0
"""How long a leaving worker waits for the engine's step in hand, where no deadline says otherwise."""
MEMORY_GROWTH = 4 << 30
"""Bytes that the process may grow after its first shard before it is recycled between shards."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker stands: its lease and slots (none for a private or a metric worker)."""

    node: str
    lease: str | None = None
    token: int = 0
    slots: tuple[int, ...] = ()
    parent: int | None = None
    """Process that this worker must not outlive."""
    own_node: bool = False
    """It was started by hand and is a node of its own: it answers for its slots itself."""


class Worker:
    """What infer and metric workers share: the beat, answers, leaving."""

    kind = "metric"

    def __init__(
        self, store: ClusterStore, name: str, place: Place, *, leave: Callable[[int], None] = os._exit
    ) -> None:
        self.store = store
        self.name = name
        self.place = place
        self.table = WorkerTable(store.link.call)
        self.stopping = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._exit = leave
        self._leaving = threading.Lock()
        self._came_up = 0.0
        """Seconds from the process's start until it listened."""
        self._facts: dict[str, Any] = {"state": "starting", "progress": time.time()}

    # ------------------------------------------------------------------ life

    @property
    def queue(self) -> str:
        """The Celery queue that it consumes."""
        return METRIC_QUEUE

    def begin(self) -> None:
        """Start the beat; call once, before the consumer."""
        threading.Thread(target=self._beat_forever, name="beat", daemon=True).start()

    def ready(self) -> None:
        """The consumer listens."""
        self._came_up = _age()
        self._say(state="ready")
        self.store.tell(Action.WORKER_READY, worker=self.name, node=self.place.node, kind=self.kind)

    def _say(self, **facts: Any) -> None:
        self._facts = self._facts | facts
        self._beat()

    def _mark_progress(self) -> None:
        self._facts["progress"] = time.time()

    def _beat(self) -> None:
        own = {
            "kind": self.kind,
            "node": self.place.node,
            "lease": self.place.lease,
            "token": self.place.token,
            "slots": list(self.place.slots),
            "pid": os.getpid(),
            "memory": _memory(),
        }
        self.table.beat(self.name, own | self._facts)

    def _beat_forever(self) -> None:
        while True:
            try:
                if self.place.parent is not None and os.getppid() != self.place.parent:
                    self._exit(int(ExitCode.PREEMPTED))
                if not self.stopping.is_set():
                    self._beat()
                self._look_at_lease()
            except MissingServiceError as error:
                log.error("action=worker.lost_cluster reason=%s", error)
                self._exit(int(ExitCode.MISSING_SERVICE))
            time.sleep(BEAT_SECONDS)

    def _look_at_lease(self) -> None:
        if self.place.lease is None:
            return
        state = self.table.lease_state(self.place.lease, self.place.token)
        if state is RenewStatus.LOST and not self.stopping.is_set():
            log.error("action=worker.fenced lease=%s", self.place.lease)
            self._exit(int(ExitCode.PREEMPTED))
        elif state is RenewStatus.REVOKED:
            self.leave("its lease is revoked")

    def leave(self, reason: str, code: ExitCode = ExitCode.PREEMPTED) -> None:
        """Stop taking work, hand back what is finished, release, end. Returns at once; the process ends soon."""
        if not self._leaving.acquire(blocking=False):
            return
        self.stopping.set()
        threading.Thread(target=self._leave, args=(reason, code), name="leave", daemon=True).start()

    def _leave(self, reason: str, code: ExitCode) -> None:
        threading.Timer(10.0, self._exit, args=(int(code),)).start()  # whatever Redis does, the slot is given back
        try:
            if self._facts.get("state") == "busy":
                self._idle.wait(LEAVE_SECONDS)
            self._answer(Left(worker=self.name, lease_token=self.place.token, reason=reason))
            self._withdraw()
            self.table.forget(self.name)
            self._give_back()
        except PlanariaError as error:
            log.error("action=worker.leave reason=%s", error)
        finally:
            self._exit(int(code))

    def _withdraw(self) -> None:
        """Take back what others may have been told of this process."""

    def _give_back(self) -> None:
        """An agent sees this process end a moment later and confirms its slots; a node of its own leaves with it."""
        if self.place.lease is not None:
            self.store.table.release(self.place.lease, self.place.token, confirmed=self.place.own_node)
        if self.place.own_node:
            self.store.remove_node(self.place.node)
            self.store.tell(Action.NODE_LEFT, node=self.place.node, reason="its worker left")

    # ------------------------------------------------------------------ work

    def _answer(self, message: Message) -> None:
        self.store.send_response(message.wire())

    def _parse(self, raw: Any, wanted: type[Message]) -> Any:
        """The message, or None for one that was refused and kept aside."""
        try:
            message = WORK.validate_python(raw)
            if not isinstance(message, wanted):
                raise ValueError(f"a message of kind {type(message).__name__} came as {wanted.__name__}")
        except (ValidationError, ValueError) as error:
            self.store.refuse(self.queue, str(raw), one_line(error)[:300])
            return None
        return message

    def metric(self, raw: Any, delivery: str) -> None:
        """Record or score; the answer says how it went."""
        message = self._parse(raw, Metric)
        if message is None or self.table.claim(message.dispatch, self.name, delivery) is None:
            return
        started = time.monotonic()
        self._say(state="busy", dispatch=message.dispatch)
        result: dict[str, Any] | None = None
        outcome: Outcome = "failed"
        reason, bad_input = "", False
        try:
            from evalsched.metric_work import do

            result, outcome = do(message.what, message.job), "done"
        except PlanariaError as error:
            reason, bad_input = one_line(error), isinstance(error, BadInputError)
        except Exception as error:  # whatever a task's own code raises
            log.exception("action=metric what=%s run=%s", message.what, message.run)
            reason = f"{type(error).__name__}: {one_line(error)}"
        seconds = time.monotonic() - started
        self._end(message, outcome, reason, seconds=seconds, result=result, bad_input=bad_input)
        self._say(state="ready", dispatch=None)

    def run_shard(self, raw: Any, delivery: str) -> None:
        """Refuse a shard: this worker scores."""
        self.store.refuse(self.queue, str(raw)[:2000], f"a {self.kind} worker runs no shards")

    def warm(self, raw: Any) -> None:
        """Refuse a model: this worker scores."""
        self.store.refuse(self.queue, str(raw)[:2000], f"a {self.kind} worker loads no model")

    def _end(self, message: Any, outcome: Outcome, reason: str = "", **more: Any) -> None:
        self._answer(
            Ended(
                worker=self.name,
                lease_token=self.place.token,
                dispatch=message.dispatch,
                run=message.run,
                outcome=outcome,
                reason=reason,
                **more,
            )
        )


class InferWorker(Worker):
    """A worker with a resident engine."""

    kind = "infer"

    def __init__(self, store: ClusterStore, name: str, place: Place, **more: Any) -> None:
        super().__init__(store, name, place, **more)
        from evalsched.residency import Resident

        self.resident = Resident(threads=int(os.environ.get("OMP_NUM_THREADS", "1") or 1))
        self.peers: PeerStaging | None = None
        if place.lease is not None and store.secret is not None:
            from evalsched.peer_staging import PeerStaging, address_towards

            self.peers = self.resident.peers = PeerStaging(store, place.node, address_towards(store.url))
        self._first_memory: int | None = None
        self._loaded_memory = 0

    def _withdraw(self) -> None:
        if self.peers is not None:
            self.peers.withdraw()

    @property
    def queue(self) -> str:
        """The Celery queue that it alone consumes."""
        return infer_queue(self.name)

    def warm(self, raw: Any) -> None:
        """Load a model, so that the first shard finds it."""
        from evalsched.engine import EngineError

        message = self._parse(raw, Warm)
        if message is None or self.stopping.is_set():
            return
        try:
            self._load(message)
        except EngineError as error:  # the next worker is asked with a shard, and its failure is counted
            self.leave(f"its engine failed: {one_line(error)}", ExitCode.FAILED)
        except PlanariaError as error:  # the shard that comes next says what is wrong, and is counted
            log.warning("action=warm reason=%s", one_line(error))

    def _load(self, message: RunShard | Warm) -> float:
        started = time.monotonic()
        self._say(state="loading", model=message.model.digest)
        swapped = self.resident.hold(message.model, message.engine)
        seconds = time.monotonic() - started
        if swapped:
            self.store.tell(
                Action.WORKER_SWAPPED, worker=self.name, model=message.model.digest, how=swapped, seconds=seconds
            )
            self._loaded_memory = _memory()
        if swapped == "start":
            self._facts["start_seconds"] = self._came_up + seconds
        self._say(state="ready", model=message.model.digest, starts=self.resident.starts, swaps=self.resident.swaps)
        return seconds

    def run_shard(self, raw: Any, delivery: str) -> None:
        """Run a shard and answer as its responses are finished."""
        message = self._parse(raw, RunShard)
        if message is None:
            return
        if self.stopping.is_set():
            return
        record = self.table.claim(message.dispatch, self.name, delivery)
        if record is None:
            self.store.tell(
                Action.MESSAGE_REFUSED, source=self.queue, reason=f"dispatch {message.dispatch} was begun before"
            )
            return
        self._idle.clear()
        try:
            self._run(message, record.get("shard"))
        finally:
            self._idle.set()

    def _run(self, message: RunShard, described: Any) -> None:
        from evalsched.engine import EngineError
        from evalsched.residency import NewProcessNeededError
        from evalsched.types import Shard

        load_seconds = 0.0
        try:
            shard = Shard.from_json(described)
            load_seconds = self._load(message)
            started = time.monotonic()
            self._say(state="busy", dispatch=message.dispatch, shard=shard.id, done=0, total=len(shard.requests))
            complete = self._answer_all(message, shard)
            outcome: Outcome = "done" if complete else "handed_back"
            reason = "" if complete else "the worker leaves"
            seconds, grown = time.monotonic() - started, max(0, _memory("VmHWM") - self._loaded_memory)
            self._end(message, outcome, reason, seconds=seconds, load_seconds=load_seconds, memory=grown)
        except NewProcessNeededError as error:
            self._end(message, "handed_back", one_line(error))
            self._idle.set()
            self.leave(one_line(error))
            self.stopping.wait()
        except EngineError as error:
            self._end(message, "failed", one_line(error), load_seconds=load_seconds)
            self._idle.set()
            self.leave(f"its engine failed: {one_line(error)}", ExitCode.FAILED)
            self.stopping.wait()
        except (PlanariaError, ValueError, KeyError, TypeError) as error:
            self._end(message, "failed", one_line(error), load_seconds=load_seconds)
        except Exception as error:  # unforeseen: the shard is counted as failed, the log has the traceback
            log.error("action=shard.failed %s", traceback.format_exc())
            self._end(message, "failed", f"{type(error).__name__}: {one_line(error)}", load_seconds=load_seconds)
        finally:
            if not self.stopping.is_set():
                self._say(state="ready", dispatch=None, shard=None)
                self._recycle_if_grown()

    def _answer_all(self, message: RunShard, shard: Any) -> bool:
        """Whether every request was answered; answers are flushed as they come."""
        waiting: list[dict[str, Any]] = []
        done, flushed = 0, time.monotonic()
        for response in self._answers(shard.requests, singly=message.singly):
            waiting.append(response.to_json())
            done += 1
            if len(waiting) >= FLUSH_RESPONSES or time.monotonic() - flushed > FLUSH_SECONDS:
                self._flush(message, waiting)
                self._facts["done"] = done
                flushed = time.monotonic()
        self._flush(message, waiting)
        return done == len(shard.requests)

    def _answers(self, requests: Sequence[Request], *, singly: bool) -> Iterator[Response]:
        """Together, or each alone with nothing kept of those before."""
        engine = self.resident.engine
        if not singly:
            yield from engine.run(requests, self._stop)
            return
        for request in requests:
            engine.forget()
            yield from engine.run([request], self._stop)

    def _stop(self) -> bool:
        """Asked by the engine before each step."""
        self._mark_progress()
        return self.stopping.is_set()

    def _flush(self, message: RunShard, waiting: list[dict[str, Any]]) -> None:
        if waiting:
            answers = Answers(
                worker=self.name,
                lease_token=self.place.token,
                dispatch=message.dispatch,
                run=message.run,
                responses=list(waiting),
            )
            self._answer(answers)
            waiting.clear()

    def _recycle_if_grown(self) -> None:
        memory = _memory("RssAnon")  # files that a checkpoint's load has mapped are no growth
        if self._first_memory is None:
            self._first_memory = memory
        elif memory > self._first_memory + MEMORY_GROWTH:
            self.leave(f"recycled: its memory grew from {self._first_memory >> 20} to {memory >> 20} MiB")


def _memory(field: str = "VmRSS") -> int:
    """Resident bytes of this process: a field of ``/proc/self/status`` (``VmHWM``: the most so far)."""
    with open("/proc/self/status") as stream:
        text = stream.read()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


def _age() -> float:
    """Seconds since this process was started."""
    with open("/proc/self/stat") as stream:
        ticks = int(stream.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as stream:
        return max(0.0, float(stream.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))


# ---------------------------------------------------------------------- starting


def worker_command(
    kind: str,
    name: str | None,
    slots: str | None,
    state_dir: Path | None,
    url: str | None,
    secret_file: Path | None,
) -> int:
    """``planaria worker``: started by an agent (its lease in the environment), privately, or by hand.

    Environment: ``PLANARIA_LEASE`` and ``PLANARIA_LEASE_TOKEN`` (an agent's), ``PLANARIA_NODE``,
    ``PLANARIA_PRIVATE_PARENT`` (process id: no lease is needed, and the worker ends with it), ``PLANARIA_URL``,
    ``PLANARIA_SECRET_FILE``, ``PLANARIA_STATE_DIR``.

    Raises:
        BadInputError: an unknown kind, misshapen slots.
        MissingServiceError: no cluster, no secret.
    """
    if kind not in ("infer", "metric"):
        raise BadInputError(f"--kind {kind}: it is infer or metric")
    numbers = _slot_numbers(slots)
    _log_to_stderr()
    lease, parent = os.environ.get("PLANARIA_LEASE"), os.environ.get("PLANARIA_PRIVATE_PARENT")
    by_hand = kind == "infer" and lease is None and parent is None
    _preload(kind, wait=by_hand)  # by hand it beats for its own node, which importing would delay
    store = _connect(url, state_dir, secret_file)
    identity = name or f"{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
    from evalsched.app import make_app

    app = make_app(store.url)
    if by_hand:
        from evalsched.own_node import lease_by_hand

        granted = lease_by_hand(store, identity, numbers or (0,))
        worker = _make(store, kind, granted.worker, granted.place)
    else:
        place = Place(
            node=os.environ.get("PLANARIA_NODE", socket.gethostname()),
            lease=lease or None,
            token=int(os.environ.get("PLANARIA_LEASE_TOKEN", "0") or 0),
            slots=numbers,
            parent=int(parent) if parent else None,
        )
        worker = _make(store, kind, identity, place)
    return _consume(app, worker)


def _make(store: ClusterStore, kind: str, name: str, place: Place) -> Worker:
    return (InferWorker if kind == "infer" else Worker)(store, name, place)


def _consume(app: Any, worker: Worker) -> int:
    """Run the Celery consumer until the worker leaves."""
    _attach(app, worker)
    consumer = app.Worker(
        hostname=f"{worker.name}@{worker.place.node}",
        queues=[worker.queue],
        loglevel="WARNING",
        without_gossip=True,
        without_mingle=True,
        task_events=True,
        quiet=True,
    )
    consumer.start()
    return int(consumer.exitcode or 0)


def _attach(app: Any, worker: Worker) -> None:
    """Let the application's tasks reach the worker, and start its beat."""
    from celery import signals

    app.planaria_worker = worker

    def on_ready(**_: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # after Celery, which installs its own
            signal.signal(number, lambda *_: worker.leave("it was told to end"))
        worker.ready()

    signals.worker_ready.connect(on_ready, weak=False)
    worker.begin()


def join_by_hand(app: Any, hostname: str) -> None:
    """Make the process of ``celery -A evalsched.app worker`` an infer worker that brings one slot."""
    _preload("infer", wait=True)
    store = _connect(None, None, None)
    from evalsched.own_node import lease_by_hand

    identity = hostname.partition("@")[0] + "-" + uuid.uuid4().hex[:6]
    granted = lease_by_hand(store, identity, (0,))
    worker = InferWorker(store, granted.worker, granted.place)
    app.conf.task_default_queue = worker.queue
    _attach(app, worker)


def _slot_numbers(slots: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part.rpartition("/")[2]) for part in (slots or "").split(",") if part.strip())
    except ValueError:
        raise BadInputError(f"--slots {slots}: write slot numbers, comma-separated, for example 0,1") from None


def _connect(url: str | None, state_dir: Path | None, secret_file: Path | None) -> ClusterStore:
    from planner.cluster import connect

    store, _ = connect(url, state_dir, secret_file=secret_file, daemon=True)
    if store.secret is None:
        raise MissingServiceError("a worker needs the cluster secret: give --secret-file or --state-dir")
    return store


def _log_to_stderr() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s"
    )


def _preload(kind: str, *, wait: bool) -> None:
    """Import what the work needs: at once, or while the consumer comes up."""
    # What Celery imports lazily goes first, so that two threads do not import the same packages at once.
    for name in ("celery.concurrency.thread", "celery.worker.consumer", "kombu.transport.redis"):
        import_module(name)
    if kind == "infer":
        from evalsched.residency import preload
    else:
        from evalsched.metric_work import preload
    if wait:
        preload()
    else:
        threading.Thread(target=preload, name="preload", daemon=True).start()
