"""What a line of a log is by its words alone: which rule knows it, which exception it names, what it says of the log.

Judging a line against all rules is dear, so it is done once per *shape* (the line with its digits masked) wherever
the answer cannot depend on the digits; where a rule names digits (Xid 79, errno 111) a narrower key is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from pretrain.diagnosis.origin import OriginMap
from pretrain.diagnosis.reading import MAX_SHAPE_BYTES, without_addresses
from pretrain.diagnosis.rules import (
    Digits,
    Exceptional,
    Role,
    Rule,
    any_exception,
    digits_of,
    ends_a_traceback,
    exception_of,
    shipped_rules,
)

_LOGGED = re.compile(r"^(?:\S+ )?(?:\[?(?:WARNING|WARN|INFO|DEBUG)\b|.{0,40}\b(?:WARNING|WARN|INFO)[:\] ])")
_HANDLED = re.compile(
    r"(?i)\b(?:falling back|will retry|retrying|skipped|skipping|ignored|ignoring|optional|caught|handled"
    r"|recovered|not installed, )\b"
)
_ENDED_WELL = re.compile(
    r"(?i)training (?:is )?(?:done|complete|finished)|after training is done|exiting program (?:at|after)"
    r"|exit(?:ed|ing)?(?: with)?"
    r"(?: exit)?[- ]?code:? ?0\b|job (?:\S+ )?(?:completed|finished)(?: successfully)?|successfully (?:finished"
    r"|completed)"
    r"|exit-duration|planned exit|State=COMPLETED"
)
_BAD_END = re.compile(
    r"(?i)ChildFailedError|exitcode ?:? -?[1-9]\d*|exit(?:ed)? (?:with )?(?:exit )?code:? [1-9]\d*|CANCELLED AT"
    r"|Job step aborted"
    r"|(?-i:\bFAILED\b)|Terminated$|Aborted|core dumped|Segmentation fault|return code = [1-9-]"
    r"|exits? with return code [1-9-]|Killing subprocess|Forcefully terminating|Traceback \(most recent call last\)"
)
_TROUBLE = re.compile(
    r"(?i)\b(?:error|fatal|critical|fail(?:ed|ure)?|cannot|could not|can't|unable to|lost|killed|aborted|crash(?:ed)?"
    r"|denied|unreachable|not responding|terminated|panic|exceeded)\b"
)
_STUCK = re.compile(r"got stuck for \d+ seconds without making progress")
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\d{4,}|\d+:\d\d:\d\d(?:\.\d+)?|(?<=rank)\d+|(?<=default)\d+")
_SECTION = re.compile(
    r"^\W*(?:(?:dmesg|kernel|journal(?:ctl)?|kern\.log|syslog)\b|.*\b(?:dmesg|journalctl|kernel ring buffer"
    r"|kernel log)\b)|^ ?(?P<rule>[-=#*+~>]{2,}) ?\w.{2,80}$",
    re.I,
)
MAX_KNOWN = 50_000


@dataclass(frozen=True, slots=True)
class Kind:
    """What a line is, by its words alone: the rule, an exception's class and strength, and marks of the log's frame."""

    rule: Rule | None
    by_type: str | None
    certain: bool
    strength: int
    good_end: bool
    bad_end: bool
    section: bool
    stuck: bool
    trouble: bool
    dismissed: bool
    """A remark about an exception (a warning, something handled), not its end."""
    origin: bool
    """The line may tell which rank runs where."""

    is_evidence: bool = False
    """The line can be a root or a cascade."""
    is_inert: bool = False
    """Such lines change nothing, whatever their numbers are."""
    is_echo: bool = False
    """Such lines are cascades that say nothing else, so it is enough to count them once there are many."""


def judge(text: str, extra_rules: tuple[Rule, ...] = (), within: str = "", after_frame: bool = False) -> Kind:
    """The kind of a line; ``within``: what the traceback's frames read, ``after_frame``: it stands after a frame."""
    rule, exceptional = _rule_of(text, extra_rules, within)
    if exceptional is None and after_frame and rule is None:
        exceptional = any_exception(text)
    by_type = exceptional.root if exceptional is not None else None
    certain = exceptional is None or exceptional.known
    generic = by_type in ("runtime_error", "os_error", "connection_error", "network_error")
    logged, handled = _LOGGED.match(text) is not None, _HANDLED.search(text) is not None
    latent = rule is not None and rule.latent
    kind = Kind(
        rule, by_type, certain, 0 if by_type is None else 44 if not certain else 48 if generic else 62,
        good_end=_ENDED_WELL.search(text) is not None, bad_end=_BAD_END.search(text) is not None,
        section=_SECTION.match(text) is not None, stuck=_STUCK.search(text) is not None,
        trouble=_TROUBLE.search(text) is not None and not handled and not logged,
        dismissed=logged and not latent and (handled or (by_type is not None and rule is None)),
        origin=OriginMap.concerns(text),
    )  # fmt: skip
    return _completed(kind)


def _completed(kind: Kind) -> Kind:
    role = kind.rule.role if kind.rule is not None else None
    is_evidence = kind.by_type is not None or role in (Role.ROOT, Role.CASCADE)
    marks = kind.good_end or kind.section or kind.stuck or kind.origin
    speaks = marks or kind.bad_end or role is Role.CONFIRMATION or (kind.trouble and role is None)
    return replace(
        kind, is_evidence=is_evidence, is_inert=not is_evidence and not speaks,
        is_echo=role is Role.CASCADE and not marks and not kind.dismissed,
    )  # fmt: skip


def _rule_of(text: str, extra_rules: tuple[Rule, ...], within: str) -> tuple[Rule | None, Exceptional | None]:
    best: Rule | None = None
    is_end = ends_a_traceback(text)
    lowered = text.lower()
    for rule in (*shipped_rules(), *extra_rules):
        if (rule.within is not None and rule.within != within) or (is_end and rule.role is Role.RECOVERED):
            continue
        if rule.may_match(lowered) and rule.matches(text):
            if rule.role in (Role.ADVICE, Role.RECOVERED, Role.CONFIRMATION):
                return rule, None
            if best is None or (rule.role is Role.ROOT, rule.strength) > (best.role is Role.ROOT, best.strength):
                best = rule
    return best, exception_of(text)


def is_alarming(text: str) -> bool:
    """Whether a line can be a root or a cascade, or is the last line of a traceback."""
    return judge(text).is_evidence


_FRAME_WORDS = ("host", "rank", "Rank", "exitcode", "NCCL")


def is_echo(text: str) -> bool:
    """Whether a line is only a cascade, advice or part of a launcher's summary, which explain nothing."""
    kind = judge(text)
    known = kind.rule is not None and kind.rule.role is not Role.ROOT and kind.by_type is None
    framed = kind.origin or any(word in text for word in _FRAME_WORDS)
    return known or framed or kind.section or text.startswith((" ", "\t", "Traceback")) or not text.strip()


@lru_cache(maxsize=1)
def _digit_bearing() -> tuple[Digits, ...]:
    return _bearing((*(rule.pattern for rule in shipped_rules()), _BAD_END.pattern, _ENDED_WELL.pattern))


def _bearing(patterns: Iterable[str]) -> tuple[Digits, ...]:
    return tuple(found for found in map(digits_of, patterns) if found is not None)


class KindCache:
    """Lines that differ only in numbers are judged once; bounded."""

    def __init__(self, extra_rules: tuple[Rule, ...] = ()) -> None:
        self._extra = extra_rules
        self._sensitive = (*_digit_bearing(), *_bearing(rule.pattern for rule in extra_rules))
        self._by_shape: dict[tuple[bytes, str, bool], Kind | None] = {}
        self._by_words: dict[tuple[str, str, bool], Kind] = {}

    def of(self, text: str, shape: bytes, within: str = "", after_frame: bool = False) -> Kind:
        """The kind of a line; ``shape`` as in :class:`~pretrain.diagnosis.reading.LogLine`, empty where unknown."""
        if not shape or len(shape) > MAX_SHAPE_BYTES:
            return self._of_words(text, within, after_frame)
        key = (without_addresses(shape), within, after_frame)
        found = self._by_shape.get(key)
        if found is None:
            if key in self._by_shape:  # a rule names digits that may stand here
                return self._of_words(text, within, after_frame)
            if len(self._by_shape) > MAX_KNOWN:
                self._by_shape.clear()
            masked = key[0].decode("ascii")
            digits_count = any(digits.matter(masked) for digits in self._sensitive)
            self._by_shape[key] = None if digits_count else judge(text, self._extra, within, after_frame)
            return self._by_shape[key] or self._of_words(text, within, after_frame)
        return found

    def known(self, shape: bytes, after_frame: bool) -> Kind | None:
        """The kind of lines of this shape (after a frame, or not) if it was judged before and digits do not matter."""
        return self._by_shape.get((without_addresses(shape), "", after_frame))

    def _of_words(self, text: str, within: str, after_frame: bool) -> Kind:
        if len(text) > MAX_SHAPE_BYTES:  # long lines are rarely alike, and many of them would fill the memory
            return judge(text, self._extra, within, after_frame)
        key = (_VARIABLE.sub("#", text), within, after_frame)
        found = self._by_words.get(key)
        if found is None:
            if len(self._by_words) > MAX_KNOWN:
                self._by_words.clear()
            found = self._by_words[key] = judge(text, self._extra, within, after_frame)
        return found
