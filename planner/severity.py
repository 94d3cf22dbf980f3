"""What a failure is worth: one row per class of error, and the pure function that picks the row.

Rows named ``unicron`` are the table of arXiv 2401.00134; rows named ``acme`` are the classes of arXiv 2403.07648,
whose severity the paper leaves open and is decided here; rows named ``planaria`` are what operators meet besides.
The ``method`` of a row is how such a failure is seen first (for Unicron's rows: unverified, from memory).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Severity(StrEnum):
    """How much has to be given up to cure a failure; grows from SEV3 to STOP."""

    SEV3 = "SEV3"  #: retry in place
    SEV2 = "SEV2"  #: restart the process
    SEV1 = "SEV1"  #: isolate the node and re-plan
    STOP = "STOP"  #: restarting cannot help: a person must act

    @property
    def rank(self) -> int:
        """0 for SEV3 to 3 for STOP, for comparisons."""
        return (Severity.SEV3, Severity.SEV2, Severity.SEV1, Severity.STOP).index(self)


class Method(StrEnum):
    """The four ways in which failures are seen, in band (Unicron, section on error detection)."""

    NODE_HEALTH = "node_health"  #: heartbeat lost, failed local check
    PROCESS_SUPERVISION = "process_supervision"  #: exit code or signal of a process
    EXCEPTION_PROPAGATION = "exception_propagation"  #: the exception that reached the agent before the process went
    ONLINE_STATISTICS = "online_statistics"  #: a phase that takes longer than it has learned


class Category(StrEnum):
    """Whose fault it is (Acme)."""

    INFRASTRUCTURE = "infrastructure"
    FRAMEWORK = "framework"
    SCRIPT = "script"
    NONE = "none"


@dataclass(frozen=True)
class Row:
    """One class of error."""

    name: str
    severity: Severity
    method: Method
    category: Category
    paper: str
    """``unicron``, ``acme`` or ``planaria``."""
    why: str = ""
    """Why this severity, where no paper gives it."""


def _rows(paper: str, method: Method, category: Category, *rows: tuple[str, Severity, str]) -> list[Row]:
    return [Row(name, severity, method, category, paper, why) for name, severity, why in rows]


_S1, _S2, _S3, _STOP = Severity.SEV1, Severity.SEV2, Severity.SEV3, Severity.STOP
_HEALTH, _PROCESS = Method.NODE_HEALTH, Method.PROCESS_SUPERVISION
_EXCEPTION, _STATISTICS = Method.EXCEPTION_PROPAGATION, Method.ONLINE_STATISTICS
_INFRA, _FRAME, _SCRIPT, _NONE = Category.INFRASTRUCTURE, Category.FRAMEWORK, Category.SCRIPT, Category.NONE
_BUG = "the same code and data fail again in the same place"

_UNICRON = [
    *_rows("unicron", _HEALTH, _INFRA, ("lost_connection", _S1, "")),
    *_rows("unicron", _PROCESS, _NONE, ("exited_abnormally", _S2, "")),
    *_rows(
        "unicron",
        _EXCEPTION,
        _INFRA,
        ("connection_error", _S3, ""),
        ("illegal_memory_access", _S2, ""),
        ("ecc_error", _S1, ""),
        ("invalid_dma_mapping", _S1, ""),
        ("cuda_error", _S2, ""),
        ("nvlink_error", _S1, ""),
        ("gpu_driver_error", _S1, ""),
        ("network_error", _S3, ""),
    ),
    *_rows("unicron", _EXCEPTION, _FRAME, ("other_software_error", _S2, "")),
    *_rows(
        "unicron", _STATISTICS, _INFRA, ("nccl_timeout", _S3, ""), ("link_flapping", _S3, ""), ("task_hang", _S2, "")
    ),
]
_ACME = [
    *_rows("acme", _HEALTH, _INFRA, ("node_failure", _S1, "the node is gone")),
    *_rows(
        "acme",
        _EXCEPTION,
        _INFRA,
        ("storage_error", _S3, "storage hiccups pass; a failed retry escalates"),
        ("nccl_remote_error", _S3, "a peer is gone; its own row decides about the peer"),
    ),
    *_rows("acme", _PROCESS, _FRAME, ("dataloader_killed", _S2, "the loader comes back with its process")),
    *_rows(
        "acme",
        _EXCEPTION,
        _FRAME,
        ("attribute_error", _STOP, _BUG),
        ("out_of_memory", _S2, "a new process has unfragmented memory; without progress the job is given up"),
        ("runtime_error", _S2, "too wide a class to give up on at first sight"),
        ("assertion_error", _S2, "sanity checks of libraries also fail on passing trouble"),
        ("value_error", _STOP, _BUG),
        ("zero_division", _STOP, _BUG),
        ("model_loading_error", _STOP, "the files to load do not change by themselves"),
        ("dataset_loading_error", _STOP, "the files to load do not change by themselves"),
    ),
    *_rows(
        "acme",
        _EXCEPTION,
        _SCRIPT,
        ("file_not_found", _STOP, "somebody must put the file there"),
        ("os_error", _S2, "the system's answer may differ next time"),
        ("type_error", _STOP, _BUG),
        ("name_error", _STOP, _BUG),
        ("permission_error", _STOP, "somebody must grant the right"),
        ("import_error", _STOP, "somebody must install it"),
        ("key_error", _STOP, _BUG),
        ("syntax_error", _STOP, _BUG),
        ("argument_error", _STOP, _BUG),
        ("called_process_error", _STOP, _BUG),
        ("index_error", _STOP, _BUG),
    ),
]
_PLANARIA = [
    *_rows("planaria", _HEALTH, _INFRA, ("gpu_lost", _S1, "the device fell off its bus")),
    *_rows("planaria", _HEALTH, _INFRA, ("preempted", _S1, "the slot is taken away: plan without it")),
    *_rows("planaria", _PROCESS, _INFRA, ("host_out_of_memory", _S2, "the kernel ended the process, not the node")),
    *_rows(
        "planaria",
        _STATISTICS,
        _FRAME,
        ("loss_spike", _S2, "roll back to an earlier healthy checkpoint and skip the data that follows (Acme)"),
        ("nan_loss", _S2, "the config says: retry the step, skip the batch or roll back"),
    ),
    *_rows("planaria", _EXCEPTION, _FRAME, ("checkpoint_corrupt", _S2, "start from the next older state")),
    *_rows(
        "planaria",
        _EXCEPTION,
        _SCRIPT,
        ("disk_full", _STOP, "somebody must make room"),
        ("address_in_use", _S3, "try again with a new port"),
    ),
    *_rows("planaria", _PROCESS, _NONE, ("unknown", _S2, "restart; escalation ends it if that does not help")),
]

TABLE: Mapping[str, Row] = MappingProxyType({row.name: row for row in [*_UNICRON, *_ACME, *_PLANARIA]})
"""Every class of error by name."""


@dataclass(frozen=True, kw_only=True)
class Detection:
    """What was seen of one rank (or node), before anybody read a log."""

    method: Method
    rank: int | None = None
    node: str | None = None
    time: float = 0.0
    """When it was seen, seconds since the epoch."""
    exit_code: int | None = None
    """As :mod:`subprocess` gives it: negative for a signal."""
    exception_type: str | None = None
    message: str = ""
    collective: str | None = None
    """The collective an exception came out of, or that a rank waits in."""


@dataclass(frozen=True)
class Classification:
    """The row that applies and why."""

    name: str
    severity: Severity
    method: Method
    reason: str
    cascade: bool = False
    """True where this is only the echo of a failure on another rank."""


TRUSTED = 0.7
"""Confidence from which a verdict on a log decides about severity; below it the verdict only informs."""
ECHOES = frozenset({"connection_error", "nccl_timeout", "nccl_remote_error", "task_hang", "unknown", "none"})
"""Roots of a single rank's log that say no more than that a peer is gone: what was detected decides."""

_MESSAGES: tuple[tuple[str, str], ...] = (
    ("ecc_error", r"\bECC\b|uncorrectable memory error|\bXid\b.*\b(48|63|64|94|95)\b"),
    ("nvlink_error", r"\bNVLink\b|\bXid\b.*\b74\b"),
    ("gpu_lost", r"fallen off the bus|\bGPU is lost\b|\bXid\b.*\b79\b"),
    ("invalid_dma_mapping", r"invalid DMA mapping"),
    ("gpu_driver_error", r"driver (shutting down|error|version is insufficient)|\bXid\b.*\b(61|62)\b"),
    ("illegal_memory_access", r"illegal memory access"),
    ("out_of_memory", r"CUDA out of memory|HIP out of memory|OutOfMemoryError"),
    ("nccl_timeout", r"(NCCL|collective|Watchdog caught).*(timeout|timed out)|Timed out waiting .*ms for (recv|send)"),
    ("nccl_remote_error", r"ncclRemoteError|remote process exited"),
    ("link_flapping", r"link (flap|flapping|went down|is down)"),
    ("address_in_use", r"address already in use|EADDRINUSE"),
    ("disk_full", r"No space left on device|Disk quota exceeded"),
    (
        "connection_error",
        r"connection (refused|reset|closed|aborted)|broken pipe|gloo.*pair\.cc|Read error|Socket closed"
        r"|socket is not connected",
    ),
    ("network_error", r"network (is unreachable|error)|no route to host|NCCL.*(socket|net|IB)\b|host is down"),
    ("cuda_error", r"\bCUDA error|cudaError|CUBLAS_STATUS|cuDNN error"),
    ("dataloader_killed", r"DataLoader worker .* (killed|exited unexpectedly)"),
    ("checkpoint_corrupt", r"checkpoint .*(corrupt|hash|digest|truncated)"),
    ("storage_error", r"stale file handle|Input/output error|transport endpoint is not connected"),
)
_PATTERNS = tuple((name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _MESSAGES)
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "AttributeError": "attribute_error",
        "OutOfMemoryError": "out_of_memory",
        "MemoryError": "host_out_of_memory",
        "RuntimeError": "runtime_error",
        "AssertionError": "assertion_error",
        "ValueError": "value_error",
        "ZeroDivisionError": "zero_division",
        "FileNotFoundError": "file_not_found",
        "OSError": "os_error",
        "TypeError": "type_error",
        "NameError": "name_error",
        "UnboundLocalError": "name_error",
        "PermissionError": "permission_error",
        "ImportError": "import_error",
        "ModuleNotFoundError": "import_error",
        "KeyError": "key_error",
        "SyntaxError": "syntax_error",
        "IndentationError": "syntax_error",
        "ArgumentError": "argument_error",
        "CalledProcessError": "called_process_error",
        "IndexError": "index_error",
        "ConnectionError": "connection_error",
        "ConnectionRefusedError": "connection_error",
        "ConnectionResetError": "connection_error",
        "BrokenPipeError": "connection_error",
        "DistNetworkError": "network_error",
        "DistBackendError": "nccl_remote_error",
        "CheckpointException": "checkpoint_corrupt",
    }
)


def name_exception(type_name: str, message: str) -> str:
    """The class of an exception by its own words: message patterns first, then its type.

    A type nobody has heard of is ``other_software_error`` (Unicron's row for the rest).
    """
    for name, pattern in _PATTERNS:
        if pattern.search(message):
            return name
    return _TYPES.get(type_name.rpartition(".")[2], "other_software_error")


def classify(detection: Detection, diagnosis: str | None = None) -> Classification:
    """The row for a detection.

    ``diagnosis`` is the class that the log's diagnosis names; it wins over what the detection alone suggests,
    unless it says ``none``, ``unknown`` or something that is no row. Exceptions that came out of a collective
    because a peer left are marked as cascades.
    """
    if diagnosis is not None and diagnosis in TABLE and diagnosis not in ("unknown", "none"):
        return _as(diagnosis, detection, f"diagnosis: {diagnosis}")
    if detection.method == Method.NODE_HEALTH:
        name = name_exception("", detection.message) if detection.message else "lost_connection"
        name = "lost_connection" if name == "other_software_error" else name
        return _as(name, detection, detection.message or "no heartbeat until the lease expired")
    if detection.exception_type is not None:
        name = name_exception(detection.exception_type, detection.message)
        cascade = detection.collective is not None and name in ("connection_error", "nccl_timeout", "nccl_remote_error")
        where = f" in {detection.collective}" if detection.collective else ""
        return _as(name, detection, f"{detection.exception_type}{where}: {detection.message}"[:300], cascade)
    if detection.method == Method.ONLINE_STATISTICS:
        name = "nccl_timeout" if detection.collective else "task_hang"
        return _as(name, detection, detection.message or "no progress within its limit")
    return _as("exited_abnormally", detection, _exit_words(detection.exit_code))


def _as(name: str, detection: Detection, reason: str, cascade: bool = False) -> Classification:
    return Classification(name, TABLE[name].severity, detection.method, reason, cascade)


def _exit_words(code: int | None) -> str:
    if code is None:
        return "exited, code unknown"
    return f"ended by signal {-code}" if code < 0 else f"exited with code {code}"


def root_cause(found: Iterable[tuple[Detection, Classification]]) -> tuple[Detection, Classification]:
    """Of all that was seen for one fault, the cause: never a cascade if there is anything else, then the most
    severe, then the first seen.

    Raises:
        ValueError: nothing was seen.
    """
    pairs = list(found)
    if not pairs:
        raise ValueError("a root cause needs at least one detection")
    return min(pairs, key=lambda pair: (pair[1].cascade, -pair[1].severity.rank, pair[0].time))
