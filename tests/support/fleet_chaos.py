"""Kills workers, conductors and Redis connections at random while runs are worked off, then counts the answers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from evalsched.app import make_app
from evalsched.conductor import Conductor
from evalsched.ledger import Ledger, sqlite_url
from evalsched.recording import RecordedTask, Recording, RecordJob
from evalsched.runs import Identified, Prepared, RunSpec, prepare
from evalsched.scoring import ScoreJob, ScoreOutcome
from evalsched.types import EvalSettings, Request, request_digest
from planner.auth import new_secret
from planner.errors import FencedError, MissingServiceError
from planner.files import write_json
from planner.redis_server import start_redis
from planner.store import ClusterStore
from tests.support.hash_lm import respond
from tests.support.redis import end_server

TASKS = ("first", "second", "third", "fourth")
PATIENCE = 30.0


@dataclass(kw_only=True)
class ChaosResult:
    """What was done and what came out."""

    kills: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    answered: int = 0
    wrong: int = 0
    """Answers that are not those of an undisturbed run."""
    failed: int = 0
    """Runs with a task that was given up: the same shard was killed three times without an answer."""
    seconds: float = 0.0


# ---------------------------------------------------------------- what a conductor's process does


def recording_of(folder: Path, number: int, requests: int) -> Recording:
    """The requests of run ``number``: written once, found by every conductor."""
    path = folder / f"recording-{number}"
    per_task = requests // len(TASKS)
    if not (path / "requests.jsonl").is_file():
        path.mkdir(exist_ok=True)
        lines = []
        for task in TASKS:
            for doc in range(per_task):
                arguments = (f"run {number}, {task}: question {doc}", f" answer {doc}")
                request = Request(
                    request_type="loglikelihood", task=task, doc_id=doc, idx=0, occurrence=0, arguments=arguments,
                    context_tokens=20, continuation_tokens=3, digest=request_digest("loglikelihood", arguments),
                )  # fmt: skip
                lines.append(json.dumps(request.to_json()))
        (path / "requests.tmp").write_text("\n".join(lines) + "\n")
        (path / "requests.tmp").rename(path / "requests.jsonl")
    tasks = tuple(
        RecordedTask(
            task=task, requests=per_task, documents=per_task, digest=f"{task}-{number}", config="c",
            output_type="multiple_choice", unsafe_code=False,
        )
        for task in TASKS
    )  # fmt: skip
    return Recording(
        folder=path, key=str(number), tasks=tasks, groups={}, names=TASKS, inputs={}, tokenizer_info={}, seconds=0.0
    )


class _Conductor(Conductor):
    """Its recordings are there already."""

    def _prepare(self, spec: RunSpec, model: Identified) -> Prepared:
        number = int(Path(spec.output).name)
        found = recording_of(Path(spec.output).parent, number, int(os.environ["FLEET_REQUESTS"]))

        def given(_: RecordJob) -> Recording:
            return found

        return prepare(spec, model, self.ledger, given)


def _score(job: ScoreJob) -> ScoreOutcome:
    return ScoreOutcome(
        results=str(Path(job.output) / "results.json"), metrics={}, intervals={}, higher_is_better={}, flags=(),
        untrusted={}, failed=job.failed, seconds=0.0, strict=True,
    )  # fmt: skip


def write_small_model(folder: Path) -> None:
    """A directory that looks like a model: nothing reads its weights."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 2, "dtype": "float32",
        "num_hidden_layers": 1, "max_position_embeddings": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(64))


def conduct(token: int) -> int:
    """A conductor: takes up what an earlier one left, works off all runs; 0 when they are all over.

    Workers that die are noticed by their process id, as an agent or a private fleet notices them.
    """
    folder = Path(os.environ["FLEET_FOLDER"])
    store = ClusterStore(os.environ["PLANARIA_URL"], Path(os.environ["PLANARIA_SECRET_FILE"]).read_text())
    with Ledger(sqlite_url(folder / "ledger.sqlite"), token) as ledger:
        conductor = _Conductor(store, ledger, make_app(store.url), scorer=_score)
        conductor.expected_workers = int(os.environ["FLEET_WORKERS"])
        conductor.restore()
        for number in range(int(os.environ["FLEET_RUNS"])):
            done = folder / str(number) / "done"
            if not done.exists():
                conductor.add(_spec(folder, number))
        while not conductor.idle:
            now = time.time()
            try:
                conductor.tick(now)
            except MissingServiceError:
                continue
            except FencedError:
                return 4
            for name, record in list(conductor.roster.records.items()):
                if not Path(f"/proc/{record.facts['pid']}").exists():
                    conductor.worker_gone(name, "its process is gone", now)
            for run in conductor.runs.values():
                target = Path(run.spec.output) / "done"
                if run.over and not target.exists():
                    target.parent.mkdir(exist_ok=True)
                    write_json(target, {"state": run.state.value, "failed": run.failed})
            time.sleep(0.01)
        conductor.close()
    return 0


def _spec(folder: Path, number: int) -> RunSpec:
    return RunSpec(
        model=str(folder / "model"), settings=EvalSettings(tasks=TASKS), output=str(folder / str(number)),
        created=float(number), target_seconds=0.1,
    )  # fmt: skip


# ---------------------------------------------------------------- the killer


class Zygote:
    """Forks workers and conductors."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fleet_zygote"],
            env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._read()

    def _read(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError("the zygote died")
        return dict(json.loads(line))

    def start(self, **what: object) -> int:
        """A new child's pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()["pid"]

    def close(self) -> None:
        """End it; workers end with it."""
        self._process.kill()
        self._process.communicate()


def alive(pid: int) -> bool:
    """Whether a process is there."""
    return Path(f"/proc/{pid}").exists()


def chaos(
    folder: Path, *, kills: int, runs: int, requests: int, workers: int = 4, pause: float = 0.15, seed: int = 0
) -> ChaosResult:
    """Start everything, kill ``kills`` times, let what is left be finished undisturbed, count.

    Raises:
        AssertionError: what was left is not finished within :data:`PATIENCE` seconds per run.
    """
    rng, result = random.Random(seed), ChaosResult()
    secret = new_secret()
    (folder / "secret").write_text(secret)
    server = start_redis(folder / "redis")
    environment = {
        "PLANARIA_URL": server.url, "PLANARIA_SECRET_FILE": str(folder / "secret"), "FLEET_FOLDER": str(folder),
        "FLEET_RUNS": str(runs), "FLEET_REQUESTS": str(requests), "FLEET_WORKERS": str(workers),
        "STUB_SECONDS": "0.002", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    write_small_model(folder / "model")
    started, zygote, store = time.monotonic(), None, ClusterStore(server.url, secret)
    living: set[int] = set()
    try:
        zygote = Zygote(environment)
        killer = _Killer(zygote, store, rng, result, workers, [folder / str(number) / "done" for number in range(runs)])
        living = killer.pids
        while sum(result.kills.values()) < kills and not killer.finished:
            time.sleep(pause * rng.uniform(0.3, 1.7))
            killer.tend()
            killer.kill_something()
        deadline = time.monotonic() + PATIENCE * (2 + runs)
        while not killer.finished:
            killer.tend()
            if time.monotonic() > deadline:
                raise AssertionError(f"not finished {PATIENCE * (2 + runs):.0f} s after the last kill: {result}")
            time.sleep(0.05)
    finally:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if zygote is not None:
            zygote.close()
        store.close()
        end_server(server)
    result.seconds = time.monotonic() - started
    _count(folder, runs, requests, result)
    return result


class _Killer:
    def __init__(
        self,
        zygote: Zygote,
        store: ClusterStore,
        rng: random.Random,
        result: ChaosResult,
        workers: int,
        marks: list[Path],
    ) -> None:
        self._marks = marks
        self._zygote, self._store, self._rng, self._result = zygote, store, rng, result
        self._count = workers
        self._number = 0
        self._workers: dict[str, int] = {}
        self._conductor: int | None = None
        self._tokens = 0
        self.pids: set[int] = set()
        self.finished = False
        self.tend()

    def tend(self) -> None:
        """Start what is missing, as agents and the standby do."""
        self._workers = {name: pid for name, pid in self._workers.items() if alive(pid)}
        while len(self._workers) < self._count:
            self._number += 1
            name = f"w{self._number}"
            self._workers[name] = self._zygote.start(worker=name)
            self.pids.add(self._workers[name])
        if self._conductor is None or not alive(self._conductor):
            if all(path.exists() for path in self._marks):
                self.finished = True
                return
            self._tokens += 1
            self._conductor = self._zygote.start(conductor=self._tokens)
            self.pids.add(self._conductor)

    def kill_something(self) -> None:
        """One kill: of a worker, of the conductor, of Redis' connections (one, or all at once)."""
        what = self._rng.choices(["worker", "conductor", "connection", "all connections"], [45, 10, 30, 15])[0]
        if what == "worker":
            os.kill(self._rng.choice(sorted(self._workers.values())), signal.SIGKILL)
        elif what == "conductor":
            assert self._conductor is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._conductor, signal.SIGKILL)
        else:
            clients = self._store.link.call(lambda client: client.client_list())
            mine = self._store.link.call(lambda client: client.client_id())
            others = [one["id"] for one in clients if int(one["id"]) != mine]
            chosen = others if what == "all connections" else self._rng.sample(others, 1) if others else []
            for one in chosen:
                self._store.link.call(lambda client, one=one: client.client_kill_filter(_id=one))
        self._result.kills[what] += 1


def _count(folder: Path, runs: int, requests: int, result: ChaosResult) -> None:
    """Every request once, with the answer of an undisturbed run."""
    for number in range(runs):
        done = json.loads((folder / str(number) / "done").read_text())
        result.failed += done["state"] != "done" or bool(done["failed"])
    result.requests = runs * (requests // len(TASKS)) * len(TASKS)
    with Ledger(sqlite_url(folder / "ledger.sqlite")) as ledger:
        for trial in ledger.trials():
            expected = {one.id: respond(one).value for one in ledger.requests_of_trial(trial.id)}
            found = Counter[object]()
            for response in ledger.responses_of(trial.id):
                found[response.id] += 1
                result.wrong += response.value != expected.get(response.id)
            result.answered += len(found)
            result.wrong += sum(count - 1 for count in found.values())
