"""The model object that takes lm-eval's requests instead of answering them. Imports lm-eval."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported; progress is the scheduler's to show

from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate

from evalsched.code_eval import uses_only_the_sandbox
from evalsched.lm_tasks import LoadingManager, simple_evaluate_arguments, task_manager
from evalsched.tokens import TokenCounter, chat_template_of
from evalsched.types import Request, digest_of, request_digest
from planner.errors import BadInputError, PlanariaError, one_line

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from evalsched.recording import RecordJob


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """What a recording keeps of a task besides its requests."""

    task: str
    documents: int
    config: str
    output_type: str
    unsafe_code: bool
    sandboxed: bool
    judged: bool
    dataset_kwargs: Any


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Everything that one recording found out."""

    requests: list[Request]
    tasks: list[TaskFacts]
    groups: dict[str, list[str]]
    names: list[str]
    tokenizer_info: dict[str, Any]


class _TakenError(Exception):
    """Leaves ``simple_evaluate`` once the requests are there: nothing is to be scored."""


class OfflineLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """What recording and replay share: a single process without a device, and the model's chat template.

    The template is applied as lm-eval's vLLM class does it: without the system turn where the template
    refuses one.
    """

    def __init__(self, tokenizer_folder: Path) -> None:
        super().__init__()
        self._folder = tokenizer_folder
        self._template_tokenizer: Any = None

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's cache keys (our runs use no such cache)."""
        return str(self._folder).replace("/", "__")

    def _templating(self) -> Any:
        if self._template_tokenizer is None:
            self._template_tokenizer = chat_template_of(self._folder)
        return self._template_tokenizer

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, for the results file."""
        template = self._templating().chat_template
        return template if isinstance(template, str) or template is None else json.dumps(template)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Turns as one prompt."""
        import jinja2

        def render(turns: list[dict[str, str]]) -> str:
            return str(
                self._templating().apply_chat_template(
                    turns,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        try:
            return render(chat_history)
        except jinja2.exceptions.TemplateError:
            logging.getLogger(__name__).warning("the chat template refuses a system turn; it is left out")
            return render([turn for turn in chat_history if turn["role"] != "system"])

    @property
    def eot_token_id(self) -> int:
        """Not needed: this object never tokenizes."""
        raise NotImplementedError

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Not needed: this object never tokenizes."""
        raise NotImplementedError

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError


class RecordingLM(OfflineLM):
    """At its first call all tasks have built their requests: it leaves ``simple_evaluate`` with them."""

    def _take(self, *_: Any, **__: Any) -> Any:
        raise _TakenError

    loglikelihood = _take
    loglikelihood_rolling = _take
    generate_until = _take


def instances_of(loaded: dict[str, Any]) -> list[tuple[str, Instance, int]]:
    """(task, instance, occurrence) of everything that was built, repeats included, in lm-eval's order."""
    found: list[tuple[str, Instance, int]] = []
    seen: Counter[tuple[str, str, int, int]] = Counter()
    for name, task in loaded["tasks"].items():
        for instance in task.instances:
            for _ in range(instance.repeats or 1):
                key = (instance.request_type, name, int(instance.doc_id), instance.idx)
                found.append((name, instance, seen[key]))
                seen[key] += 1
    return found


def _checked_arguments(name: str, instance: Instance) -> tuple[Any, ...]:
    arguments = instance.args
    wanted = 1 if instance.request_type == "loglikelihood_rolling" else 2
    if len(arguments) != wanted:
        extra = next((key for item in arguments[wanted:] if isinstance(item, dict) for key in item), "more arguments")
        raise BadInputError(f"task {name}: it sends {extra!r} with document {instance.doc_id}; only text is supported")
    for position, item in enumerate(arguments):
        if not isinstance(item, dict if position == 1 and instance.request_type == "generate_until" else str):
            raise BadInputError(
                f"task {name}: argument {position} of document {instance.doc_id} is a {type(item).__name__}, not text"
            )
    try:
        return tuple(json.loads(json.dumps(list(arguments))))
    except (TypeError, ValueError) as error:
        raise BadInputError(f"task {name}: generation settings that are no JSON: {one_line(error)}") from error


def _to_requests(loaded: dict[str, Any], counter: TokenCounter) -> list[Request]:
    rows = instances_of(loaded)
    arguments: dict[int, tuple[Any, ...]] = {}
    for name, instance, _ in rows:
        if id(instance) not in arguments:
            arguments[id(instance)] = _checked_arguments(name, instance)
    counts = counter.count([(instance.request_type, arguments[id(instance)]) for _, instance, _ in rows])
    return [
        Request(
            request_type=instance.request_type,
            task=name,
            doc_id=int(instance.doc_id or 0),
            idx=instance.idx,
            occurrence=occurrence,
            arguments=arguments[id(instance)],
            context_tokens=first,
            continuation_tokens=second,
            digest=request_digest(instance.request_type, arguments[id(instance)]),
        )
        for (name, instance, occurrence), (first, second) in zip(rows, counts, strict=True)
    ]


def task_config_digest(task: Any) -> str:
    """Digest of a task's configuration and documents, without what only says where the model lies."""
    config = {name: value for name, value in task.dump_config().items() if name != "metadata"}
    documents: dict[int, Any] = {}
    for instance in task.instances:
        if instance.doc_id not in documents:
            documents[instance.doc_id] = [instance.doc, task.doc_to_target(instance.doc)]
    return digest_of(json.loads(json.dumps([config, task.VERSION, list(documents.values())], default=_plain)))


def _plain(value: Any) -> Any:
    """What JSON cannot hold, without anything that differs between processes (addresses, set order)."""
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def _facts(name: str, task: Any) -> TaskFacts:
    return TaskFacts(
        task=name,
        documents=len({instance.doc_id for instance in task.instances}),
        config=task_config_digest(task),
        output_type=str(task.OUTPUT_TYPE),
        unsafe_code=bool(getattr(task, "UNSAFE_CODE", False)),
        sandboxed=(task.get_config("metadata") or {}).get("sandbox") == "planaria" or uses_only_the_sandbox(task),
        judged=bool((task.get_config("metadata") or {}).get("judge")),
        dataset_kwargs=task.get_config("dataset_kwargs"),
    )


def record_requests(job: RecordJob) -> Recorded:
    """Let lm-eval build all requests of ``job``.

    Raises:
        BadInputError: a task is unknown, cannot be loaded, or asks for more than text.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, names = task_manager(job.settings, job.metadata, LoadingManager)
    model = RecordingLM(Path(job.tokenizer))
    try:
        simple_evaluate(
            model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **simple_evaluate_arguments(job.settings)
        )
    except _TakenError:
        pass
    except AssertionError as error:
        raise BadInputError(f"--samples: {one_line(error)}") from error
    except PlanariaError:
        raise
    except Exception as error:  # whatever a task's own code raises
        what = f"{type(error).__name__}: {one_line(error)[:300]}"
        raise BadInputError(f"--tasks {','.join(names)}: lm-eval cannot build the requests ({what})") from error
    return _recorded(manager, names, job)


def _recorded(manager: LoadingManager, names: Sequence[str], job: RecordJob) -> Recorded:
    loaded = manager.loaded
    counter = TokenCounter(Path(job.tokenizer))
    return Recorded(
        requests=_to_requests(loaded, counter),
        tasks=[_facts(name, task) for name, task in loaded["tasks"].items()],
        groups={name: list(members) for name, members in loaded.get("group_map", {}).items()},
        names=list(names),
        tokenizer_info=counter.info(),
    )
