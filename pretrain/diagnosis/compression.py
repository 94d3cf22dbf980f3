"""Log compression: filter rules drop routine lines, the rest is grouped into templates (Drain).

Source: Acme, section 6.1 (real-time log compression by filter rules); Drain, ICWS'17, through the ``drain3`` package.
A job teaches its like: templates that a healthy run repeated become filters for later runs of the same name.

Progress lines are routine by their words, and two kinds are not by what they say: those of a loss that left its band
for good, and the last one where the log goes on without an end, which is where the run stopped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import yaml
from drain3 import TemplateMiner
from drain3.template_miner_config import TemplateMinerConfig

from planner.errors import BadInputError
from planner.files import write_json
from planner.loading import Settings, validate
from pretrain.diagnosis.kinds import is_alarming, judge
from pretrain.diagnosis.progress import Course, Progress, parse
from pretrain.diagnosis.reading import LogLine, all_lines

HERE = Path(__file__).parent
_LABEL = re.compile(r"^(?:\s{0,3}\d{1,5}: |\[(?:rank|default)\d+\]:? ?)+")
MAX_TEMPLATES = 2000
LEARN_FROM = 3
"""Lines of one template in a healthy run before it counts as routine for runs of the same name."""


class Filter(Settings):
    """One kind of routine line; fields as said at the top of ``filters.yaml``."""

    name: str
    """Unique name."""
    pattern: str
    """What is searched in the cleaned line."""
    unless: str | None = None
    """The line stays where this is found too."""
    examples: list[str] = []
    """Lines that must be dropped."""
    counter: list[str] = []
    """Lines that must stay."""

    def drops(self, text: str) -> bool:
        """Whether a line is routine by this filter."""
        if re.search(self.pattern, text) is None:
            return False
        return self.unless is None or re.search(self.unless, text) is None


@dataclass
class Template:
    """Lines alike: the template, how many, and the first of them."""

    text: str
    count: int
    first: LogLine


@dataclass
class Compressed:
    """What is left of a log: ``lines`` read, ``dropped`` as routine, and the templates of the rest in order."""

    lines: int = 0
    dropped: int = 0
    templates: list[Template] = field(default_factory=list)

    @property
    def gone(self) -> float:
        """Share of lines that a reader is spared: dropped, or folded into a template that stands once."""
        return 1.0 - len(self.templates) / self.lines if self.lines else 1.0

    def text(self, budget: int = 12_000) -> str:
        """The compressed log as numbered lines within ``budget`` characters; beginning and end survive a cut."""
        rows = [f"{item.first.number}: {item.first.text[:400]}" + (f"  (× {item.count})" if item.count > 1 else "")
                for item in self.templates]  # fmt: skip
        if sum(len(row) + 1 for row in rows) <= budget:
            return "\n".join(rows)
        head: list[str] = []
        tail: list[str] = []
        size = 0
        while rows and size < budget:
            row = rows.pop() if len(tail) <= 3 * len(head) else rows.pop(0)
            (tail if len(tail) <= 3 * len(head) else head).append(row)
            size += len(row) + 1
        return "\n".join([*head, f"[… {len(rows)} kinds of lines left out …]", *reversed(tail)])


def load_filters(path: Path) -> list[Filter]:
    """The filters of a file; each must pass its own examples and counter-examples.

    Raises:
        BadInputError: unreadable, not a list, or an example that fails.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise BadInputError(f"{path}: cannot be read as YAML ({error})") from error
    if not isinstance(data, list):
        raise BadInputError(f"{path}: a list of filters is needed")
    filters = [validate(Filter, item, f"{path}: filter {index}") for index, item in enumerate(data)]
    for item in filters:
        for text in item.examples:
            if not item.drops(text):
                raise BadInputError(f"{path}: filter {item.name} keeps its example {text[:80]!r}")
        for text in item.counter:
            if item.drops(text):
                raise BadInputError(f"{path}: filter {item.name} drops its counter-example {text[:80]!r}")
    return filters


@lru_cache(maxsize=1)
def shipped_filters() -> tuple[Filter, ...]:
    """The filters that travel with the package."""
    return tuple(load_filters(HERE / "filters.yaml"))


def _miner() -> TemplateMiner:
    config = TemplateMinerConfig()
    config.profiling_enabled = False
    config.drain_max_clusters = MAX_TEMPLATES
    config.drain_sim_th = 0.5
    config.parametrize_numeric_tokens = True
    return TemplateMiner(config=config)


class Compressor:
    """Compresses one log; ``known`` are templates that earlier healthy runs of the same job taught.

    Feed it all lines in order, then :meth:`finish` it.
    """

    _VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")

    def __init__(self, known: Iterable[str] = (), filters: Sequence[Filter] | None = None) -> None:
        self._filters = shipped_filters() if filters is None else filters
        self._known = frozenset(known)
        self._verdicts: dict[str, tuple[bool, bool]] = {}
        """By shape: whether a line is routine, and whether it is a good end."""
        self._miner = _miner()
        self._by_cluster: dict[int, Template] = {}
        self._course = Course()
        self._aside: list[LogLine] = []
        """Progress lines outside the band, until that turns out to last."""
        self._last_progress: LogLine | None = None
        self._last_number = 0
        self.result = Compressed()

    def feed(self, line: LogLine) -> None:
        """Take in one line of the log, in order."""
        self.result.lines += 1
        self._last_number = line.number
        key = self._VARIABLE.sub("0", line.text)
        verdict = self._verdicts.get(key)
        if verdict is None:
            if len(self._verdicts) > 50_000:
                self._verdicts.clear()
            verdict = self._verdicts[key] = self._judged(line.text, key)
        routine, good_end = verdict
        if not routine:
            self._group(line)
            return
        self.result.dropped += 1
        progress = parse(line)
        if progress is not None:
            self._advance(line, progress)
        elif good_end:
            self._last_progress = None

    def finish(self) -> Compressed:
        """What is left, in the log's order."""
        if self._last_progress is not None and self._last_progress.number != self._last_number:
            self._keep([self._last_progress])
        self._last_progress = None
        self.result.templates.sort(key=lambda item: item.first.number)
        return self.result

    def _advance(self, line: LogLine, progress: Progress) -> None:
        self._course.feed(progress)
        self._last_progress = line
        if not self._course.outside:
            self._aside.clear()
            return
        self._aside.append(line)
        if self._course.spike():
            self._keep(self._aside)
            self._aside.clear()
            self._last_progress = None

    def _keep(self, lines: Sequence[LogLine]) -> None:
        """Take lines back in that went as routine."""
        for line in lines:
            self.result.dropped -= 1
            self._group(line)

    def _judged(self, text: str, key: str) -> tuple[bool, bool]:
        kind = judge(text)
        if kind.is_evidence and not kind.dismissed:
            return False, kind.good_end
        bare = _LABEL.sub("", text)
        return key in self._known or any(item.drops(bare) for item in self._filters), kind.good_end

    def _group(self, line: LogLine) -> None:
        found = self._miner.add_log_message(line.text)
        known = self._by_cluster.get(int(found["cluster_id"]))
        if known is not None:
            known.count += 1
            known.text = str(found["template_mined"])
        elif len(self._by_cluster) < MAX_TEMPLATES:
            template = Template(str(found["template_mined"]), 1, line)
            self._by_cluster[int(found["cluster_id"])] = template
            self.result.templates.append(template)


def compress(path: Path, known: Iterable[str] = ()) -> Compressed:
    """Compress one file in a stream."""
    compressor = Compressor(known)
    for line in all_lines(path):
        compressor.feed(line)
    return compressor.finish()


class JobMemory:
    """What healthy runs of a job taught, kept as one file per job name below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def known(self, job: str) -> list[str]:
        """Templates that are routine for runs of this name."""
        path = self._path(job)
        if not path.exists():
            return []
        data = yaml.safe_load(path.read_text())
        return [str(item) for item in data["routine"]] if isinstance(data, dict) and "routine" in data else []

    def learn(self, job: str, healthy_log: Path) -> int:
        """Remember what a healthy run repeated; gives the number of new templates. Alarming lines are never learned."""
        counts: dict[str, int] = {}
        for line in all_lines(healthy_log):
            if not is_alarming(line.text):
                key = Compressor._VARIABLE.sub("0", line.text)
                counts[key] = counts.get(key, 0) + 1
        before = set(self.known(job))
        fresh = {key for key, count in counts.items() if count >= LEARN_FROM} - before
        if fresh:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self._path(job), {"job": job, "routine": sorted(before | fresh)})
        return len(fresh)

    def _path(self, job: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job):
            raise BadInputError(f"job name {job!r}: letters, digits, dots and dashes only")
        return self.folder / f"{job}.json"
