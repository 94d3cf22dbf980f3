"""``planaria submit | run | logs | cancel | pause | resume``."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planner.cluster import connect
from planner.errors import ExitCode, MissingServiceError, WorkFailedError, one_line
from planner.events import TERMINAL, Event, JobState
from planner.files import read_json_lines
from planner.overview import event_in_words, find_named
from planner.pretrain_config import PretrainConfig
from planner.stack import start_stack, stop_stack
from planner.store import ClusterStore
from pretrain.agent_devices import find_devices
from pretrain.evaluation_wait import wait_until_evaluated
from pretrain.submission import check_slots, new_job_id, read_config

EXIT_OF = {
    JobState.DONE: ExitCode.DONE,
    JobState.FAILED: ExitCode.GIVEN_UP,
    JobState.CANCELLED: ExitCode.FAILED,
    JobState.PREEMPTED: ExitCode.PREEMPTED,
}
"""Exit code of ``--wait`` and ``run`` by the job's last state."""
ACCEPT_SECONDS = 30.0
"""How long a submitted job may take to appear in the cluster's list."""
STACK_PATIENCE = 20.0
"""Seconds that `run` and `demo` wait for their own Redis, which somebody may have taken down."""
POLL_SECONDS = 0.2


# ---------------------------------------------------------------- submit and wait


TaskCheck = Callable[[list[str], str], None]
"""Refuses unknown evaluation tasks: ``check(names, where)``, with ``where`` naming file and field."""


def submit(
    *,
    config: Path,
    overrides: list[str],
    wait: bool,
    state_dir: Path | None,
    url: str | None,
    check_tasks: TaskCheck,
) -> int:
    """``planaria submit``: prints the job id; with ``--wait`` the exit code is the job's."""
    settings = _read(config, overrides, check_tasks)
    store, _ = connect(url, state_dir)
    try:
        slots = sum(node.slots for node in store.nodes() if node.kind == "agent")
        if slots < settings.workers.min:
            raise MissingServiceError(
                f"{config}: workers.min: {settings.workers.min} ranks need as many slots, the cluster has {slots}; "
                "add a node with planaria agent, or lower workers.min"
            )
        job = send(store, settings)
        print(job, flush=True)
        if not wait:
            return ExitCode.DONE
        record = wait_for(store, job, lambda _: None)
        print(f"{job}: {record['state']}{_because(record)}", file=sys.stderr)
        return EXIT_OF[JobState(record["state"])]
    finally:
        store.close()


def _read(config: Path, overrides: list[str], check_tasks: TaskCheck) -> PretrainConfig:
    settings = read_config(config, overrides)
    if settings.evaluate.tasks:
        check_tasks(settings.evaluate.tasks, f"{config}: evaluate.tasks")
    return settings


def _because(record: Mapping[str, Any]) -> str:
    return f": {one_line(record['reason'])}" if record.get("reason") else ""


def send(store: ClusterStore, settings: PretrainConfig) -> str:
    """Hand a job to the supervisor and wait until it is in the list; a preempted one of the same config goes on.

    Raises:
        MissingServiceError: no coordinator takes it.
    """
    job = _preempted(store, settings) or new_job_id(settings.name)
    store.send_request("submit", job=job, config=settings.to_json())
    deadline = time.monotonic() + ACCEPT_SECONDS
    while True:
        record = store.job(job)
        if record is not None and record["state"] != JobState.PREEMPTED:
            return job
        if time.monotonic() > deadline:
            raise MissingServiceError(
                f"{job} was handed in, but no coordinator has taken it within {ACCEPT_SECONDS:.0f} s; "
                "start one with planaria coordinator"
            )
        time.sleep(0.05)


def _preempted(store: ClusterStore, settings: PretrainConfig) -> str | None:
    """A preempted job with this very config: submitting it again means going on with it."""
    wanted = settings.to_json()
    for job, record in store.jobs().items():
        if record.get("state") == JobState.PREEMPTED and record.get("config") == wanted:
            return job
    return None


def wait_for(store: ClusterStore, job: str, look: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Wait until a job is over; ``look`` sees each record on the way. Returns the last record."""
    while True:
        record = store.job(job)
        if record is None:
            raise WorkFailedError(f"{job}: its record is gone from the cluster")
        look(record)
        if JobState(record["state"]) in TERMINAL:
            return record
        time.sleep(POLL_SECONDS)


# ---------------------------------------------------------------- run


def run(
    *,
    config: Path,
    slots: int | None,
    state_dir: Path | None,
    overrides: list[str],
    json_output: bool,
    check_tasks: TaskCheck,
) -> int:
    """``planaria run``: up, submit, wait, down in one go. SIGTERM and SIGINT publish the state and exit 4."""
    settings = _read(config, overrides, check_tasks)
    devices = find_devices(slots)
    check_slots(settings, config, devices.slots, "this run has")
    started = time.monotonic()
    stack = start_stack(state_dir, slots=devices.slots, remember=False)
    store = ClusterStore(stack.url, stack.secret, patience=STACK_PATIENCE)
    try:
        with preemptible() as asked:
            job = send(store, settings)
            say(f"{job}: submitted, state in {stack.state_dir}")
            record = _follow(store, job, asked)
            if JobState(record["state"]) == JobState.DONE:
                _finish_evaluation(store, job, bool(settings.evaluate.tasks), asked)
            record = final_record(store, job)
    finally:
        store.close()
        stop_stack(stack.state_dir)
    document = run_document(record, time.monotonic() - started)
    if json_output:
        print(json.dumps(document))
    else:
        print(_in_words(document, record))
    return EXIT_OF[JobState(record["state"])]


def say(text: str) -> None:
    """A line for people; stdout belongs to the result."""
    print(text, file=sys.stderr, flush=True)


class Asked:
    """Whether a signal asked to stop."""

    def __init__(self) -> None:
        self.stop = False
        self.sent = False


@contextlib.contextmanager
def preemptible() -> Iterator[Asked]:
    """Turn the first SIGTERM or SIGINT into a wish to stop; a second one interrupts."""
    asked = Asked()

    def on_signal(number: int, frame: object) -> None:
        if asked.stop:
            raise KeyboardInterrupt
        asked.stop = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(store: ClusterStore, job: str, asked: Asked) -> dict[str, Any]:
    """Wait for the job's end, one line per change; a signal asks it to publish and leave."""
    last = ""

    def look(record: Mapping[str, Any]) -> None:
        nonlocal last
        if asked.stop and not asked.sent:
            asked.sent = True
            store.send_request("preempt", job=job)
        shown = _status_line(record)
        if shown != last:
            say(shown)
            last = shown

    return wait_for(store, job, look)


def _status_line(record: Mapping[str, Any]) -> str:
    """One line that changes with the state and with every tenth of the steps."""
    steps = int(record.get("steps") or 1)
    tenth = int(record["step"]) * 10 // steps * steps // 10
    return f"{record['id']}: {record['state']}, step {tenth} of {steps}{_because(record)}"


def _finish_evaluation(store: ClusterStore, job: str, evaluates: bool, asked: Asked) -> None:
    """Wait for exports, and for the evaluations that follow from them."""
    say(f"{job}: training is done; waiting for exports" + (" and evaluations" if evaluates else ""))
    wait_until_evaluated(store, job, evaluates=evaluates, stop=lambda: asked.stop)


def final_record(store: ClusterStore, job: str) -> dict[str, Any]:
    """The record once the supervisor has made its final account of the time (a few seconds at most)."""
    deadline = time.monotonic() + 5.0
    while True:
        record = store.job(job) or {}
        if record.get("accounted") or time.monotonic() > deadline:
            return record
        time.sleep(0.1)


def run_document(record: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """What ``planaria run --json`` prints."""
    return {
        "job": record["id"],
        "state": record["state"],
        "step": record["step"],
        "loss": record["loss"],
        "folder": record["folder"],
        "faults": record["faults"],
        "ettr": record["ettr"],
        "ettr_losses": record["ettr_losses"],
        "seconds": seconds,
        "reason": record.get("reason", ""),
    }


def _in_words(document: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    loss = document["loss"]
    parts = [f"{document['job']}: {document['state']}{_because(record)}"]
    parts.append(f"step {document['step']}, loss {'–' if loss is None else format(loss, '.4f')}")
    parts.append(f"{len(document['faults'])} faults")
    if document["ettr"] is not None:
        parts.append(f"ETTR {document['ettr']:.1%}")
    parts.append(f"{document['seconds']:.0f} s")
    return ", ".join(parts) + f"\n{document['folder']}"


# ---------------------------------------------------------------- cancel, pause, resume, logs


def cancel(*, job: str, state_dir: Path | None, url: str | None) -> int:
    """``planaria cancel JOB``: returns when the job is over."""
    return _ask("cancel", job, state_dir, url, TERMINAL)


def pause(*, job: str, state_dir: Path | None, url: str | None) -> int:
    """``planaria pause JOB``: returns when its state is published and its slots are given back."""
    return _ask("pause", job, state_dir, url, TERMINAL | {JobState.PAUSED})


def resume(*, job: str, state_dir: Path | None, url: str | None) -> int:
    """``planaria resume JOB``: returns when it has been put back into the queue."""
    live = frozenset(JobState) - TERMINAL - {JobState.PAUSED}
    return _ask("resume", job, state_dir, url, live)


def _ask(what: str, job: str, state_dir: Path | None, url: str | None, goal: frozenset[JobState]) -> int:
    store, _ = connect(url, state_dir)
    try:
        find_named("job", job, store.jobs())
        state = JobState((store.job(job) or {})["state"])
        if state in TERMINAL:
            raise WorkFailedError(f"{job} is {state} already: there is nothing to {what}")
        if what == "resume" and state != JobState.PAUSED:
            raise WorkFailedError(f"{job} is {state}: only a paused job can be resumed")
        store.send_request(what, job=job)
        grace = float((store.job(job) or {})["config"].get("health", {}).get("grace_seconds", 60.0))
        deadline = time.monotonic() + grace + 60.0
        while (state := JobState((store.job(job) or {})["state"])) not in goal:
            if time.monotonic() > deadline:
                raise WorkFailedError(f"{job} is still {state}; planaria status shows why")
            time.sleep(0.1)
        print(f"{job}: {state}")
        return ExitCode.DONE
    finally:
        store.close()


def logs(*, job: str, state_dir: Path | None, url: str | None) -> int:
    """``planaria logs JOB``: its events, then each rank's log, oldest incarnation first."""
    store, _ = connect(url, state_dir)
    try:
        find_named("job", job, store.jobs())
        folder = Path((store.job(job) or {})["folder"])
    finally:
        store.close()
    for line in read_json_lines(folder / "events.jsonl"):
        event = Event.from_json(line)
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
        print(f"{stamp}.{int(event.time % 1 * 1000):03d}  {event_in_words(event)}{_details(event)}")
    for path in sorted((folder / "logs").glob("*.log"), key=_log_order):
        if path.stat().st_size:
            print(f"\n==> {path.name} <==")
            sys.stdout.flush()
            with path.open("rb") as stream:
                while chunk := stream.read(1 << 16):
                    sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
    return ExitCode.DONE


def _details(event: Event) -> str:
    shown = ("step", "rank", "kind", "severity", "cause", "seconds", "path", "exit_code", "signal")
    found = [f"{key}={event.details[key]}" for key in shown if event.details.get(key) is not None]
    return f"  [{' '.join(found)}]" if found else ""


def _log_order(path: Path) -> tuple[int, int, str]:
    """``inc-<incarnation>-rank-<rank>.log`` by numbers, anything else after them."""
    parts = path.stem.split("-")
    if len(parts) == 4 and parts[1].isdigit() and parts[3].isdigit():
        return int(parts[1]), int(parts[3]), path.name
    return 1 << 30, 0, path.name
