"""Evaluate one model on a set of tasks on this machine: the Python call beside ``planaria eval``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalsched.engine import EngineSettings
from evalsched.ledger import Ledger, sqlite_url
from evalsched.models import ModelFacts
from evalsched.recording import RecordJob, check_settings, find_recording
from evalsched.runs import Run, RunSpec
from evalsched.scoring import ScoreJob, ScoreOutcome
from evalsched.task_names import refuse_unknown
from evalsched.types import EvalSettings, digest_of
from planner.cluster import state_home
from planner.errors import BadInputError, ExitCode, WorkFailedError
from planner.events import TrialState

if TYPE_CHECKING:
    from evalsched.conductor import Conductor
    from evalsched.local import LocalFleet

PRIVATE_TOKEN = 1
"""Writers of a private ledger are equals: what they write is the same whoever writes it."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far an evaluation is."""

    state: str
    share: float
    """Of the work that had to be run, 0 to 1."""
    seconds_left: float | None
    """By the pace so far; None while there is none."""
    done: int
    total: int
    """Requests."""
    workers: int
    """Workers that serve."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What an evaluation gave; ``results`` is lm-eval's table: task (or group) → metric → value."""

    results: Mapping[str, Mapping[str, Any]]
    outcome: ScoreOutcome
    path: Path
    """``results.json``; the samples lie beside it."""
    requests: int
    requests_run: int
    """How many of them were not in the ledger before."""
    seconds: float
    timings: Mapping[str, float]

    @property
    def exit_code(self) -> ExitCode:
        """0, or 1 where a task failed or strict mode found a verdict that must not be believed."""
        return self.outcome.exit_code

    def to_json(self) -> dict[str, Any]:
        """What ``planaria eval --json`` prints."""
        outcome = self.outcome.to_json()
        return {
            "results": outcome["metrics"],
            "intervals": outcome["intervals"],
            "flags": outcome["flags"],
            "untrusted": outcome["untrusted"],
            "failed": dict(self.outcome.failed),
            "path": str(self.path),
            "requests": self.requests,
            "requests_run": self.requests_run,
            "seconds": self.seconds,
            "timings": dict(self.timings),
        }


def evaluate(
    model: str | os.PathLike[str],
    tasks: Sequence[str] | str = (),
    *,
    settings: EvalSettings | None = None,
    workers: int = 1,
    output: str | os.PathLike[str] | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    engine: EngineSettings | None = None,
    progress: Callable[[Progress], None] | None = None,
    **more: Any,
) -> EvaluationResult:
    """Evaluate ``model`` on ``tasks`` and write lm-eval's files; what the ledger holds already is not run again.

    Args:
        model: folder in Hugging Face layout.
        tasks: names, or one text with commas. Ignored where ``settings`` is given.
        settings: everything that decides the numbers; else made from ``tasks`` and ``more`` (its field names).
        workers: engines on this machine.
        output: folder of ``results.json`` and ``samples_<task>.jsonl``; one below the user's state when left out.
        state_dir: where the ledger is kept; below ``output`` when left out.
        engine: engine settings, where the defaults do not fit.
        progress: called about five times a second.

    Raises:
        BadInputError: a wrong model, task or setting, or another process evaluates into the same folder.
        MissingServiceError: workers or Redis do not come up.
        WorkFailedError: nothing could be scored.
    """
    names = tuple(tasks.split(",")) if isinstance(tasks, str) else tuple(tasks)
    chosen = settings or EvalSettings(tasks=tuple(name.strip() for name in names if name.strip()), **more)
    check_settings(chosen)
    if workers < 1:
        raise BadInputError(f"workers {workers}: at least one is needed")
    folder = Path(model).expanduser().resolve()
    ModelFacts.read(folder)
    refuse_unknown(chosen.tasks, "--tasks", chosen.include_path)
    target = Path(output).expanduser().resolve() if output else default_output(folder)
    own_engine = engine or EngineSettings(exact=chosen.exact)
    spec = RunSpec(model=str(folder), settings=chosen, output=str(target), created=time.time(), engine=own_engine)
    started = time.monotonic()
    with busy_folder(target), Ledger(ledger_url(target, state_dir), PRIVATE_TOKEN) as ledger:
        run = _run(spec, ledger, workers, progress or (lambda _: None))
    return _result(run, time.monotonic() - started)


def default_output(model: Path) -> Path:
    """Where results go that nobody named a folder for."""
    return state_home() / "eval" / f"{model.name}-{digest_of(str(model))[:8]}"


def ledger_url(output: Path, state_dir: str | os.PathLike[str] | None) -> str:
    """The private ledger: in the state directory where one is named, else beside the results."""
    folder = Path(state_dir).expanduser().resolve() if state_dir else output / ".planaria"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(
            f"{folder}: cannot be made ({error.strerror}); name a folder that you may write to"
        ) from error
    if not os.access(folder, os.W_OK):
        raise BadInputError(f"{folder}: not writable; name a folder that you may write to")
    return sqlite_url(folder / "evaluation.sqlite")


@contextlib.contextmanager
def busy_folder(output: Path) -> Iterator[None]:
    """Hold the results folder: two evaluations into one folder would overwrite each other.

    Raises:
        BadInputError: it is not writable, or another process holds it.
    """
    own = output / ".planaria"
    try:
        own.mkdir(parents=True, exist_ok=True)
        stream = (own / "lock").open("w")
    except OSError as error:
        raise BadInputError(f"{output}: cannot be written ({error.strerror}); give another --output") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInputError(
                f"{output}: another evaluation writes there now; wait, or give another --output"
            ) from None
        yield


def _run(spec: RunSpec, ledger: Ledger, workers: int, progress: Callable[[Progress], None]) -> Run:
    from evalsched.local import LocalFleet

    threads = 1 if spec.engine.exact else max(1, len(os.sched_getaffinity(0)) // workers)
    with LocalFleet(workers, threads) as fleet:
        return run_to_end([spec], ledger, fleet, progress)[0]


def run_to_end(
    specs: Sequence[RunSpec],
    ledger: Ledger,
    fleet: LocalFleet,
    progress: Callable[[Progress], None] = lambda _: None,
    scorer: Callable[[ScoreJob], ScoreOutcome] | None = None,
) -> list[Run]:
    """Run evaluations on a private fleet; its workers are started only when there is work for them.

    Raises:
        PlanariaError: what ended a run before it could be scored.
    """
    from evalsched.app import make_app
    from evalsched.conductor import Conductor
    from evalsched.local import device

    if any(find_recording(RecordJob(settings=one.settings, tokenizer=one.model)) is None for one in specs):
        fleet.start()  # surely needed: they import while the requests are recorded
    app = make_app(fleet.store.url)
    conductor = Conductor(fleet.store, ledger, app, device=device(), kill_worker=fleet.kill, scorer=scorer)
    conductor.expected_workers = fleet.size
    conductor.desk.expected = fleet.running and fleet.metric
    runs = [conductor.add(spec) for spec in specs]
    try:
        while not conductor.idle:
            now = time.time()
            conductor.tick(now)
            if not fleet.running and any(run.state is TrialState.RUNNING and run.open for run in runs):
                fleet.start()
            fleet.watch(conductor, now)
            progress(_progress(runs, conductor, now))
            time.sleep(0.03)
    finally:
        conductor.close()
        app.close()
    for run in runs:
        if run.error is not None:
            raise run.error
    return runs


def _progress(runs: Sequence[Run], conductor: Conductor, now: float) -> Progress:
    run = next((one for one in runs if not one.over), runs[-1])
    share, left = run.progress(len(conductor.live()), now)
    total = len(run.prepared.open) if run.prepared else 0
    return Progress(
        state=run.state.value,
        share=share,
        seconds_left=left,
        done=total - len(run.open),
        total=total,
        workers=len(conductor.live()),
    )


def _result(run: Run, seconds: float) -> EvaluationResult:
    if run.outcome is None or run.prepared is None:
        raise WorkFailedError(f"{run.spec.model}: not evaluated: {run.reason or run.state.value}")
    return EvaluationResult(
        results=run.outcome.metrics,
        outcome=run.outcome,
        path=Path(run.outcome.results),
        requests=run.prepared.requests,
        requests_run=len(run.prepared.open),
        seconds=seconds,
        timings=run.timings,
    )
