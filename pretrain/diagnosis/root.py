"""The decision: of all alarming lines, which one is the cause (pure, apart from reading the lines it is fed).

The strongest kind of evidence wins; among kinds of about equal strength the earliest on the timeline does. What a job
outlived (progress went on after it) is no cause, unless it is of the latent sort that shows first and kills later.
Cascades explain nothing by themselves: they name a root only when there is no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pretrain.diagnosis.kinds import MAX_KNOWN, Kind, KindCache
from pretrain.diagnosis.origin import OriginMap, find_node, find_rank, find_time, unwrapped
from pretrain.diagnosis.progress import Course, Progress, ProgressShape, parse, shape_of
from pretrain.diagnosis.reading import MAX_SHAPE_BYTES, Block, LogLine
from pretrain.diagnosis.rules import Role, Rule, classes, ends_a_traceback

NEAR = 14
"""Strengths this close count as equal: then the earlier line wins."""
OUTLIVED = 2
"""Progress lines after an evidence that show the job outlived it."""
MAX_PER_NAME = 500
"""Lines kept per rule since the last progress; the rest is only counted."""
_SECTION_HOST = re.compile(
    r"(?:[@(:]|\bof|\bon|\bfrom|\bhost|\bnode|\bdmesg|\bmortem|\bjournal|\bkernel|^\W{2,})\s*\(?"
    r"(?P<host>[A-Za-z][\w.-]*\d[\w.-]*)"
)
_OF_A_RANK = re.compile(
    r"^(?:\[(?:rank|default)?\d+\]|\s{0,3}\d{1,5}: |srun: |slurmstepd|torch|Traceback|[WEIF]\d{4} )", re.I
)
_READS_DATA = re.compile(
    r"indexed_dataset|gpt_dataset|blended|/datasets/|webdataset|tariterators|streaming/base|arrow_dataset|parquet"
    r"|data_?sets?\.py|mmap_dataset|tfrecord"
)
_READS_CHECKPOINTS = re.compile(
    r"serialization\.py|checkpoint|load_state_dict|safetensors|from_pretrained|modeling_utils|weight_utils|_io/zip"
)
_FRAME = '  File "'
_ENVIRONMENT = re.compile(
    r"(?i)\\b(?:cuda\\w*|nccl|gloo|driver|device|system|network|socket|timed? ?out|unavailable|temporar\\w+|busy)\\b"
)
"""Words by which a RuntimeError may speak of the machine and not of the program: then a restart can help."""
_FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\)")
_SUMMARY_RANK = re.compile(r"^\s*(?:\S+\s+)?rank\s+: (\d+) \(local_rank")
_PID = re.compile(r"\bpid[=: ]+'?(\d+)|Killed process (\d+)|\(pid (\d+)\)")
_SEQUENCE = re.compile(r"\[?Rank (\d+)\].*?(?:SeqNum=(\d+)|last enqueued NCCL work: (\d+))")
_NAMED_ERROR = re.compile(r"(?i)\b\w+error: ")
_PEER = re.compile(r"(?:peer|remote|from|to) [\[(]?([A-Za-z][\w.-]*\d[\w.-]*)(?:[<:]|\]:\d|, \d+\))")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One alarming line and what it is taken for."""

    line: LogLine
    order: tuple[float, int]
    role: Role
    root: str | None
    strength: int
    name: str
    section: str | None = None
    """Host of the kernel's or journal's part of the log that the line stands in."""
    latent: bool = False
    severity: str | None = None
    action: str | None = None

    @property
    def rank(self) -> int | None:
        """The rank that wrote the line."""
        return find_rank(self.line.text)

    @property
    def node(self) -> str | None:
        """The node that the line names, or that its part of the log is from."""
        return find_node(self.line.text) or (self.section if self.rank is None else None)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer for one file (or one set of files); the shape of ``planaria diagnose --json``."""

    file: str
    root: str
    node: str | None = None
    rank: int | None = None
    evidence: tuple[int, ...] = ()
    confidence: float
    severity: str
    category: str
    action: str
    explanation: str
    method: str
    cascades: tuple[tuple[str, int, int], ...] = ()
    """Name, number of lines and first line of each cascade; this and what follows is for the page alone."""
    time: float | None = None
    """When the root was written, seconds since the epoch."""
    last_step: tuple[int, int] | None = None
    """The last step that was reached before, and its line."""

    def to_json(self) -> dict[str, Any]:
        """The document of DESIGN.md."""
        return {
            "file": self.file, "root": self.root, "category": self.category, "severity": self.severity,
            "node": self.node, "rank": self.rank, "evidence": list(self.evidence),
            "confidence": round(self.confidence, 3), "action": self.action, "explanation": self.explanation,
            "method": self.method,
        }  # fmt: skip


@dataclass
class Collector:
    """Takes the signal lines of one log in order and keeps what the decision needs, in bounded memory."""

    file: str
    extra_rules: tuple[Rule, ...] = ()
    evidence: list[Evidence] = field(default_factory=list)
    origins: OriginMap = field(default_factory=OriginMap)
    course: Course = field(default_factory=Course)
    ended_well: int | None = None
    bad_end: int | None = None
    trouble: int | None = None
    """The last line that speaks of trouble though no rule knows it."""
    time_limit: bool = False
    cut: bool = False
    lines: int = 0
    cascades: dict[str, int] = field(default_factory=dict)
    first_of: dict[str, int] = field(default_factory=dict)
    """First line of each cascade."""
    stuck: set[int] = field(default_factory=set)
    first_failure_rank: int | None = None
    last_time: float | None = None
    progress_marks: list[tuple[int, int]] = field(default_factory=list)
    sequences: dict[int, int] = field(default_factory=dict)
    _section: str | None = None
    _await_rank: bool = False
    year: int | None = None
    """The year of progress lines, for times that show none."""
    _kinds: KindCache = field(init=False)
    _quiet_frames: set[bytes] = field(default_factory=set)
    """Shapes of frames in code that reads neither data nor checkpoints."""
    _progress: dict[bytes, ProgressShape] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _mortal: bool = False
    _within: dict[int | None, str] = field(default_factory=dict)
    """Per rank, what the frames of the traceback being printed are reading."""

    def __post_init__(self) -> None:
        self._kinds = KindCache(self.extra_rules)

    def feed_block(self, block: Block) -> None:
        """Take in the signal lines of a block; lines of a shape that is known are not taken apart again."""
        shapes, spans, known, quiet = block.shapes, self._progress, self._kinds.known, self._quiet_frames
        for index in block.wanted:
            shape = shapes[index]
            if (found := spans.get(shape)) is not None:
                self._advance(found.read(block.raw, block.start(index), block.file, block.before + index))
            elif shape in quiet:
                continue
            elif self._within or (kind := known(shape, index in block.followers)) is None:
                self.feed(block.line(index), index in block.followers)
            elif kind.is_echo and self._counts.get(kind.rule.name, 0) > MAX_PER_NAME:  # type: ignore[union-attr]
                self._count_echo(kind, block.before + index)
            elif not kind.is_inert:
                self._take_kind(block.line(index), kind)

    def _count_echo(self, kind: Kind, number: int) -> None:
        assert kind.rule is not None
        self.cascades[kind.rule.name] += 1
        if kind.bad_end:
            self.bad_end = number

    def feed(self, line: LogLine, after_frame: bool = False) -> None:
        """Take in one signal line; ``after_frame``: it stands right after a frame of a traceback."""
        if line.text.startswith("{") and (parts := unwrapped(line.text)) != [line.text]:
            framed = False
            for text in parts:
                self._take(line._replace(text=text, shape=b""), framed)
                framed = _FRAME in text
        else:
            self._take(line, after_frame)

    def _take(self, line: LogLine, after_frame: bool) -> None:
        progress = parse(line)
        if progress is None:
            self._notice(line, line.text, after_frame)
            return
        self._advance(progress)
        if len(line.shape) <= MAX_SHAPE_BYTES and (shape := shape_of(line, progress)) is not None:
            if len(self._progress) > MAX_KNOWN:
                self._progress.clear()
            self._progress[line.shape] = shape

    def _advance(self, progress: Progress) -> None:
        self._section = None
        if self._within:
            self._within.clear()
        if progress.time is not None:
            self.last_time = progress.time if self.last_time is None else max(progress.time, self.last_time)
            if self.year is None:
                self.year = datetime.fromtimestamp(progress.time, tz=UTC).year
        if self.course.feed(progress):
            self.progress_marks.append((progress.number, progress.step))
            if len(self.progress_marks) > 2 * OUTLIVED + 2:
                del self.progress_marks[0]
            self._forget_outlived()

    def _forget_outlived(self) -> None:
        """Drop evidence that ``OUTLIVED`` steps came after: memory stays bounded on endless logs."""
        if len(self.progress_marks) <= OUTLIVED or not self._mortal:
            return
        border = self.progress_marks[-OUTLIVED][0]
        self.evidence = [item for item in self.evidence if item.latent or item.line.number >= border]
        self._mortal = any(not item.latent for item in self.evidence)
        self._counts.clear()

    def _time(self, text: str) -> float | None:
        when = find_time(text, self.year)
        if when is not None:
            self.last_time = when if self.last_time is None else max(when, self.last_time)
        return when

    def _notice(self, line: LogLine, text: str, after_frame: bool) -> None:
        if self._frame(line, text):
            return
        within = self._within.pop(find_rank(text), "") if self._within and ends_a_traceback(text) else ""
        self._take_kind(line, self._kinds.of(text, line.shape, within, after_frame))

    def _take_kind(self, line: LogLine, kind: Kind) -> None:
        text = line.text
        if kind.origin:
            self.origins.feed(text)
            self._summary(text)
        if kind.section and (host := _SECTION_HOST.search(text)):
            self._section = host["host"].rstrip(".-")
            return
        if self._section is not None and _OF_A_RANK.match(text):
            self._section = None
        if kind.stuck and (rank := find_rank(text)) is not None:
            self.stuck.add(rank)
        if kind.good_end:
            self.ended_well = line.number
        if kind.bad_end:
            self.bad_end = line.number
        if kind.rule is not None and kind.rule.role is Role.CONFIRMATION:
            self._time(text)
            self.time_limit = self.time_limit or kind.rule.name == "time-limit"
        elif kind.is_evidence:
            self._add(line, text, kind)
        elif kind.rule is None and kind.trouble:
            self.trouble = line.number

    def _frame(self, line: LogLine, text: str) -> bool:
        """Whether the line is a traceback's frame; remembers per rank what the code around the failure reads."""
        at = text.find(_FRAME)
        if at < 0:
            if "Traceback (most recent call last)" in text:
                self._within.pop(find_rank(text), None)
            return False
        code = text[at : at + 400]
        if _READS_DATA.search(code):
            self._within[find_rank(text)] = "dataset"
        elif _READS_CHECKPOINTS.search(code):
            self._within[find_rank(text)] = "checkpoint"
        elif line.shape and len(line.shape) <= MAX_SHAPE_BYTES and len(self._quiet_frames) < MAX_KNOWN:
            self._quiet_frames.add(line.shape)
        return True

    def _summary(self, text: str) -> None:
        if _FIRST_FAILURE.search(text):
            self._await_rank = True
        elif self._await_rank and (match := _SUMMARY_RANK.match(text)):
            self.first_failure_rank, self._await_rank = int(match.group(1)), False

    def _add(self, line: LogLine, text: str, kind: Kind) -> None:
        rule, is_root = kind.rule, kind.rule is not None and kind.rule.role is Role.ROOT
        if kind.dismissed:
            return
        if rule is not None and not is_root:
            self.cascades[rule.name] = self.cascades.get(rule.name, 0) + 1
            self.first_of.setdefault(rule.name, line.number)
        name = rule.name if rule is not None else f"exception {kind.by_type}"
        self._counts[name] = self._counts.get(name, 0) + 1
        if self._counts[name] > MAX_PER_NAME:
            return
        if match := _SEQUENCE.search(text):
            self.sequences.setdefault(int(match.group(1)), int(match.group(2) or match.group(3)))
        when = self._time(text)
        order = (when if when is not None else (self.last_time or 0.0), line.number)
        if rule is not None:
            item = Evidence(line, order, rule.role, rule.root, rule.strength, name, self._section, rule.latent,
                            rule.severity, rule.action)  # fmt: skip
        else:
            doubtful = not kind.certain or (kind.by_type == "runtime_error" and _ENVIRONMENT.search(text) is not None)
            item = Evidence(line, order, Role.ROOT, kind.by_type, kind.strength, name, self._section,
                            severity="SEV2" if doubtful else None)  # fmt: skip
        self.evidence.append(item)
        self._mortal = self._mortal or not item.latent


def decide(collected: Collector) -> Verdict:
    """The root cause of one log."""
    roots = [item for item in collected.evidence if item.role is Role.ROOT]
    roots = [item for item in roots if not outlived(item, collected)]
    roots = [item for item in roots if not _is_late_echo(item, collected)]
    if roots:
        return _from_roots(roots, collected)
    spike = collected.course.spike()
    if spike:
        return _verdict(collected, "loss_spike", [item.number for item in spike[:2]], 0.8)
    last = collected.course.last
    if collected.time_limit and last is not None and _stalled(collected, last):
        return _verdict(collected, "task_hang", [last.number], 0.85)
    echoes = [item for item in collected.evidence if item.role is Role.CASCADE and item.root is not None]
    echoes = [item for item in echoes if not outlived(item, collected)]
    if echoes:
        return _from_echoes(echoes, collected)
    if _is_fine(collected):
        return _verdict(collected, "none", [], 0.9)
    return _verdict(collected, "unknown", [], 0.3)


def outlived(item: Evidence, collected: Collector) -> bool:
    """Whether the job went on after an evidence, so that it is no cause."""
    if item.latent:
        return collected.bad_end is None and collected.ended_well is not None
    return sum(number > item.line.number for number, _ in collected.progress_marks) >= OUTLIVED


def _is_late_echo(item: Evidence, collected: Collector) -> bool:
    """A peer's connection trouble *after* the first collective failed explains nothing that was before it."""
    if item.strength >= 40 or item.root == "task_hang":
        return False
    return any(
        other.role is Role.CASCADE
        and other.root is not None
        and other.order < item.order
        and not outlived(other, collected)
        for other in collected.evidence
    )


def _stalled(collected: Collector, last: Progress) -> bool:
    gap = collected.course.usual_gap()
    if last.time is None or collected.last_time is None or gap is None:
        return True
    return collected.last_time - last.time > 3 * gap


def _is_fine(collected: Collector) -> bool:
    """Whether the log ends well, or still runs with nothing alarming after its last progress."""
    after = collected.course.last.number if collected.course.last else 0
    if collected.ended_well is not None and collected.ended_well > after:
        return True
    if max(collected.bad_end or 0, collected.trouble or 0) > after:
        return False
    return not collected.cut


def _from_roots(roots: list[Evidence], collected: Collector) -> Verdict:
    strongest = max(item.strength for item in roots)
    near = [item for item in roots if item.strength >= strongest - NEAR]
    first = min(near, key=lambda item: item.order)
    if first.strength < strongest and first.root != max(near, key=lambda item: item.strength).root:
        stronger = [item for item in near if item.strength == strongest]
        if strongest >= 70 and first.strength < 70:
            first = min(stronger, key=lambda item: item.order)
    same = [item for item in roots if item.root == first.root]
    if first.rank is None and first.strength < 50:
        spoken = [item for item in same if item.rank is not None and _NAMED_ERROR.search(item.line.text)]
        first = min(spoken, key=lambda item: item.order, default=first)
    lines = sorted({item.line.number for item in same if item.line.file == first.line.file})
    rivals = {item.root for item in near} - {first.root}
    confidence = min(0.99, 0.6 + first.strength / 250) - 0.1 * min(2, len(rivals))
    rank = _rank(first, same, collected)
    if first.root == "loss_spike":  # a guard's word is one witness, the progress lines it speaks of are the others
        lines = sorted({*lines, *(item.number for item in collected.course.spike()[:2])})
    return _verdict(
        collected, str(first.root), _first_lines(first, lines), confidence, rank=rank, node=_place(first, same, rank,
        collected),
        severity=first.severity, action=first.action, file=first.line.file,
    )  # fmt: skip


def _first_lines(first: Evidence, lines: list[int]) -> list[int]:
    return [first.line.number, *[number for number in lines if number != first.line.number]][:8]


def _rank(first: Evidence, same: list[Evidence], collected: Collector) -> int | None:
    ranks = {item.rank for item in same if item.rank is not None and item.name == first.name}
    if len(ranks) > 2:
        return None
    if first.rank is not None:
        return first.rank
    for item in same:
        match = _PID.search(item.line.text)
        pid = int(next(group for group in match.groups() if group)) if match else None
        if pid in collected.origins.pids:
            return collected.origins.pids[pid]
    by_device = collected.origins.rank_of_device(first.node, first.line.text)
    if by_device is None:
        by_device = collected.origins.rank_of_process(first.line.text)
    if by_device is not None or len(ranks) == 1:
        return by_device if by_device is not None else ranks.pop()
    if not ranks and (first.strength < 80 or first.root == "host_out_of_memory") and len(same) <= 3:
        return collected.first_failure_rank
    return None


def _place(first: Evidence, same: list[Evidence], rank: int | None, collected: Collector) -> str | None:
    if first.node is not None:
        return first.node
    if rank is not None:
        return collected.origins.node_of_rank.get(rank)
    nodes = {item.node for item in same if item.node is not None} or {_peer([item]) for item in same} - {None}
    return nodes.pop() if len(nodes) == 1 else None


def _from_echoes(echoes: list[Evidence], collected: Collector) -> Verdict:
    strongest = max(item.strength for item in echoes)
    same = [item for item in echoes if item.strength == strongest]
    named = [item for item in same if _NAMED_ERROR.search(item.line.text)]
    first = min(named or same, key=lambda item: item.order)
    rank = _lagging(collected) if first.root == "nccl_timeout" else None
    if first.root == "nccl_timeout":
        first = next((item for item in same if rank is not None and item.rank == rank), first)
    node = collected.origins.node_of_rank.get(rank) if rank is not None else _peer(same)
    lines = [item.line.number for item in same if item.line.file == first.line.file]
    return _verdict(collected, str(first.root), _first_lines(first, lines), 0.6, rank=rank, node=node,
                    file=first.line.file)  # fmt: skip


def _peer(same: Iterable[Evidence]) -> str | None:
    for item in same:
        match = _PEER.search(item.line.text)
        if match:
            return match.group(1)
    return None


def _lagging(collected: Collector) -> int | None:
    """The one rank whose watchdog is stuck, or whose collective count is behind all others', or None."""
    if len(collected.stuck) == 1:
        return next(iter(collected.stuck))
    if len(collected.sequences) < 2:
        return None
    least = min(collected.sequences.values())
    behind = [rank for rank, number in collected.sequences.items() if number == least]
    return behind[0] if len(behind) == 1 and len(set(collected.sequences.values())) > 1 else None


def _verdict(
    collected: Collector, root: str, lines: list[int], confidence: float, *, rank: int | None = None,
    node: str | None = None, severity: str | None = None, action: str | None = None, method: str | None = None,
    file: str | None = None,
) -> Verdict:  # fmt: skip
    known = classes()[root]
    if root == "out_of_memory" and severity is None and collected.course.count > 1:
        severity, action = "SEV2", "restart; memory grew during the run, or another process holds the device"
    return Verdict(
        file=file or collected.file, root=root, node=node, rank=rank, evidence=tuple(lines), confidence=confidence,
        severity=severity or known.severity, category=known.category, action=action or known.action,
        explanation=known.explanation, method=method or ("none" if root in ("none", "unknown") else "rule"),
        cascades=tuple((name, count, collected.first_of[name]) for name, count in sorted(collected.cascades.items())),
        time=_time_of(collected, lines, file), last_step=_step_before(collected, lines),
    )  # fmt: skip


def _time_of(collected: Collector, lines: list[int], file: str | None) -> float | None:
    """When the first line of the evidence was written, as it says itself."""
    same = (item for item in collected.evidence if file is None or item.line.file == file)
    item = next((item for item in same if lines and item.line.number == lines[0]), None)
    return find_time(item.line.text, collected.year) if item is not None else None


def _step_before(collected: Collector, lines: list[int]) -> tuple[int, int] | None:
    last = collected.course.last
    return (last.step, last.number) if last is not None and lines and last.number <= max(lines) else None
