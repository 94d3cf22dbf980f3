"""Rules for root causes: data with roles, strengths and their own examples, compiled once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import Field, field_validator

from planner.errors import BadInputError
from planner.loading import Settings, read_yaml, validate

HERE = Path(__file__).parent


class Role(StrEnum):
    """What a matching line is to the failure."""

    ROOT = "root"
    CASCADE = "cascade"
    CONFIRMATION = "confirmation"
    ADVICE = "advice"
    RECOVERED = "recovered"


class Rule(Settings):
    """One rule; the meaning of each field is said at the top of ``rules.yaml``."""

    name: str
    """Unique name."""
    role: Role
    """What a matching line is."""
    root: str | None = None
    """Class of failure."""
    strength: int = Field(default=0, ge=0, le=100)
    """How far such a line explains the rest."""
    pattern: str
    """What is searched in the cleaned line."""
    unless: str | None = None
    """The rule does not apply where this is found too."""
    within: Literal["dataset", "checkpoint"] | None = None
    """Only for the last line of a traceback whose frames are in code that reads such."""
    latent: bool = False
    """The job may go on for a while after such a line."""
    severity: str | None = None
    """Instead of the class's own."""
    action: str | None = None
    """Instead of the class's own."""
    examples: list[str] = []
    """Lines that must match."""
    counter: list[str] = []
    """Lines that must not match."""

    @field_validator("pattern", "unless")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"not a regular expression: {error}") from error
        return value

    def matches(self, text: str) -> bool:
        """Whether a cleaned line is of this rule's kind."""
        return _compiled(self.pattern).search(text) is not None and (
            self.unless is None or _compiled(self.unless).search(text) is None
        )

    def may_match(self, lowered: str) -> bool:
        """Whether one of the literals that a match needs is there: far cheaper than the expression itself."""
        literals = needed_literals(self.pattern)
        return not literals or any(literal in lowered for literal in literals)


class FailureClass(Settings):
    """What a class of failure means (``classes.yaml``)."""

    category: str
    """infrastructure, framework, script or none."""
    severity: str
    """SEV1, SEV2, SEV3, STOP or NONE, by a log's evidence alone."""
    action: str
    """What a person or the supervisor should do."""
    explanation: str
    """What happened, in a sentence."""


@lru_cache(maxsize=4096)
def needed_literals(pattern: str) -> tuple[str, ...]:
    """Lower-case strings of which every match of ``pattern`` holds at least one; empty where none can be told."""
    return tuple(sorted(_literals_of(re._parser.parse(pattern)) or ()))  # type: ignore[attr-defined]


def _literals_of(sequence: Any) -> frozenset[str] | None:
    """Literals of which a match of a parsed sequence needs one: those of its element that needs the longest."""
    found: list[frozenset[str]] = []
    run = ""
    for operation, value in [*sequence, (None, None)]:
        name = str(operation)
        if name == "LITERAL":
            run += chr(value).lower()
            continue
        if len(run) >= 2:
            found.append(frozenset({run}))
        run = ""
        inner: frozenset[str] | None = None
        if name == "SUBPATTERN":
            inner = _literals_of(value[3])
        elif name == "MAX_REPEAT" and value[0] > 0:
            inner = _literals_of(value[2])
        elif name == "BRANCH":
            branches = [_literals_of(branch) for branch in value[1]]
            inner = None if None in branches else frozenset().union(*(branch for branch in branches if branch))
        if inner:
            found.append(inner)
    return max(found, key=lambda group: min(map(len, group)), default=None)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@lru_cache(maxsize=1)
def classes() -> dict[str, FailureClass]:
    """Every class of failure by name."""
    path = HERE / "classes.yaml"
    return {name: validate(FailureClass, value, f"{path}: {name}") for name, value in read_yaml(path).items()}


def load_rules(path: Path) -> list[Rule]:
    """The rules of a file, in order.

    Raises:
        BadInputError: not a list of rules, a name given twice, a class nobody knows, or an example that fails.
    """
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file") from None
    except (OSError, yaml.YAMLError) as error:
        raise BadInputError(f"{path}: cannot be read as YAML ({error})") from error
    if not isinstance(data, list):
        raise BadInputError(f"{path}: a list of rules is needed")
    rules = [validate(Rule, item, f"{path}: rule {index}") for index, item in enumerate(data)]
    seen: set[str] = set()
    for rule in rules:
        if rule.name in seen:
            raise BadInputError(f"{path}: rule {rule.name} stands twice")
        seen.add(rule.name)
        if rule.root is not None and rule.root not in classes():
            raise BadInputError(f"{path}: rule {rule.name}: root {rule.root!r} is no class of classes.yaml")
        if rule.role is Role.ROOT and rule.root is None:
            raise BadInputError(f"{path}: rule {rule.name}: role root needs a root")
        check_examples(rule, path)
    return rules


def check_examples(rule: Rule, source: Path) -> None:
    """Refuse a rule that fails its own examples or counter-examples."""
    for text in rule.examples:
        if not rule.matches(text):
            raise BadInputError(f"{source}: rule {rule.name} does not match its example {text[:80]!r}")
    for text in rule.counter:
        if rule.matches(text):
            raise BadInputError(f"{source}: rule {rule.name} matches its counter-example {text[:80]!r}")


@lru_cache(maxsize=1)
def shipped_rules() -> tuple[Rule, ...]:
    """The rules that travel with the package."""
    return tuple(load_rules(HERE / "rules.yaml"))


@dataclass(frozen=True, slots=True)
class Exceptional:
    """The last line of a traceback: an exception's type and message."""

    type: str
    message: str
    root: str
    """Class by type alone; rules refine it."""
    known: bool = True
    """Python's own type or one of the table: what it means is certain, so it may stop a job."""


_EXCEPTION = re.compile(
    r"(?:^|[\s:\]|>])((?:[A-Za-z_]\w*\.)*(?:_?[A-Z]\w*)?(?:Error|Exception|Interrupt|Warning|Iteration))"
    r"(?:: (.*)|:?\s*$)"
)
_BY_TYPE = {
    "AttributeError": "attribute_error", "RuntimeError": "runtime_error", "NotImplementedError": "runtime_error",
    "AssertionError": "assertion_error", "ValueError": "value_error", "UnicodeDecodeError": "value_error",
    "OverflowError": "value_error", "ZeroDivisionError": "zero_division", "FloatingPointError": "zero_division",
    "FileNotFoundError": "file_not_found", "NotADirectoryError": "os_error", "IsADirectoryError": "os_error",
    "OSError": "os_error", "IOError": "os_error", "FileExistsError": "os_error", "BlockingIOError": "os_error",
    "TypeError": "type_error", "NameError": "name_error", "UnboundLocalError": "name_error",
    "PermissionError": "permission_error", "ImportError": "import_error", "ModuleNotFoundError": "import_error",
    "KeyError": "key_error", "ConfigKeyError": "key_error", "SyntaxError": "syntax_error",
    "IndentationError": "syntax_error", "TabError": "syntax_error", "ArgumentError": "argument_error",
    "CalledProcessError": "called_process_error", "SubprocessError": "called_process_error",
    "IndexError": "index_error",
    "MemoryError": "host_out_of_memory", "RecursionError": "runtime_error", "StopIteration": "runtime_error",
    "JSONDecodeError": "value_error", "ValidationError": "value_error", "ConnectionError": "connection_error",
    "ConnectionRefusedError": "connection_error", "ConnectionResetError": "connection_error",
    "BrokenPipeError": "connection_error", "ConnectionAbortedError": "connection_error",
    "TimeoutError": "connection_error",
    "RendezvousConnectionError": "connection_error", "OutOfMemoryError": "out_of_memory",
    "CheckpointException": "checkpoint_corrupt", "UnpicklingError": "checkpoint_corrupt",
    "BadZipFile": "checkpoint_corrupt",
    "EOFError": "runtime_error",
    "HFValidationError": "value_error", "ConfigAttributeError": "attribute_error", "InstantiationException":
    "type_error", "ProcessGroupError": "runtime_error", "UnsupportedOperation": "os_error",
    "gaierror": "network_error",
}  # fmt: skip
_NOT_CAUSES = {"ChildFailedError", "SignalException", "DistBackendError", "DistNetworkError", "DistStoreError",
"KeyboardInterrupt",
               "BrokenProcessPool", "RayTaskError", "ProcessExitedException", "ProcessRaisedException"}  # fmt: skip


def exception_of(text: str) -> Exceptional | None:
    """The exception whose last traceback line this is, or None. Warnings are not exceptions."""
    match = _EXCEPTION.search(text)
    if match is None:
        return None
    name = match.group(1).rpartition(".")[2]
    if name.endswith("Warning") or name in _NOT_CAUSES:
        return None
    known = name in _BY_TYPE
    return Exceptional(name, (match.group(2) or "").strip(), _BY_TYPE.get(name, "runtime_error"), known)


_LABEL = re.compile(r"[\[(].*|.*[\])]|\S+[:|]|\d[\d:.,TZ/+-]*|ERROR|CRITICAL|E|[A-Z][a-z]{2}")


def ends_a_traceback(text: str) -> bool:
    """Whether an exception stands at the line's head, after labels only: a traceback's end, not a remark about one."""
    match = _EXCEPTION.search(text)
    if match is None:
        return False
    head = text[: match.start(1)].rpartition("| ")[2]
    return all(_LABEL.fullmatch(word) for word in head.split())


_ANY_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:: .*)?$")


def any_exception(text: str) -> Exceptional | None:
    """The exception that ends a traceback, whatever its name; for lines that stand after a frame."""
    words = text.rpartition("| ")[2].split(" ")
    while words and _LABEL.fullmatch(words[0]) and not words[0].rstrip(":").replace(".", "").isidentifier():
        words.pop(0)
    if not words or not words[0] or _ANY_EXCEPTION.match(" ".join(words)) is None:
        return None
    name = words[0].rstrip(":").rpartition(".")[2]
    if name in _NOT_CAUSES or name in ("Traceback", "The", "During") or name.endswith("Warning"):
        return None
    return Exceptional(name, " ".join(words[1:]), _BY_TYPE.get(name, "runtime_error"), name in _BY_TYPE)


class Digits(NamedTuple):
    """How a pattern depends on digits: its alternatives without any, and those with, each digit widened to any digit.

    What an alternative can match for *some* digits, its widened form matches for all of them; so a line that a
    digit-free alternative matches, or no widened one does, is judged the same whatever its digits are.
    """

    free: re.Pattern[str] | None
    widened: re.Pattern[str]

    def matter(self, masked: str) -> bool:
        """Whether the digits of a line decide about the pattern; ``masked`` is the line with every digit a 0."""
        if self.widened.search(masked) is None:
            return False
        return self.free is None or self.free.search(masked) is None


def digits_of(pattern: str) -> Digits | None:
    """The dependence of a pattern on digits, None where it names none."""
    flags, body = ("(?i)", pattern[4:]) if pattern.startswith("(?i)") else ("", pattern)
    free: list[str] = []
    widened: list[str] = []
    for branch in _branches(body):
        wide = _widened(branch)
        (free if wide == branch else widened).append(wide)
    if not widened:
        return None
    compiled = re.compile(flags + "|".join(widened))
    return Digits(re.compile(flags + "|".join(free)) if free else None, compiled)


def _tokens(pattern: str) -> Iterator[str]:
    """Escapes, classes, repetitions and single characters of a pattern, in order."""
    index = 0
    while index < len(pattern):
        char = pattern[index]
        end = index + 1
        if char == "\\":
            end = index + 2
        elif char == "{":
            end = pattern.index("}", index) + 1
        elif char == "[":
            end = pattern.index("]", index + 2) + 1
        yield pattern[index:end]
        index = end


def _branches(pattern: str) -> list[str]:
    """The alternatives at a pattern's top level."""
    found, depth = [""], 0
    for token in _tokens(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += token
    return found


def _widened(pattern: str) -> str:
    out = []
    for token in _tokens(pattern):
        if token.isdigit():
            out.append("\\d")
        elif token.startswith("[") and token[1] != "^" and re.search(r"(?<!\\)\d", token):
            out.append("[\\d" + token[1:])
        else:
            out.append(token)
    return "".join(out)
