"""Metrics that ask another model: an OpenAI-compatible endpoint judges answers, on CPU, never on a lease.

A task's ``utils.py`` makes a :class:`JudgeTask` and its YAML names the two functions::

    from evalsched.judge import JudgeTask
    judged = JudgeTask("helpfulness", template="Question: {question}\\nAnswer: {answer}\\nRate it … [[1]] to [[10]].",
                       low=1, high=10)
    judge, judge_score = judged.filter, judged.score

    filter_list: [{name: judge, filter: [{function: custom, filter_fn: !function utils.judge}]}]
    process_results: !function utils.judge_score
    metric_list: [{metric: judge, aggregation: mean, higher_is_better: true}]
    metadata: {judge: true}

The endpoint is set by the environment (:class:`JudgeSettings`). Every verdict is appended to a file as it comes and
goes from there into the ledger, so that neither a killed scoring nor another one of the same answers pays twice; the
prompts stay beside the results (``judge_<task>.jsonl``). Where the budget is spent, or the endpoint refuses for good,
the task fails with the reason and the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evalsched.types import digest_of
from planner.errors import BadInputError, PlanariaError, WorkFailedError, one_line

PATTERN = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
"""How a verdict is found in a reply: the last match counts."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """The endpoint and its bounds, from ``PLANARIA_JUDGE_…``."""

    url: str
    """``PLANARIA_JUDGE_URL``: base of the API, such as ``http://host:8000/v1``."""
    model: str
    """``PLANARIA_JUDGE_MODEL``."""
    key: str = field(default="none", repr=False)
    """``PLANARIA_JUDGE_KEY`` (else ``OPENAI_API_KEY``); never written anywhere."""
    requests_per_minute: float = 600.0
    """``PLANARIA_JUDGE_RPM``."""
    budget_tokens: int = 2_000_000
    """``PLANARIA_JUDGE_BUDGET``: tokens, read and written, that one scoring may spend."""
    concurrent: int = 8
    """``PLANARIA_JUDGE_CONCURRENT``: requests that are out at a time."""
    retries: int = 5
    """Of one request after a refusal for the moment (429, 5xx, a broken connection), by the client with back-off."""
    timeout: float = 60.0
    """Seconds (``PLANARIA_JUDGE_TIMEOUT``)."""
    max_tokens: int = 512
    """Of a reply."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> JudgeSettings:
        """The settings that the environment names.

        Raises:
            BadInputError: no endpoint or model is named, or a number is none.
        """

        def named(name: str) -> str | None:
            return environment.get(f"PLANARIA_JUDGE_{name}")

        url, model = named("URL"), named("MODEL")
        if not url or not model:
            raise BadInputError(
                "judge: set PLANARIA_JUDGE_URL and PLANARIA_JUDGE_MODEL to an OpenAI-compatible endpoint"
            )
        more: dict[str, Any] = {}
        for name, place, kind in (
            ("RPM", "requests_per_minute", float), ("BUDGET", "budget_tokens", int),
            ("CONCURRENT", "concurrent", int), ("TIMEOUT", "timeout", float),
        ):  # fmt: skip
            if (text := named(name)) is not None:
                try:
                    more[place] = kind(text)
                except ValueError:
                    raise BadInputError(f"PLANARIA_JUDGE_{name}: {text!r} is no number") from None
                if not more[place] > 0:
                    raise BadInputError(f"PLANARIA_JUDGE_{name}: {text} is not above 0")
        key = named("KEY") or environment.get("OPENAI_API_KEY") or "none"
        return cls(url=url, model=model, key=key, **more)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a judge said to one prompt."""

    key: str
    """Digest of everything that decides the reply: model, prompt, settings."""
    task: str
    model: str
    prompt: str
    reply: str
    tokens: int
    """Read and written."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal value."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """The verdict that :meth:`to_json` wrote."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


class Pace:
    """Lets calls through at a bounded rate, one slot after the other."""

    def __init__(
        self,
        per_minute: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gap = 60.0 / per_minute
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self) -> None:
        """Until this call may be made."""
        with self._lock:
            now = self._clock()
            at = max(now, self._next)
            self._next = at + self._gap
        if at > now:
            self._sleep(at - now)


class Judge:
    """Asks the endpoint, within its bounds, and remembers.

    Args:
        settings: the endpoint.
        known: verdicts of earlier scorings by key.
        keep: called with each new verdict, one at a time.
        client: an ``openai.OpenAI``; made when left out.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        known: Mapping[str, Verdict] | None = None,
        keep: Callable[[Verdict], None] = lambda _: None,
        client: Any = None,
    ) -> None:
        self.settings = settings
        self._known = dict(known or {})
        self._keep = keep
        self._client = client
        self._pace = Pace(settings.requests_per_minute)
        self._lock = threading.Lock()
        self.spent = 0
        """Tokens of this scoring."""
        self.asked = 0
        self.from_cache = 0

    def close(self) -> None:
        """Close the connections to the endpoint."""
        if self._client is not None:
            self._client.close()

    def key(self, prompt: str) -> str:
        """What a verdict is remembered under."""
        return digest_of([self.settings.model, self.settings.max_tokens, prompt])

    def ask(self, task: str, prompts: Sequence[str]) -> list[Verdict]:
        """A verdict per prompt, in order; equal prompts are asked once.

        Raises:
            WorkFailedError: the budget is spent, or the endpoint refuses; what was answered is kept.
        """
        missing = [prompt for prompt in dict.fromkeys(prompts) if self.key(prompt) not in self._known]
        self.from_cache += len(prompts) - len(missing)
        with ThreadPoolExecutor(max_workers=self.settings.concurrent) as pool:
            found = [pool.submit(self._one, task, prompt) for prompt in missing]
            problems = [problem for one in found if (problem := one.exception()) is not None]
        if problems:
            raise problems[0]
        return [self._known[self.key(prompt)] for prompt in prompts]

    def _one(self, task: str, prompt: str) -> None:
        with self._lock:
            if self.spent >= self.settings.budget_tokens:
                raise WorkFailedError(
                    f"judge: its budget of {self.settings.budget_tokens:,} tokens is spent; raise "
                    "PLANARIA_JUDGE_BUDGET and retry, what was judged is kept"
                )
            client = self._client = self._client or _client(self.settings)
        self._pace.wait()
        reply, tokens = self._call(client, prompt)
        verdict = Verdict(
            key=self.key(prompt), task=task, model=self.settings.model, prompt=prompt, reply=reply, tokens=tokens
        )
        with self._lock:
            self.spent += tokens
            self.asked += 1
            self._known[verdict.key] = verdict
            self._keep(verdict)

    def _call(self, client: Any, prompt: str) -> tuple[str, int]:
        import openai

        try:
            answer = client.chat.completions.create(
                model=self.settings.model,
                messages=[{"role": "user", "content": prompt}],
                temperature=0.0,
                seed=1234,
                max_tokens=self.settings.max_tokens,
            )
            text = answer.choices[0].message.content or ""
            used = answer.usage.total_tokens if answer.usage else (len(prompt) + len(text)) // 4
        except openai.OpenAIError as error:
            raise WorkFailedError(f"judge {self.settings.url}: {one_line(error)[:300]}") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            raise WorkFailedError(
                f"judge {self.settings.url}: its answer has no choices ({one_line(error)})"
            ) from error
        return str(text), int(used)


def _client(settings: JudgeSettings) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=settings.url, api_key=settings.key, max_retries=settings.retries, timeout=settings.timeout)


# ---------------------------------------------------------------- tasks


class UnjudgedError(RuntimeError):
    """A task's answers could not be judged."""


@dataclass(frozen=True)
class JudgeTask:
    """How a task's answers are judged.

    ``name``: the task's own name, under which verdicts are kept. ``template``: the prompt, with the document's fields
    and ``{answer}`` in braces. ``low`` and ``high`` are the ends of the judge's scale; scores are told from 0 to 1.
    """

    name: str
    template: str
    low: float = 0.0
    high: float = 1.0
    pattern: str = PATTERN

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"judge {self.name}: the scale {self.low} to {self.high} is empty")

    def prompt(self, doc: Mapping[str, Any], answer: str) -> str:
        """The prompt for one answer."""
        # Not str.format: answers and documents hold braces of their own.
        fields = {**{str(name): str(value) for name, value in doc.items()}, "answer": answer}
        return re.sub(r"\{(\w+)\}", lambda found: fields.get(found[1], found[0]), self.template)

    def read(self, reply: str) -> float | None:
        """The score from 0 to 1; None where the reply has none."""
        found = re.findall(self.pattern, reply)
        if not found:
            return None
        value = (float(found[-1]) - self.low) / (self.high - self.low)
        return value if 0.0 <= value <= 1.0 else None

    def filter(self, resps: Iterable[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[float | None]]:
        """lm-eval filter: from answers to scores."""
        groups = [list(group) for group in resps]
        prompts = [self.prompt(doc, one) for group, doc in zip(groups, docs, strict=True) for one in group]
        session = current()
        try:
            verdicts = session.judge.ask(self.name, prompts)
        except PlanariaError as error:  # this task's alone: the others are scored
            raise UnjudgedError(one_line(error)) from error
        scores = [self.read(verdict.reply) for verdict in verdicts]
        session.note(self.name, verdicts, scores)
        left = iter(scores)
        return [[next(left) for _ in group] for group in groups]

    def score(self, doc: Mapping[str, Any], results: Sequence[Sequence[float | None]]) -> dict[str, float]:
        """lm-eval's ``process_results``: the mean over a document's answers; a document without a verdict has none."""
        known = [one for one in results[0] if one is not None]
        return {"judge": sum(known) / len(known)} if known else {}


# ---------------------------------------------------------------- a scoring


class Session:
    """One scoring's judge, with what it keeps beside the results.

    Args:
        output: the results' folder.
        known: file of verdicts that the ledger holds.
        keep: where new verdicts go; ``output`` when left out.
    """

    def __init__(self, output: Path, known: Path | None = None, keep: Path | None = None) -> None:
        self._output = output
        self._fresh = new_verdicts(keep or output)
        self._known = known
        self._judge: Judge | None = None
        self._notes: dict[str, dict[str, Any]] = {}

    @property
    def judge(self) -> Judge:
        """Made when a task first asks.

        Raises:
            BadInputError: no endpoint is set.
        """
        if self._judge is None:
            known = {one.key: one for path in (self._known, self._fresh) for one in read_verdicts(path)}
            self._judge = Judge(JudgeSettings.from_environment(), known, self._keep)
        return self._judge

    def _keep(self, verdict: Verdict) -> None:
        with self._fresh.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(verdict.to_json()) + "\n")

    def note(self, task: str, verdicts: Sequence[Verdict], scores: Sequence[float | None]) -> None:
        """Prompts and replies stay beside the results, for the report."""
        with (self._output / f"judge_{task}.jsonl").open("w", encoding="utf-8") as stream:
            for verdict, score in zip(verdicts, scores, strict=True):
                stream.write(json.dumps({"prompt": verdict.prompt, "reply": verdict.reply, "score": score}) + "\n")
        unreadable = sum(score is None for score in scores)
        self._notes[task] = {
            "answers": len(scores),
            "unreadable": unreadable,
            "model": verdicts[0].model if verdicts else "",
        }

    def close(self) -> None:
        """Write the summary that the report shows."""
        if self._judge is not None:
            judge, fresh = self._judge, read_verdicts(self._fresh)
            judge.close()
            answers = sum(facts["answers"] for facts in self._notes.values())
            found = {
                "tasks": self._notes, "asked": len(fresh), "from_cache": max(0, answers - len(fresh)),
                "tokens": sum(one.tokens for one in fresh), "budget": judge.settings.budget_tokens,
                "endpoint": judge.settings.url,
            }  # fmt: skip
            (self._output / SUMMARY).write_text(json.dumps(found, indent=2) + "\n")


SUMMARY = "judge.json"
_sessions: list[Session] = []


def current() -> Session:
    """The session of the scoring that is under way.

    Raises:
        WorkFailedError: none is.
    """
    if not _sessions:
        raise WorkFailedError("judge: a judged task is scored by planaria eval, not by lm-eval alone")
    return _sessions[-1]


@contextlib.contextmanager
def judging(output: Path, known: Path | None, keep: Path | None = None) -> Iterator[Session]:
    """Open a session for the scoring inside."""
    session = Session(output, known, keep)
    _sessions.append(session)
    try:
        yield session
    finally:
        _sessions.remove(session)
        session.close()


def new_verdicts(output: Path) -> Path:
    """Where a scoring puts verdicts that the ledger has not."""
    return output / ".verdicts.jsonl"


def read_verdicts(path: Path | None) -> list[Verdict]:
    """Verdicts of a file; a line that was cut off by a death is left out."""
    found: list[Verdict] = []
    if path is None or not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found.append(Verdict.from_json(json.loads(line)))
    return found
