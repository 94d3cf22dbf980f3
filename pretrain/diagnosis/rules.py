"""Rules for root causes: data with roles, strengths and their own examples, compiled once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

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


_EXCEPTION = re.compile(
    r"(?:^|[\s:\]|>])((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Warning|Iteration))(?:: (.*)|:?\s*$)"
)
_BY_TYPE = {
    "AttributeError": "attribute_error", "RuntimeError": "runtime_error", "NotImplementedError": "runtime_error",
    "AssertionError": "assertion_error", "ValueError": "value_error", "UnicodeDecodeError": "value_error",
    "OverflowError": "value_error", "ZeroDivisionError": "zero_division", "FloatingPointError": "zero_division",
    "FileNotFoundError": "file_not_found", "NotADirectoryError": "file_not_found", "IsADirectoryError": "os_error",
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
    "EOFError": "dataset_loading_error",
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
    return Exceptional(name, (match.group(2) or "").strip(), _BY_TYPE.get(name, "runtime_error"))
