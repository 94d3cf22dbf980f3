"""What can happen to a job and what can be done about it: closed sets, plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.detection import Finding
from planner.events import Event
from planner.leases import Lease
from planner.loss_watch import Spike
from planner.messages import LogVerdict

# ---------------------------------------------------------------- what happens


@dataclass(frozen=True)
class Holding:
    """The leases that the job holds now; ``reason`` is why it has no more, in the allocator's words."""

    leases: tuple[Lease, ...]
    reason: str = ""


@dataclass(frozen=True)
class StoreAt:
    """The rendezvous store listens."""

    incarnation: int
    node: str
    host: str
    port: int
    resume: str | None = None
    """Newest sound published checkpoint, looked up by the shell."""
    resume_step: int = 0
    """Its step; 0: the seed."""
    skip_to: int = 0
    """After a roll-back the sample position at the end of the bad stretch, as far as the shell can tell."""


@dataclass(frozen=True)
class Started:
    """A rank's process exists."""

    incarnation: int
    rank: int
    pid: int


@dataclass(frozen=True)
class Said:
    """A rank said something (:data:`planner.messages.RankMessage`)."""

    incarnation: int
    rank: int
    message: Any
    pid: int = 0
    seq: int = 0
    """Number of the message within the process ``pid``; 0: not numbered."""


@dataclass(frozen=True)
class Persisted:
    """A persister said what became of a checkpoint (:class:`planner.messages.RankCheckpoint`)."""

    message: Any


@dataclass(frozen=True)
class Exited:
    """A rank's process is gone with all its family."""

    incarnation: int
    rank: int
    exit_code: int | None
    signal: int | None
    asked: bool
    tail: str
    verdict: LogVerdict | None = None
    """What its log says."""

    @property
    def code(self) -> int | None:
        """As :mod:`subprocess` gives it: negative for a signal."""
        return -self.signal if self.signal is not None else self.exit_code


@dataclass(frozen=True)
class CommandRefused:
    """An agent could not do what it was told."""

    node: str
    command: str
    incarnation: int | None
    reason: str


@dataclass(frozen=True)
class NodeUp:
    """An agent came up; ``ranks`` are those of this job that it still runs: (incarnation, rank)."""

    node: str
    ranks: frozenset[tuple[int, int]]
    ready: bool = True
    """False: it has gone, after ending what it ran."""


@dataclass(frozen=True)
class NodeLeaving:
    """A node was told to leave: its ranks get SIGTERM, and a little later nothing runs there any more."""

    node: str


@dataclass(frozen=True)
class NodeBroken:
    """A node's own checks say that it must be isolated."""

    node: str
    reason: str


@dataclass(frozen=True)
class Asked:
    """A person asked for something: cancel, pause, resume."""

    what: str


@dataclass(frozen=True)
class Stuck:
    """Online statistics found something."""

    finding: Finding


@dataclass(frozen=True)
class Spiked:
    """The loss left its band and stays outside."""

    spike: Spike


@dataclass(frozen=True)
class ExportEnded:
    """A subprocess that exports a checkpoint ended."""

    step: int
    path: str | None
    """The export; None where it failed."""
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Tick:
    """Time went on."""


JobEvent = (
    Holding | StoreAt | Started | Said | Persisted | Exited | CommandRefused | NodeUp | NodeLeaving | NodeBroken
    | Asked | Stuck | Spiked | ExportEnded | Tick
)  # fmt: skip


# ---------------------------------------------------------------- what is done


@dataclass(frozen=True)
class Send:
    """Send a command (:data:`planner.messages.Command`) to a node's agent."""

    node: str
    command: Any


@dataclass(frozen=True)
class StartSpecs:
    """Start the ranks of the incarnation; the shell makes their specs."""

    host: str
    port: int
    resume: str | None


@dataclass(frozen=True)
class StartJoiners:
    """Start the ranks that are to join; the shell makes their specs."""

    names: tuple[int, ...]


@dataclass(frozen=True)
class Tell:
    """Write an event into the job's log and the cluster's stream."""

    event: Event


@dataclass(frozen=True)
class Write:
    """Append a line to one of the job's files: ``metrics.jsonl`` or ``samples.jsonl``."""

    file: str
    line: Mapping[str, Any]


@dataclass(frozen=True)
class Release:
    """Give leases back; nothing runs under them any more. None: all that the job holds."""

    leases: frozenset[str] | None = None


@dataclass(frozen=True)
class Cordon:
    """Keep new work away from a node."""

    node: str
    reason: str


JobAction = Send | StartSpecs | StartJoiners | Tell | Write | Release | Cordon


@dataclass
class Output:
    """Actions in the order in which they must happen."""

    actions: list[JobAction] = field(default_factory=list)
