"""The scheduler alone: a million requests cut into shards, fed, collected into the ledger, with stub workers."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from evalsched.app import make_app
from evalsched.conductor import Conductor
from evalsched.ledger import Ledger, sqlite_url
from evalsched.local import LocalFleet
from evalsched.recording import RecordedTask, Recording, RecordJob
from evalsched.runs import Identified, Prepared, RunSpec, prepare
from evalsched.types import EvalSettings, Request, request_digest
from planner.events import TrialState
from tests.bench.figures import Figure

WORKERS = 2
_WRITE_MODEL = """
import sys, pathlib
from tests.support.tiny_model import write_model
write_model(pathlib.Path(sys.argv[1]))
"""
TASKS = 20


def measure(quick: bool) -> list[Figure]:
    """Seconds from the recording on disk to the last response in the ledger, and this process's peak memory."""
    count = 50_000 if quick else 1_000_000
    folder = Path(tempfile.mkdtemp(prefix="planaria-bench-"))
    try:
        seconds, memory, answered = _run(folder, count)
        processor = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert answered == count, f"{answered} of {count} requests were answered"
    scaled = count / 1_000_000
    return [
        Figure(
            name=f"scheduler alone, {count:,} requests with {WORKERS} stub workers", value=seconds, unit="s",
            bar=f"under {60 * scaled:.0f} s", reached=seconds < 60 * scaled,
            note=f"{processor.ru_utime + processor.ru_stime:.0f} s of processor time in the scheduler",
        ),
        Figure(
            name="the scheduler's peak memory meanwhile", value=memory / 2**30, unit="GiB", bar="under 2 GiB",
            reached=memory < 2 << 30,
        ),
    ]  # fmt: skip


def _run(folder: Path, count: int) -> tuple[float, int, int]:
    model = folder / "model"
    # In a process of its own: what writes it imports torch, whose memory is not the scheduler's.
    subprocess.run([sys.executable, "-c", _WRITE_MODEL, str(model)], check=True, stdout=subprocess.DEVNULL)
    recording = _recording(folder / "recording", count)
    os.environ["STUB_PLAIN"] = "1"  # the workers' own work is not measured
    program = (sys.executable, "-m", "tests.support.stub_worker")
    spec = RunSpec(
        model=str(model), settings=EvalSettings(tasks=("made",)), output=str(folder / "out"), created=time.time(),
        target_seconds=30.0,
    )  # fmt: skip
    with LocalFleet(WORKERS, 1, program, metric=False) as fleet, Ledger(sqlite_url(folder / "l.sqlite"), 1) as ledger:
        fleet.start()
        conductor = _Conductor(fleet.store, ledger, make_app(fleet.store.url), recording)
        while len(conductor.live()) < WORKERS:
            conductor.tick(time.time())
            time.sleep(0.05)
        began = time.monotonic()
        run = conductor.add(spec)
        while run.state is not TrialState.SCORING and not run.over:
            conductor.tick(time.time())
            time.sleep(0.01)
        seconds = time.monotonic() - began
        conductor.close()
        if run.error is not None:
            raise run.error
        answered = sum(trial.responses for trial in ledger.trials())
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, answered


class _Conductor(Conductor):
    """With a recording that is there already: lm-eval's own time is not the scheduler's."""

    def __init__(self, store: object, ledger: Ledger, app: object, recording: Recording) -> None:
        super().__init__(store, ledger, app)  # type: ignore[arg-type]
        self._given = recording

    def _prepare(self, spec: RunSpec, model: Identified) -> Prepared:
        def given(_: RecordJob) -> Recording:
            return self._given

        return prepare(spec, model, self.ledger, given)


def _recording(folder: Path, count: int) -> Recording:
    """``count`` multiple-choice requests over 20 tasks."""
    folder.mkdir()
    tasks = [f"task_{number}" for number in range(TASKS)]
    per_task = count // TASKS
    with (folder / "requests.jsonl").open("w") as stream:
        for task in tasks:
            for number in range(per_task):
                arguments = (f"{task}: question {number // 4}, which is it?", f" choice {number % 4}")
                request = Request(
                    request_type="loglikelihood", task=task, doc_id=number // 4, idx=number % 4, occurrence=0,
                    arguments=arguments, context_tokens=40, continuation_tokens=9,
                    digest=request_digest("loglikelihood", arguments),
                )  # fmt: skip
                stream.write(json.dumps(request.to_json()) + "\n")
    recorded = tuple(
        RecordedTask(
            task=task, requests=per_task, documents=per_task // 4, digest=task, config="c",
            output_type="multiple_choice", unsafe_code=False,
        )
        for task in tasks
    )  # fmt: skip
    return Recording(
        folder=folder,
        key="bench",
        tasks=recorded,
        groups={},
        names=tuple(tasks),
        inputs={},
        tokenizer_info={},
        seconds=0.0,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for figure in measure("--full" not in sys.argv):
        print(figure)
