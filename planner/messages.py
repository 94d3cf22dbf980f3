"""What passes between coordinator, agents, ranks and workers: closed sets of typed messages, JSON only.

Three channels:

* **commands** (coordinator → agent): sealed with the cluster secret (:mod:`planner.auth`), one Redis stream
  per node;
* **reports** (agent → coordinator): sealed, one Redis stream for the cluster;
* **rank channel** (rank ↔ its agent): JSON lines over a Unix socket in the agent's run directory; the first
  line of a rank is ``hello`` with the job's token. Rank messages travel on to the coordinator inside reports.

A message of an unknown kind or shape is refused, logged and kept aside; the receiver stays up.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from planner.pretrain_config import PretrainConfig

VERSION = 1


class Message(BaseModel):
    """Base of all messages; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: int = VERSION


# ---------------------------------------------------------------- what a rank is started with


class RankSpec(Message):
    """Everything one training process needs to know; a JSON file (mode 0600) for ``python -m pretrain.rank``."""

    job: str
    incarnation: int
    """Never reused within a job; grows with each start and each re-form."""
    rank: int
    """Rank in this incarnation, 0 to world_size - 1."""
    origin_rank: int
    """Rank at the job's start, which fault coordinates name; kept through re-forming and restarts."""
    world_size: int
    store_host: str
    """Host of the job's rendezvous store (a TCPStore that lives beside an agent, never in a rank)."""
    store_port: int
    bind_address: str = "127.0.0.1"
    """Address whose interface gloo or NCCL binds to, for nodes with several."""
    token: str
    """The job's token (:func:`planner.auth.job_token`)."""
    lease_token: int = 0
    """Fencing token of the lease under which this rank holds its slot; checked at publication."""
    agent_socket: str | None
    """Path of the agent's Unix socket; None in a bare run (tests), where messages go to standard output."""
    job_folder: str
    """The job's folder; checkpoints go to ``<job_folder>/checkpoints`` unless the config names another."""
    config: PretrainConfig
    resume: str | None = None
    """Published checkpoint to start from; None: from the seed."""
    exact_resume: bool = False
    """Start from ``resume`` itself although host memory may hold a newer snapshot (a roll-back)."""
    state_since: int = 0
    """State that is newer than ``resume`` and made by an earlier incarnation than this is void (a roll-back)."""
    skip_to: int = 0
    """State of an earlier incarnation than ``state_since`` leaves out the samples from its own position to this one."""
    known_step: int | None = None
    """Highest step that the supervisor has heard of: a snapshot of a later one, by a rank that went on after its agent
    had died, is not gone on from, since nobody knows what those steps were. None: nothing is left out."""
    joining: bool = False
    """Prepare, say phase ``ready`` and wait for the ``reform`` that takes it in; ``rank`` is a name until then."""
    fired_faults: list[int] = []
    """Indices into ``config.faults`` that fired in earlier incarnations."""
    threads: int = 1
    """Compute threads of this slot."""
    device: str = "cpu"
    """``cpu`` or ``cuda:N``."""
    memory_dir: str | None = None
    """Folder in host memory that the agent gives to snapshots; a persister beside it publishes those that are marked
    for it. None (a bare run): the rank publishes by itself."""
    peers: list[str] = []
    """``host:port`` of the other nodes' snapshot keepers."""


# ---------------------------------------------------------------- rank → agent → coordinator


class RankHello(Message):
    """First line of a rank: who it is. The agent drops a connection whose token is wrong."""

    kind: Literal["hello"] = "hello"
    token: str
    job: str
    incarnation: int
    rank: int
    pid: int
    heals: bool = False
    """Whether this rank can leave a broken collective and re-form in place."""


class RankPhase(Message):
    """The rank entered a phase: start, load, first_step, step, save, validate, export, reform, done."""

    kind: Literal["phase"] = "phase"
    phase: str
    step: int
    time: float
    micro_batch: int | None = None


class RankStep(Message):
    """A step completed on this rank. ``ids`` are the samples that *this rank* ran (empty where it read no data)."""

    kind: Literal["step"] = "step"
    step: int
    loss: float | None
    """Mean loss per token over the global batch, full precision; None on ranks that do not know it."""
    grad_norm: float | None
    tokens: int
    """Tokens of the global batch."""
    seconds: float
    lr: float
    workers: int
    """World size in this step."""
    ids: list[int]
    batch: list[int] = []
    """On rank 0: the samples of the whole global batch, each of which the step's agreement has counted once."""
    incarnation: int
    valid_loss: float | None = None
    time: float
    late: bool = False
    """Said by a rank that went on from a state, for one that may have ended unheard: news only where it is missing."""
    phases: dict[str, float] = {}
    """Seconds of this step by phase (data, forward_backward, reduce, optimizer, snapshot, other)."""


class LogVerdict(BaseModel):
    """What a rank's log (or the traceback it sent) says is the cause, by the rules of diagnosis."""

    model_config = ConfigDict(extra="ignore")
    root: str
    """A class of :data:`planner.severity.TABLE`."""
    confidence: float = Field(ge=0, le=1)
    evidence: str = ""
    """The line that shows it."""


class RankException(Message):
    """The rank is about to leave because of an exception; sent before the process is gone."""

    kind: Literal["exception"] = "exception"
    type: str
    message: str
    traceback: str
    collective: str | None = None
    """The collective the exception came out of (reduce, broadcast, pipeline, barrier …), if it was one."""
    step: int
    phase: str
    time: float
    verdict: LogVerdict | None = None
    """Filled in by the supervisor from the traceback."""


class RankFault(Message):
    """An injected fault fires now (sent before it acts, since it may take the process with it)."""

    kind: Literal["fault"] = "fault"
    index: int
    step: int
    phase: str
    micro_batch: int | None = None
    time: float


class RankCheckpoint(Message):
    """A checkpoint of the job changed its state; sent by the rank (or writer) that saw it."""

    kind: Literal["checkpoint"] = "checkpoint"
    what: Literal[
        "snapshot", "saved", "published", "failed", "refused", "loaded", "deleted", "export_published", "export_failed"
    ]
    step: int
    path: str | None = None
    seconds: float | None = None
    stall_seconds: float | None = None
    reason: str = ""
    time: float


class RankDone(Message):
    """The rank finished all steps (or published and leaves because it was told to)."""

    kind: Literal["done"] = "done"
    step: int
    why: Literal["completed", "preempted", "paused", "cancelled"]
    time: float


class RankNote(Message):
    """A transition for the event log that needs no answer (loss spike, skipped samples, straggler, re-form …)."""

    kind: Literal["note"] = "note"
    action: str
    """A value of :class:`planner.events.Action`."""
    reason: str = ""
    details: dict[str, Any] = {}
    time: float


class RankLeft(Message):
    """The rank is out of its collective, holds its state and waits for ``reform``."""

    kind: Literal["left"] = "left"
    incarnation: int
    """The incarnation that it left."""
    step: int
    """Steps completed by this rank."""
    phase: str
    own: bool
    """True where it left because of its own exception, not because a peer or the agent made it."""
    type: str
    message: str
    traceback: str = ""
    """Of its own exception."""
    collective: str | None = None
    time: float
    verdict: LogVerdict | None = None
    """Filled in by the supervisor."""


class RankLeaving(Message):
    """The rank was told to leave by SIGTERM; unless the job goes on without it in time, all publish and leave."""

    kind: Literal["leaving"] = "leaving"
    step: int
    time: float


class RankReformed(Message):
    """The rank is part of the new incarnation; the step in hand goes on."""

    kind: Literal["reformed"] = "reformed"
    incarnation: int
    step: int
    """Steps completed."""
    joined: bool
    """True for a rank that was started for this incarnation and received its state from a peer."""
    redone: list[int] = []
    """Micro-batches of the step in hand that this rank runs although another one had them."""
    seconds: float
    """From the order to the new groups, state included."""
    state_bytes: int = 0
    """Bytes of state that this rank received."""
    time: float


RankMessage = Annotated[
    RankHello
    | RankPhase
    | RankStep
    | RankException
    | RankFault
    | RankCheckpoint
    | RankDone
    | RankNote
    | RankLeft
    | RankLeaving
    | RankReformed,
    Field(discriminator="kind"),
]
RANK_MESSAGES: TypeAdapter[Any] = TypeAdapter(RankMessage)


# ---------------------------------------------------------------- agent → rank


class StopAtBoundary(Message):
    """Finish the step in hand, publish, say ``done`` with ``why`` and exit 4 (preempted) or 0."""

    kind: Literal["stop"] = "stop"
    why: Literal["preempted", "paused", "cancelled"]


class Reform(Message):
    """Leave the collective and build the next incarnation in place."""

    kind: Literal["reform"] = "reform"
    incarnation: int
    """The new incarnation."""
    ranks: dict[int, int]
    """Old rank → new rank of those that take part. A rank that is not named is not needed any more and exits 0; one
    that waits to join and is given a number from ``world_size`` on goes on waiting under that name."""
    world_size: int
    joining: list[int] = []
    """New ranks that hold no state yet: they receive it from a peer."""
    sources: dict[int, int] = {}
    """New rank without state → new rank that hands it over: the nearest peer with its coordinates, of equally near ones
    the one that serves fewest. Who is not named receives from the first replica that holds the state."""
    at_boundary: bool = False
    """True: nobody is broken, so finish the step in hand first (all ranks agree on the step); False: leave at once."""
    fired_faults: list[int] = []
    """Injected faults that have fired anywhere by now."""
    told_step: int = 0
    """Highest step that the supervisor has heard of; the ranks say again what came after it, since whoever was to say
    it may have been on a node whose agent was dead."""
    store_host: str
    store_port: int
    reason: str
    details: dict[str, Any] = {}


class LeaveCollective(Message):
    """Tear the process groups down at once: a peer is gone. Agreement comes afterwards, with ``reform``."""

    kind: Literal["leave"] = "leave"
    incarnation: int
    reason: str
    ranks: list[int] = []
    """The broken ranks, where known: replicas without one may first finish the micro-batches they have begun."""


class Acknowledged(Message):
    """The cluster has everything that this rank sent up to ``seq``; 0 is the answer to hello and asks for numbers.

    A rank that was asked puts ``seq`` (1, 2, 3 … over the life of the process) into each line and keeps what is not
    acknowledged, to send it again when its agent dies and comes back.
    """

    kind: Literal["ack"] = "ack"
    seq: int


class Persisted(Message):
    """What the node's persister made of a snapshot that was handed over to it."""

    kind: Literal["persisted"] = "persisted"
    step: int
    """0: the persister is ready, and that is all."""
    published: bool = False
    """False: given up after all tries that one snapshot gets."""
    reason: str = ""


AgentToRank = Annotated[
    StopAtBoundary | Reform | LeaveCollective | Persisted | Acknowledged, Field(discriminator="kind")
]
AGENT_TO_RANK: TypeAdapter[Any] = TypeAdapter(AgentToRank)


# ---------------------------------------------------------------- coordinator → agent


class StartStore(Message):
    """Start the rendezvous store of a job's incarnation on this node; answered by ``store_ready``."""

    kind: Literal["start_store"] = "start_store"
    job: str
    incarnation: int


class StopStore(Message):
    """End the rendezvous store of a job on this node: the job is over, or another node has its store now."""

    kind: Literal["stop_store"] = "stop_store"
    job: str


class StartRanks(Message):
    """Start one process per spec, each in its own session."""

    kind: Literal["start_ranks"] = "start_ranks"
    lease: str
    specs: list[RankSpec]
    slots: list[int]
    """Slot of each spec, same order."""


class StopRanks(Message):
    """End the ranks of an incarnation: SIGTERM and, after the grace, SIGKILL of every descendant."""

    kind: Literal["stop_ranks"] = "stop_ranks"
    job: str
    incarnation: int
    grace_seconds: float
    ranks: list[int] | None = None
    """Only these; None: all."""
    capture_stack: bool = False
    """They hang: write their stacks into their logs before they are killed, without grace."""


class TellRanks(Message):
    """Hand a message to all ranks of an incarnation on this node."""

    kind: Literal["tell_ranks"] = "tell_ranks"
    job: str
    incarnation: int
    message: AgentToRank


class StartWorker(Message):
    """Start a Celery worker on leased slots (``infer``) or plain CPU (``metric``)."""

    kind: Literal["start_worker"] = "start_worker"
    worker: str
    worker_kind: Literal["infer", "metric"]
    lease: str | None
    lease_token: int
    slots: list[int]


class StopWorker(Message):
    """Drain a worker: no new shard, hand back what is finished, release; SIGKILL after the grace."""

    kind: Literal["stop_worker"] = "stop_worker"
    worker: str
    grace_seconds: float


class Stage(Message):
    """Bring a model directory into this node's memory once, for all its workers."""

    kind: Literal["stage"] = "stage"
    path: str
    digest: str


class Unstage(Message):
    """Drop a staged model."""

    kind: Literal["unstage"] = "unstage"
    digest: str


class ProbeNode(Message):
    """One step of a node check (:mod:`planner.node_check`); answered by ``node_probed`` where it has an answer."""

    kind: Literal["probe_node"] = "probe_node"
    check: str
    """Id of the check."""
    op: Literal["start", "listen", "gather", "end"]
    """Start a probe and time a matrix product; listen for a group; all-gather with it; end the probe."""
    group: str = ""
    """Name of the group within the check."""
    rank: int = 0
    """This node's rank in the group; rank 0 has listened."""
    size: int = 0
    host: str = ""
    port: int = 0
    """Where rank 0 of the group listens."""
    seconds: float = 10.0
    """Longest wait for the answer."""


class Leave(Message):
    """End everything on this node and exit (``planaria down``)."""

    kind: Literal["leave"] = "leave"


Command = Annotated[
    StartStore
    | StopStore
    | StartRanks
    | StopRanks
    | TellRanks
    | StartWorker
    | StopWorker
    | Stage
    | Unstage
    | ProbeNode
    | Leave,
    Field(discriminator="kind"),
]
COMMANDS: TypeAdapter[Any] = TypeAdapter(Command)


# ---------------------------------------------------------------- agent → coordinator


class Report(Message):
    """Base of what an agent says. ``time`` is the agent's wall clock, seconds since the epoch."""

    time: float


class NodeReady(Report):
    """An agent came up (or came back). What it still runs, adopted from an earlier life, is named."""

    kind: Literal["node_ready"] = "node_ready"
    slots: int
    ranks: list[tuple[str, int, int]] = []
    """(job, incarnation, rank) of the ranks that survived the agent and were adopted."""
    workers: list[str] = []
    """Workers that were adopted."""


class LocalCheck(Message):
    """What one of the agent's own checks says (:class:`planner.local_checks.Check`)."""

    name: str
    state: str
    reason: str


class NodeChecked(Report):
    """The agent's checks of its own node said something else than before."""

    kind: Literal["node_checked"] = "node_checked"
    checks: list[LocalCheck]
    """All of them."""
    changed: list[str]
    """Names of those whose state changed."""
    broken: str = ""
    """Why the node must be isolated; empty: it need not."""


class NodeLeaving(Report):
    """The agent was told to leave: it ends all that it runs, ranks with SIGTERM and a few seconds of grace."""

    kind: Literal["node_leaving"] = "node_leaving"


class NodeLeft(Report):
    """The agent was told to leave and has ended everything it ran."""

    kind: Literal["node_left"] = "node_left"


class StoreReady(Report):
    """The rendezvous store that ``start_store`` asked for listens."""

    kind: Literal["store_ready"] = "store_ready"
    job: str
    incarnation: int
    host: str
    port: int


class CommandFailed(Report):
    """A genuine command could not be carried out."""

    kind: Literal["command_failed"] = "command_failed"
    command: str
    """The command's kind."""
    job: str | None = None
    incarnation: int | None = None
    worker: str | None = None
    reason: str


class NodeProbed(Report):
    """The answer to one ``probe_node``."""

    kind: Literal["node_probed"] = "node_probed"
    check: str
    op: Literal["start", "listen", "gather"]
    group: str = ""
    value: float | None
    """Seconds of the product or the all-gather, or the port; None where it failed."""
    error: str = ""


class MessageRefused(Report):
    """A command or a rank's message was forged, unknown or malformed; it was dropped."""

    kind: Literal["message_refused"] = "message_refused"
    source: str
    """Where it came from: ``commands`` or ``ranks``."""
    reason: str


class RankStarted(Report):
    """A rank's process exists."""

    kind: Literal["rank_started"] = "rank_started"
    job: str
    incarnation: int
    rank: int
    slot: int
    pid: int


class RankSaid(Report):
    """What a rank said on its channel, passed on. ``incarnation`` and ``rank`` are those of its last hello."""

    kind: Literal["rank_said"] = "rank_said"
    job: str
    incarnation: int
    rank: int
    pid: int = 0
    seq: int = 0
    """Number of the message within the process; what was heard before is ignored. 0: not numbered."""
    message: RankMessage


class CheckpointSaid(Report):
    """What the persister of a job on this node said; it outlives ranks and incarnations."""

    kind: Literal["checkpoint_said"] = "checkpoint_said"
    job: str
    message: RankCheckpoint


class RankExited(Report):
    """A rank's process is gone, and with it every descendant that could be ended."""

    kind: Literal["rank_exited"] = "rank_exited"
    job: str
    incarnation: int
    rank: int
    pid: int
    exit_code: int | None
    """Exit code; None after a signal, or where the agent was not its parent (it had adopted it)."""
    signal: int | None
    asked: bool
    """True where the agent ended it on a command or because its lease was lost."""
    tail: str
    """Last lines of its log."""
    verdict: LogVerdict | None = None
    """What its log says, where it ended by itself and the log says something."""
    leftovers: list[int] = []
    """Descendants that would not die (their slot stays blocked on this node)."""


class WorkerStarted(Report):
    """A Celery worker's process exists."""

    kind: Literal["worker_started"] = "worker_started"
    worker: str
    pid: int


class WorkerExited(Report):
    """A Celery worker's process is gone, with its descendants."""

    kind: Literal["worker_exited"] = "worker_exited"
    worker: str
    pid: int
    exit_code: int | None
    signal: int | None
    asked: bool
    tail: str


class LeaseLost(Report):
    """A lease of something that runs here could not be renewed (revoked for good, expired, fenced)."""

    kind: Literal["lease_lost"] = "lease_lost"
    lease: str
    reason: str


class Staged(Report):
    """A model directory lies in this node's memory, verified; ``path`` is where."""

    kind: Literal["staged"] = "staged"
    digest: str
    path: str
    bytes: int
    seconds: float


AgentReport = Annotated[
    NodeReady
    | NodeChecked
    | NodeLeaving
    | NodeLeft
    | StoreReady
    | CommandFailed
    | NodeProbed
    | MessageRefused
    | RankStarted
    | RankSaid
    | CheckpointSaid
    | RankExited
    | WorkerStarted
    | WorkerExited
    | LeaseLost
    | Staged,
    Field(discriminator="kind"),
]
REPORTS: TypeAdapter[Any] = TypeAdapter(AgentReport)
