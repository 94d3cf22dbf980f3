"""Recording: every lm-eval request of every task, built once by lm-eval's own code, on CPU.

``simple_evaluate`` runs with a model object that takes the requests instead of answering them. Requests
must never be built shard by shard: the few-shot generator is one stream over the documents, and a second
half built alone shares no prompt with the full run.

The scheduler never imports lm-eval: it calls :func:`record_in_subprocess`, which looks into the cache
first and runs ``python -m evalsched.recording`` only when there is nothing to be found.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from evalsched.digests import FileHashes, cache_folder, task_files_digest, tokenizer_digest
from evalsched.types import EvalSettings, Request, digest_of
from planner import quick_json
from planner.errors import BadInputError, ExitCode, PlanariaError, WorkFailedError, one_line
from planner.files import write_json
from planner.processes import die_with_parent

FORMAT = 3
_DESCRIPTION = "recording.json"
_REQUESTS = "requests.jsonl"
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


# ---------------------------------------------------------------- what a recording is


@dataclass(frozen=True, kw_only=True)
class RecordedTask:
    """One task of a recording."""

    task: str
    requests: int
    documents: int
    digest: str
    """Digest of the identities and contents of its requests."""
    config: str
    """Digest of its configuration and of its documents, targets included: what else its scores depend on."""
    output_type: str
    unsafe_code: bool
    """Its metric runs code that the model wrote."""
    sandboxed: bool = False
    """It runs that code in our sandbox: its ``metadata`` says ``sandbox: planaria``, or it does so by ``code_eval``."""
    judged: bool = False
    """Another model judges its answers (``metadata: {judge: true}``): their verdicts can be kept."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The recorded requests of a set of tasks, in a folder of the cache."""

    folder: Path
    key: str
    tasks: tuple[RecordedTask, ...]
    groups: Mapping[str, tuple[str, ...]]
    """Members (tasks and groups) of each group that was asked for, directly or below another."""
    names: tuple[str, ...]
    """The names asked for, patterns expanded."""
    inputs: Mapping[str, str]
    """Files that the tasks read, with their hashes: a change of any makes the recording stale."""
    tokenizer_info: Mapping[str, Any]
    """Special tokens, as lm-eval writes them into its results."""
    seconds: float

    def requests(self) -> list[Request]:
        """All requests, in lm-eval's order."""
        with (self.folder / _REQUESTS).open("rb") as stream:
            return [Request.from_json(quick_json.loads(line)) for line in stream]

    def task(self, name: str) -> RecordedTask:
        """The record of one task.

        Raises:
            KeyError: it is not in this recording.
        """
        return next(task for task in self.tasks if task.task == name)


@dataclass(frozen=True, kw_only=True)
class RecordJob:
    """What to record: JSON in, so that it crosses a process boundary."""

    settings: EvalSettings
    tokenizer: str
    """Folder of the model whose tokenizer and chat template are used."""

    def to_json(self) -> dict[str, Any]:
        """The document that ``python -m evalsched.recording`` reads."""
        return {"settings": self.settings.to_json(), "tokenizer": self.tokenizer}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordJob:
        """The job that :meth:`to_json` wrote."""
        return cls(settings=EvalSettings.from_json(data["settings"]), tokenizer=str(data["tokenizer"]))

    @property
    def metadata(self) -> dict[str, Any]:
        """What lm-eval's command hands to tasks as metadata."""
        return {"pretrained": self.tokenizer}


# ---------------------------------------------------------------- the cache


_SCORING_ONLY = ("strict", "exact", "allow_unsafe_code", "bootstrap_iters")


def recording_key(job: RecordJob, hashes: FileHashes) -> str:
    """Digest of all that decides the requests and is known before they are built."""
    settings = {name: value for name, value in job.settings.to_json().items() if name not in _SCORING_ONLY}
    from evalsched.benchmarks import prepared_folder

    folders = [prepared_folder(), *(Path(folder) for folder in job.settings.include_path)]
    trees = [task_files_digest(folder, hashes) for folder in folders if folder.is_dir()]
    yaml_files = [
        hashes.of(Path(name))
        for name in job.settings.tasks
        if name.endswith((".yaml", ".yml")) and Path(name).is_file()
    ]
    return digest_of(
        {
            "format": FORMAT,
            "settings": settings,
            "tokenizer": tokenizer_digest(Path(job.tokenizer), hashes),
            "trees": trees + yaml_files,
            "lm_eval": version("lm_eval"),
            "planaria": version("planaria"),
            "datasets": version("datasets"),
            "python": sys.version,
        }
    )


def load_recording(folder: Path) -> Recording:
    """The recording in a folder of the cache.

    Raises:
        BadInputError: there is none, or it is of another format.
    """
    path = folder / _DESCRIPTION
    try:
        data = json.loads(path.read_text())
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        data["tasks"] = tuple(RecordedTask(**task) for task in data["tasks"])
        data["groups"] = {name: tuple(members) for name, members in data["groups"].items()}
        data["names"] = tuple(data["names"])
        return Recording(folder=folder, **data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path}: no recording ({one_line(error)})") from error


def find_recording(job: RecordJob, root: Path | None = None) -> Recording | None:
    """The recording of ``job`` in the cache, if there is one and nothing that its tasks read has changed."""
    hashes = FileHashes()
    folder = (root or recordings_folder()) / recording_key(job, hashes)
    try:
        recording = load_recording(folder)
        fresh = all(Path(path).is_file() and hashes.of(Path(path)) == seen for path, seen in recording.inputs.items())
    except (BadInputError, OSError):
        return None
    finally:
        hashes.save()
    return recording if fresh else None


def recordings_folder() -> Path:
    """Where recordings are kept."""
    return cache_folder() / "recordings"


def record_in_subprocess(job: RecordJob, *, timeout: float = 3600.0) -> Recording:
    """The recording of ``job``, from the cache or made by a subprocess without a GPU.

    Raises:
        BadInputError: a task is unknown or cannot be loaded, its data is missing, a limit is wrong.
        WorkFailedError: the subprocess failed otherwise, or took longer than ``timeout`` seconds.
    """
    check_settings(job.settings)
    if found := find_recording(job):
        return found
    return load_recording(Path(run_module("evalsched.recording", job.to_json(), timeout)["folder"]))


def run_module(module: str, job: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """Run ``python -m module`` with ``job`` as JSON on stdin; its last line on stdout is the result as JSON.

    Raises:
        PlanariaError: of the class that belongs to its exit code, with its last line on stderr.
    """
    environment = os.environ | OFFLINE | {"CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", module, str(os.getpid())]
    try:
        done = subprocess.run(
            command, input=json.dumps(job).encode(), capture_output=True, timeout=timeout, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise WorkFailedError(f"{module}: not finished after {timeout:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        classes = {int(kind.exit_code): kind for kind in (BadInputError, WorkFailedError)}
        raise classes.get(done.returncode, WorkFailedError)(lines[-1].removeprefix("planaria: "))
    return json.loads(done.stdout.decode().strip().splitlines()[-1])  # type: ignore[no-any-return]


def check_settings(settings: EvalSettings) -> None:
    """Refuse what lm-eval would take in silence and mean something else by.

    Raises:
        BadInputError: one line naming the option, its value and what to do.
    """
    limit = settings.limit
    if limit is not None and not (0 < limit < float("inf")):
        raise BadInputError(f"--limit {limit:g}: a count from 1 on, or a fraction between 0 and 1, is needed")
    if limit is not None and settings.samples is not None:
        raise BadInputError("--limit and --samples: give one of them, they exclude each other")
    if limit is not None and limit > 1 and limit != int(limit):
        raise BadInputError(f"--limit {limit:g}: a count must be a whole number")
    for task, ids in (settings.samples or {}).items():
        if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise BadInputError(
                f"--samples {task}: a list of document numbers from 0 on is needed, found {list(ids)!r}"
            )
    if settings.num_fewshot is not None and settings.num_fewshot < 0:
        raise BadInputError(f"--num-fewshot {settings.num_fewshot}: 0 or more is needed")
    if settings.fewshot_as_multiturn and not settings.apply_chat_template:
        raise BadInputError("--fewshot-as-multiturn: it needs --apply-chat-template")


# ---------------------------------------------------------------- recording itself (imports lm-eval)


class _InputWatch:
    """Notes every file that Python opens for reading while tasks are loaded, through an audit hook.

    A hook cannot be taken away again, so there is one per process, which listens only while tasks are loaded.
    """

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self._on = False
        self._installed = False

    def __enter__(self) -> _InputWatch:
        self.paths = set()
        if not self._installed:
            sys.addaudithook(self._saw)
            self._installed = True
        self._on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._on or event != "open" or not isinstance(arguments[0], str):
            return
        mode = arguments[1]
        if mode is None or not any(letter in mode for letter in "wax+"):
            self.paths.add(arguments[0])


_WATCH = _InputWatch()

LM_EVAL = threading.Lock()
"""Held while lm-eval runs: it seeds and draws from the process's random generators."""

_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_SYSTEM = frozenset({"proc", "sys", "dev", "etc"})


def _is_input(path: Path) -> bool:
    """Whether a file that was opened is data or a task's code, not a library (whose version is in the key)."""
    if path.suffix in (".pyc", ".so", ".lock") or (path.parts[1:2] and path.parts[1] in _SYSTEM):
        return False
    return not _LIBRARIES.intersection(path.parts)


def _input_hashes(opened: Iterable[str], named: Iterable[str], tokenizer: Path) -> dict[str, str]:
    hashes = FileHashes()
    ours = {Path(name).resolve() for name in named}
    found: dict[str, str] = {}
    for path in sorted({Path(name).resolve() for name in opened if _is_input(Path(name).resolve())} | ours):
        if path.is_file() and tokenizer not in path.parents:  # the tokenizer's digest is in the key
            found[str(path)] = hashes.of(path)
    hashes.save()
    return found


def _named_files(value: Any) -> Iterator[str]:
    """Every existing file that a task's ``dataset_kwargs`` name."""
    if isinstance(value, str):
        if os.path.isfile(value):
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _named_files(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _named_files(item)


def record(job: RecordJob, root: Path | None = None) -> Recording:
    """Record in this process, and keep the result in the cache.

    Raises:
        BadInputError: as :func:`record_in_subprocess`.
    """
    from evalsched.lm_recording import record_requests

    check_settings(job.settings)
    started = time.monotonic()
    hashes = FileHashes()
    key = recording_key(job, hashes)
    hashes.save()
    with LM_EVAL, _WATCH as watch:
        recorded = record_requests(job)
    base = root or recordings_folder()
    base.mkdir(parents=True, exist_ok=True)
    tidy(base, time.time())
    by_task: dict[str, list[Any]] = {task.task: [] for task in recorded.tasks}
    for request in recorded.requests:
        by_task[request.task].append([*request.id, request.digest])
    tasks = [
        RecordedTask(
            task=task.task,
            requests=len(by_task[task.task]),
            documents=task.documents,
            digest=digest_of(by_task[task.task]),
            config=task.config,
            output_type=task.output_type,
            unsafe_code=task.unsafe_code,
            sandboxed=task.sandboxed,
            judged=task.judged,
        )
        for task in recorded.tasks
    ]
    named = [name for task in recorded.tasks for name in _named_files(task.dataset_kwargs)]
    description = {
        "format": FORMAT,
        "key": key,
        "tasks": [asdict(task) for task in tasks],
        "groups": recorded.groups,
        "names": recorded.names,
        "inputs": _input_hashes(watch.paths, named, Path(job.tokenizer).resolve()),
        "tokenizer_info": recorded.tokenizer_info,
        "seconds": time.monotonic() - started,
    }
    return load_recording(_keep(base, key, description, recorded.requests))


KEPT_RECORDINGS = 500
_ABANDONED_SECONDS = 3600.0


def tidy(base: Path, now: float) -> None:
    """Drop what a killed recording left behind, and the oldest recordings beyond :data:`KEPT_RECORDINGS`."""
    ages: list[tuple[float, Path]] = []
    for folder in base.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process tidies too
            age = now - folder.stat().st_mtime
            if not folder.name.startswith("."):
                ages.append((age, folder))
            elif age > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
    for _, folder in sorted(ages)[KEPT_RECORDINGS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _keep(base: Path, key: str, description: Mapping[str, Any], requests: Iterable[Request]) -> Path:
    """Put a recording into the cache in one rename; of two made at once, either stands."""
    folder = base / key
    temporary = Path(tempfile.mkdtemp(dir=base, prefix=f".{key}."))
    try:
        with (temporary / _REQUESTS).open("w", encoding="utf-8") as stream:
            for request in requests:
                stream.write(json.dumps(request.to_json()) + "\n")
        write_json(temporary / _DESCRIPTION, description)
        while True:
            try:
                temporary.rename(folder)
                return folder
            except OSError:  # an older one stands there: out of the way, then again
                old = Path(tempfile.mkdtemp(dir=base, prefix=f".old.{key}."))
                try:
                    folder.rename(old / "old")
                except FileNotFoundError:
                    pass
                finally:
                    shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> int:
    """Read a job as JSON on stdin, record it, print ``{"folder": …}``; errors are one line and an exit code."""
    end_with_owner()
    job = RecordJob.from_json(json.load(sys.stdin))
    with stdout_to_stderr():
        try:
            recording = record(job)
        except PlanariaError as error:
            print(f"planaria: {one_line(error)}", file=sys.stderr)
            return int(error.exit_code)
    print(json.dumps({"folder": str(recording.folder)}))
    return int(ExitCode.DONE)


def end_with_owner() -> None:
    """End when the process that :func:`run_module` was called in ends, whose id is the first argument."""
    if sys.argv[1:]:
        die_with_parent(int(sys.argv[1]))


class stdout_to_stderr:
    """What tasks print must not mix with the result."""

    def __enter__(self) -> None:
        self._saved = sys.stdout
        sys.stdout = sys.stderr

    def __exit__(self, *_: object) -> None:
        sys.stdout = self._saved


if __name__ == "__main__":
    sys.exit(main())
