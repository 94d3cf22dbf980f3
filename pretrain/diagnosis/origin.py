"""Where and when a line was written: rank, node and time, from the prefixes that launchers, loggers and kernels use."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

_RANK = (
    re.compile(r"\[rank\s?(\d+)\]", re.I),
    re.compile(r"\[Rank (\d+)\]"),
    re.compile(r"^\s{0,3}(\d{1,5}): (?=\S)"),  # srun --label
    re.compile(r"\b(?:[Rr]ank|RANK)[ :=#]+(\d+)\b"),
    re.compile(r"\bglobal[_ ]rank[ :=]+(\d+)\b", re.I),
)
_HOST = r"(?P<host>[A-Za-z][A-Za-z0-9-]*\d[A-Za-z0-9.-]*|[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)+(?:\.[A-Za-z0-9.-]+)?)"
_NODE = (
    re.compile(r"^\w{3}\s+\d+ \d\d:\d\d:\d\d " + _HOST + r" \S*(?:kernel|systemd|slurmd|kubelet|containerd|nv\S*)\b"),
    re.compile(r"^\d{4}-\d\d-\d\d[T ]\S+ " + _HOST + r" (?:kernel|systemd)"),
    re.compile(r"^\[\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}\] " + _HOST + r" (?:kernel|NVRM|mlx|pcieport|AMD-Vi|DMAR)"),
    re.compile(r"(?:Node failure on|NODE FAILURE on|node_fail(?:ure)? on|nodes? lost:?|Lost node) " + _HOST, re.I),
    re.compile(
        r"\b[Nn]ode " + _HOST + r" (?:status is now|is not ready|has become|is unreachable|not responding|is down|went)"
    ),
    re.compile(r"\bNodes? " + _HOST + r" (?:\([^)]*\) )?(?:not responding|is down|requested|unexpectedly)"),
    re.compile(
        r"\b(?:node|contact with) (?P<host>[A-Za-z][A-Za-z0-9.-]*\d[A-Za-z0-9.-]*) (?:\([^)]*\) )?"
        r"(?:is down|requested|lost)"
    ),
    re.compile(r"\bnode/" + _HOST),
    re.compile(r"\bnode[=:] ?['\"]?" + _HOST),
    re.compile(r"[Rr]emote daemon: \S+ on node " + _HOST),
    re.compile(r"^(?:srun: error|slurmstepd: error): " + _HOST + r"\b: "),
    re.compile(r"^\[(?:gpumon |dmesg |kern(?:el)? |agent |node )?" + _HOST + r"\]"),
    re.compile(r"^(?:\s*\d+: )?" + _HOST + r":(?:\d+:\d+| \[rank\d+\])"),
    re.compile(r"^(?:\s*\d+: )?" + _HOST + r": "),
    re.compile(r"^#+ *(?:dmesg|kernel|journal)\S* (?:of|on|from)? ?" + _HOST, re.I),
    re.compile(
        r"^(?:-+|=+) *(?:dmesg|kernel\S*|journalctl|syslog)\b.*?\b(?:of|on|from|:|@)? ?" + _HOST + r" *(?:-+|=+)?$",
        re.I,
    ),
    re.compile(r"\bhost(?:name)?[=:] ?['\"]?" + _HOST, re.I),
    re.compile(r"\b(?:IP|ip|address)[=:] ?(?P<host>\d{1,3}(?:\.\d{1,3}){3})\b"),
    re.compile(r"\bhost +: " + _HOST),
)
_NOT_HOSTS = re.compile(
    r"^(?:rank\d*|default\d*|cuda\d*|gpu\d+|mlx\d.*|ib\d+|eth\d+|python\d.*|step\d*|node\d*_rank|epoch\d*|worker\d*|slurmstepd.*|srun.*|torch.*)$",
    re.I,
)
_DEVICE_NAME = re.compile(r"gpu\d+$")
"""A device in most lines, a host where only a host can stand."""
_SECTION = re.compile(
    r"(?:dmesg|kernel (?:log|messages|ring)|journalctl)[^A-Za-z0-9]*(?:-T|-k|--\S+|\s)*.*?(?:on|of|from|host"
    r"|node|:|@)?\s*" + _HOST,
    re.I,
)
_TIMES = (
    (re.compile(r"(\d{4})-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?"), "iso"),
    (re.compile(r"\[?[IWEF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?"), "glog"),
    (re.compile(r"\[\w{3} (\w{3}) +(\d+) (\d\d):(\d\d):(\d\d) (\d{4})\]"), "dmesg"),
    (re.compile(r"^(?:\[\S+\] )?(\w{3}) +(\d+) (\d\d):(\d\d):(\d\d) "), "syslog"),
)
_MONTHS = {name: index for index, name in enumerate(
    ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], start=1)}  # fmt: skip
_SHORT_GLOG = re.compile(r"\[[IWEF](\d)(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d+))?")


def find_rank(text: str) -> int | None:
    """The global rank that a line names as its writer, or None."""
    for pattern in _RANK:
        if match := pattern.search(text):
            return int(match.group(1))
    return None


def find_node(text: str) -> str | None:
    """The host that a line names as its writer or subject, or None."""
    for pattern in _NODE:
        match = pattern.search(text)
        if match is None:
            continue
        host = match.group("host").rstrip(".")
        if not _NOT_HOSTS.match(host) or (_DEVICE_NAME.match(host) and text.startswith("srun: error: ")):
            return host
    return None


def find_time(text: str, year: int | None = None) -> float | None:
    """The time a line carries, in seconds since the epoch (UTC assumed); ``year`` completes formats without one."""
    head = text[:160]
    for pattern, form in _TIMES:
        match = pattern.search(head)
        if match:
            try:
                return _seconds(match, form, year)
            except (ValueError, KeyError):
                continue
    match = _SHORT_GLOG.search(head)
    if match:
        month, day, hour, minute, second = (int(part) for part in match.groups()[:5])
        return _stamp(year, month, day, hour, minute, second)
    return None


@lru_cache(maxsize=64)
def _day(text: bytes) -> float:
    year, month, day = text.split(b"-")
    return datetime(int(year), int(month), int(day), tzinfo=UTC).timestamp()


def iso_seconds(text: bytes) -> float | None:
    """Seconds since the epoch of ``2027-03-04 05:06:07`` (UTC); None where it is no date."""
    try:
        return _day(text[:10]) + int(text[11:13]) * 3600 + int(text[14:16]) * 60 + int(text[17:19])
    except ValueError:
        return None


def _seconds(match: re.Match[str], form: str, year: int | None) -> float:
    parts = match.groups()
    if form == "iso":
        year, month, day, hour, minute, second = (int(part) for part in parts[:6])
        return _stamp(year, month, day, hour, minute, second, fraction=parts[6])
    if form == "glog":
        month, day, hour, minute, second = (int(part) for part in parts[:5])
        return _stamp(year, month, day, hour, minute, second, fraction=parts[5])
    if form == "dmesg":
        name, *rest, own_year = parts
        day, hour, minute, second = (int(part) for part in rest)
        return _stamp(int(own_year), _MONTHS[name], day, hour, minute, second)
    name, *rest = parts
    day, hour, minute, second = (int(part) for part in rest)
    return _stamp(year, _MONTHS[name], day, hour, minute, second)


def _stamp(
    year: int | None, month: int, day: int, hour: int, minute: int, second: int, fraction: str | None = None
) -> float:
    base = datetime(year or 2000, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    return base + (float(f"0.{fraction}") if fraction else 0.0)


@dataclass
class OriginMap:
    """What a whole log says about which rank ran on which node; fed line by line, asked at the end."""

    node_of_rank: dict[int, str] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    processes: dict[tuple[str, int], int] = field(default_factory=dict)
    """(node, process id) to rank, from the same lines."""
    bus: dict[tuple[str, int], int] = field(default_factory=dict)
    """(node, PCI bus number) to rank, from NCCL's start-up lines."""
    _host: str | None = None
    _rank: int | None = None

    _summary_host = re.compile(r"^\s*(?:\S+\s+)?host\s+: (\S+)")
    _summary_rank = re.compile(r"^\s*(?:\S+\s+)?rank\s+: (\d+) \(local_rank")
    _labelled = re.compile(r"(?:^|[\s\]])(\d+): ([A-Za-z][\w.-]*):\d+:\d+ \[\d+\].*NCCL")
    _prefixed = re.compile(r"^(?:\[)?([A-Za-z][\w.-]*)(?:\])?[: ]+\[rank(\d+)\]")
    _named = re.compile(r"[Rr]ank[ :]*(\d+)\b.*?\b(?:node|host)(?:name)?[:= ]+['\"]?([A-Za-z][\w.-]*\d[\w.-]*)")
    _exit = re.compile(r"exitcode\s+: -?\d+ \(pid: (\d+)\)")

    _communicator = re.compile(r"([A-Za-z][\w.-]*):\d+:\d+ \[\d+\] NCCL INFO comm \S+ rank (\d+) .*?busId ([0-9a-f]+)")
    _process = re.compile(r"(?:^|[\s\]|])([A-Za-z][\w.-]*):(\d+):\d+ \[\d+\]")
    _device = re.compile(
        r"PCI:[0-9a-f]{4,8}:([0-9a-f]{2}):|\b[0-9a-f]{4}:([0-9a-f]{2}):[0-9a-f]{2}\.\d|device \[([0-9a-f]{2}):"
    )

    @classmethod
    def concerns(cls, text: str) -> bool:
        """Whether :meth:`feed` (or the launcher's summary) can learn from such a line, whatever its numbers are."""
        return "Root Cause" in text or any(
            pattern.search(text)
            for pattern in (cls._communicator, cls._summary_host, cls._summary_rank, cls._exit, cls._prefixed,
                            cls._named, cls._labelled)
        )  # fmt: skip

    def rank_of_device(self, node: str | None, text: str) -> int | None:
        """The rank that runs on the PCI device a kernel line of ``node`` names, or None."""
        match = self._device.search(text)
        if node is None or match is None:
            return None
        return self.bus.get((node, int(next(group for group in match.groups() if group), 16)))

    def rank_of_process(self, text: str) -> int | None:
        """The rank of the process whose NCCL line this is, or None."""
        match = self._process.search(text)
        return self.processes.get((match.group(1), int(match.group(2)))) if match else None

    def feed(self, text: str) -> None:
        """Take in one line."""
        if "busId" in text and (match := self._communicator.search(text)):
            node, rank = match.group(1), int(match.group(2))
            self.node_of_rank.setdefault(rank, node)
            self.bus.setdefault((node, int(match.group(3), 16) >> 12), rank)
            if process := self._process.search(text):
                self.processes.setdefault((node, int(process.group(2))), rank)
            return
        if match := self._summary_host.match(text):
            self._host = match.group(1)
        elif match := self._summary_rank.match(text):
            self._rank = int(match.group(1))
            if self._host:
                self.node_of_rank.setdefault(self._rank, self._host)
        elif match := self._exit.search(text):
            if self._rank is not None:
                self.pids.setdefault(int(match.group(1)), self._rank)
        elif (match := self._prefixed.match(text)) and not _NOT_HOSTS.match(match.group(1)):
            self.node_of_rank.setdefault(int(match.group(2)), match.group(1))
        elif (match := self._named.search(text)) or (match := self._labelled.search(text)):
            self.node_of_rank.setdefault(int(match.group(1)), match.group(2))


_MESSAGE_KEYS = ("message", "msg", "log", "text", "event")


def unwrapped(text: str) -> list[str]:
    """The lines inside a structured (JSON) log line, each labelled with its time, host and rank; else the line itself.

    A whole traceback is one such line: its line ends are escaped in the message.
    """
    try:
        record = json.loads(text)
    except ValueError:
        return [text]
    if not isinstance(record, dict):
        return [text]
    message = next((str(record[key]) for key in _MESSAGE_KEYS if record.get(key)), "")
    if not message:
        return [text]
    fields = {str(key).lower(): value for key, value in record.items()}
    head = [str(fields[key]) for key in ("time", "timestamp", "ts", "@timestamp", "asctime") if key in fields][:1]
    head += [f"host={fields[key]}" for key in ("host", "hostname", "node", "node_name") if fields.get(key)][:1]
    head += [f"[rank{fields[key]}]:" for key in ("rank", "global_rank") if str(fields.get(key, "")).isdigit()][:1]
    level = str(next((fields[key] for key in ("level", "levelname", "severity") if key in fields), ""))
    head += [level.upper()] if level.lower() in ("warning", "warn", "info", "debug") else []
    return [" ".join([*head, part]) for part in message.split("\n")]
