"""What an agent's commands do: stores, ranks, workers and staged models, each as processes of its table."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.files import write_json
from planner.messages import (
    AgentReport,
    CommandFailed,
    LeaveCollective,
    RankSpec,
    RankStarted,
    Reform,
    Stage,
    Staged,
    StartRanks,
    StartStore,
    StartWorker,
    StopRanks,
    StopStore,
    StopWorker,
    StoreReady,
    TellRanks,
    Unstage,
    WorkerStarted,
)
from planner.store import ClusterStore
from pretrain.agent_devices import Devices
from pretrain.agent_memory import NodeMemory, PeerTier
from pretrain.agent_processes import Launch, ProcessTable, Watched
from pretrain.agent_socket import RankChannel
from pretrain.nursery import Nursery
from pretrain.watchdog import dump_and_kill

if TYPE_CHECKING:
    from pretrain.agent import AgentSettings

TRAIN_PYTHON, INFER_PYTHON = "PLANARIA_TRAIN_PYTHON", "PLANARIA_INFER_PYTHON"
"""Environment of an agent: interpreters of ranks (with their stores) and of workers, where a site keeps two."""
_SECRET_VARIABLES = ("PLANARIA_URL", "PLANARIA_SECRET_FILE")
"""What no rank gets to see: a rank speaks for its job alone, with the job's token."""
NURSERY_AFTER_SECONDS = 30.0
"""Seconds of training after which the nursery of replacements begins."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class AgentWork:
    """Carries out an agent's commands; used by its main thread.

    Args:
        report: takes reports for the coordinator.
        memory: the jobs' state in this node's memory.
        peers: the other nodes' keepers of snapshots; None: no such tier.
    """

    def __init__(
        self,
        store: ClusterStore,
        settings: AgentSettings,
        devices: Devices,
        table: ProcessTable,
        channel: RankChannel,
        report: Callable[[Any], None],
        memory: NodeMemory,
        peers: PeerTier | None,
    ) -> None:
        self._store = store
        self._settings = settings
        self._devices = devices
        self._table = table
        self._channel = channel
        self._report = report
        self._memory, self._peers = memory, peers
        self._ports: dict[str, int] = {}
        self._newest: dict[str, int] = {}
        self._begun: set[str] = set()
        self._nursery: Nursery | None = None
        self._training_since = 0.0
        self._specs = settings.run_dir / "specs"
        self._specs.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _now(self) -> float:
        return self._store.clock.time()

    def _environment(self, threads: int, **more: str) -> dict[str, str]:
        return {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads)), "PYTHONUNBUFFERED": "1", **more}

    # ------------------------------------------------------------------ stores

    def start_store(self, command: StartStore) -> None:
        """Bind a port, hand it to a new store process (or name the job's living one) and tell where it is.

        Raises:
            ValueError: a store that an earlier agent of this node started is not gone yet.
        """
        key = f"store:{command.job}"
        running = self._table.get(key) is not None
        if running and command.job not in self._ports:
            raise ValueError("the store of this agent's former life is still ending")
        if not running:
            with socket.socket() as listener:
                listener.bind((self._settings.address, 0))
                listener.listen(1024)
                self._ports[command.job] = int(listener.getsockname()[1])
                self._launch_store(command.job, key, listener.fileno())
        self._report(
            StoreReady(
                time=self._now(),
                job=command.job,
                incarnation=command.incarnation,
                host=self._settings.address,
                port=self._ports[command.job],
            )
        )

    def _launch_store(self, job: str, key: str, fd: int) -> None:
        environment = {name: value for name, value in self._environment(1).items() if name not in _SECRET_VARIABLES}
        program = [_python(TRAIN_PYTHON), "-m", "pretrain.store", "--fd", str(fd), "--host", self._settings.address]
        program += ["--port", str(self._ports[job]), "--parent", str(os.getpid())]
        self._table.start(
            Launch(
                key=key,
                argv=tuple(program),
                env=environment,
                log=self._settings.run_dir / "logs" / f"store-{job}.log",
                about={"kind": "store", "job": job},
                pass_fds=(fd,),
            )
        )

    def stop_store(self, command: StopStore) -> None:
        """End a job's store."""
        if (process := self._table.get(f"store:{command.job}")) is not None:
            self._table.end(process, 0)

    # ------------------------------------------------------------------ ranks

    def start_ranks(self, command: StartRanks) -> None:
        """Start one process per spec. Repeated or overtaken commands start nothing.

        Raises:
            ValueError: an incarnation older than one seen before, a slot that is not there or not free.
        """
        for spec, slot in zip(command.specs, command.slots, strict=True):
            key = _rank_key(spec.job, spec.incarnation, spec.rank)
            if key in self._begun:
                continue
            if spec.incarnation < self._newest.get(spec.job, 0):
                raise ValueError(f"incarnation {spec.incarnation} of job {spec.job} is over")
            self._check_slot(slot)
            self._newest[spec.job] = spec.incarnation
            self._begun.add(key)
            self._start_rank(spec, slot, command.lease)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self._devices.slots:
            raise ValueError(f"slot {slot} does not exist on this node of {self._devices.slots}")
        holder = next((process for process in self._table if slot in process.slots), None)
        if holder is not None:
            raise ValueError(f"slot {slot} is held by {holder.key}, pid {holder.pid}")

    def _start_rank(self, spec: RankSpec, slot: int, lease: str) -> None:
        full = spec.model_copy(
            update={
                "agent_socket": str(self._channel.path),
                "threads": self._devices.threads_per_slot,
                "device": self._devices.name(slot),
                "bind_address": self._settings.address,
                "memory_dir": str(self._memory.folder) if self._memory.folder is not None else None,
                "peers": self._peers.peers.all() if self._peers is not None else [],
            }
        )
        self._memory.know(full)
        path = self._spec_path(spec.job, spec.incarnation, spec.rank)
        write_json(path, full.model_dump(mode="json", by_alias=True), mode=0o600)
        program = self._settings.rank_program or (_python(TRAIN_PYTHON), "-m", "pretrain.rank")
        environment = self._rank_environment()
        process = self._table.start(
            Launch(
                key=_rank_key(spec.job, spec.incarnation, spec.rank),
                argv=(*program, str(path)),
                env=environment,
                log=self._log_of(spec),
                about={
                    "kind": "rank",
                    "job": spec.job,
                    "incarnation": spec.incarnation,
                    "rank": spec.rank,
                    "lease_token": spec.lease_token,
                    "spec": str(path),
                    "folders": [spec.job_folder, *([spec.config.checkpoint.dir] if spec.config.checkpoint.dir else [])],
                },
                lease=lease,
                slots=(slot,),
            ),
            self._nursery,
        )
        self._report(
            RankStarted(
                time=self._now(), job=spec.job, incarnation=spec.incarnation, rank=spec.rank, slot=slot, pid=process.pid
            )
        )

    def _rank_environment(self) -> dict[str, str]:
        environment = self._environment(self._devices.threads_per_slot)
        return {name: value for name, value in environment.items() if name not in _SECRET_VARIABLES}

    def begin_nursery(self) -> None:
        """Have the next ranks forked, where that is possible; called whenever a rank completed a step.

        It begins when ranks have trained for a while: it delays no start, and a job of seconds does not pay for it.
        """
        now = time.monotonic()
        self._training_since = self._training_since or now
        if now - self._training_since < NURSERY_AFTER_SECONDS:
            return
        if self._devices.kind != "cpu" or self._settings.rank_program or (self._nursery and self._nursery.alive):
            return
        log = self._settings.run_dir / "logs" / "nursery.log"
        self._nursery = Nursery(_python(TRAIN_PYTHON), self._rank_environment(), log)
        self._table.leave_alone(self._nursery.pid)

    def end_nursery(self) -> None:
        """End it; its ranks go on."""
        if self._nursery is not None:
            self._nursery.close()

    def _spec_path(self, job: str, incarnation: int, rank: int) -> Path:
        return self._specs / f"{job}-{incarnation}-{rank}.json"

    def _log_of(self, spec: RankSpec) -> Path:
        """In the job's folder, or here where that cannot be written (another host's disk)."""
        name = f"inc-{spec.incarnation}-rank-{spec.rank}.log"
        logs = Path(spec.job_folder) / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError:
            logs = self._settings.run_dir / "logs" / spec.job
        return logs / name

    def forget_spec(self, about: Mapping[str, Any]) -> None:
        """Remove the spec (it holds the job's token) of a rank that ended."""
        Path(about["spec"]).unlink(missing_ok=True)

    def _ranks(self, job: str, incarnation: int) -> list[Watched]:
        return [
            process
            for process in self._table
            if process.about["kind"] == "rank"
            and process.about["job"] == job
            and process.about["incarnation"] == incarnation
        ]

    def stop_ranks(self, command: StopRanks) -> None:
        """End all ranks of an incarnation; those that are gone already are no error."""
        for process in self._ranks(command.job, command.incarnation):
            if command.ranks is not None and int(process.about["rank"]) not in command.ranks:
                continue
            if command.capture_stack:
                process.asked = True
                dump_and_kill(process.pid, process.pidfd, process.log)
            else:
                self._table.end(process, command.grace_seconds)

    def tell_ranks(self, command: TellRanks) -> None:
        """Hand a message to all ranks of an incarnation; a re-form gives them their new names afterwards."""
        ranks = self._ranks(command.job, command.incarnation)
        for process in ranks:
            self._channel.send(_who(process), command.message)
        if isinstance(command.message, Reform):
            self._rename(ranks, command.job, command.message)

    def _rename(self, ranks: list[Watched], job: str, reform: Reform) -> None:
        for process in ranks:
            new = reform.ranks.get(int(process.about["rank"]))
            if new is not None:
                about = {**process.about, "incarnation": reform.incarnation, "rank": new}
                self._channel.rename(_who(process), (job, reform.incarnation, new))
                self._table.relabel(process, _rank_key(job, reform.incarnation, new), about)
        self._newest[job] = max(self._newest.get(job, 0), reform.incarnation)

    def tell_peers(self, process: Watched) -> None:
        """A rank is gone unasked: its peers on this node must not wait for it in a collective."""
        if process.about["kind"] != "rank" or process.asked:
            return
        job, incarnation = str(process.about["job"]), int(process.about["incarnation"])
        rank = int(process.about["rank"])
        leave = LeaveCollective(incarnation=incarnation, reason=f"rank {rank} is gone", ranks=[rank])
        for peer in self._ranks(job, incarnation):
            if peer is not process:
                self._channel.send(_who(peer), leave)

    # ------------------------------------------------------------------ workers

    def start_worker(self, command: StartWorker) -> None:
        """Start a Celery worker by the ``planaria`` command, its lease in the environment.

        Raises:
            ValueError: a slot that is not there or not free.
        """
        key = f"worker:{command.worker}"
        if self._table.get(key) is not None:
            return
        for slot in command.slots:
            self._check_slot(slot)
        program = [_python(INFER_PYTHON), "-m", "planner.cli", "worker", "--kind", command.worker_kind]
        program += ["--name", command.worker]
        if command.slots:
            program += ["--slots", ",".join(f"{self._settings.node}/{slot}" for slot in command.slots)]
        process = self._table.start(
            Launch(
                key=key,
                argv=tuple(program),
                env=self._worker_environment(command),
                log=self._settings.run_dir / "logs" / f"worker-{command.worker}.log",
                about={"kind": "worker", "worker": command.worker, "lease_token": command.lease_token},
                lease=command.lease,
                slots=tuple(command.slots),
            )
        )
        self._report(WorkerStarted(time=self._now(), worker=command.worker, pid=process.pid))

    def _worker_environment(self, command: StartWorker) -> dict[str, str]:
        threads = self._devices.threads_per_slot * max(1, len(command.slots))
        more = self._worker_variables()
        if command.lease is not None:
            more |= {"PLANARIA_LEASE": command.lease, "PLANARIA_LEASE_TOKEN": str(command.lease_token)}
        if self._devices.kind == "cuda":
            more["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, command.slots))
        environment = self._environment(threads, **more)
        if command.lease is None:
            for name in ("PLANARIA_LEASE", "PLANARIA_LEASE_TOKEN"):
                environment.pop(name, None)
        return environment

    def _worker_variables(self) -> dict[str, str]:
        memory = os.environ.get("PLANARIA_SHM") or f"/dev/shm/planaria-{self._settings.node}"
        more = {"PLANARIA_URL": self._store.url, "PLANARIA_NODE": self._settings.node, "PLANARIA_SHM": memory}
        if self._settings.state_dir is not None:
            more["PLANARIA_STATE_DIR"] = str(self._settings.state_dir)
        if self._settings.secret_file is not None:
            more["PLANARIA_SECRET_FILE"] = str(self._settings.secret_file)
        return more

    def stop_worker(self, command: StopWorker) -> None:
        """Drain a worker: SIGTERM, SIGKILL after the grace."""
        if (process := self._table.get(f"worker:{command.worker}")) is not None:
            self._table.end(process, command.grace_seconds)

    # ------------------------------------------------------------------ staged models

    def stage(self, command: Stage | Unstage) -> None:
        """Bring a model into this node's memory for all its workers, or drop it, in a process of its own.

        ``evalsched.staging`` does it, as it does for workers: one copy, verified, within the node's budget.
        """
        threading.Thread(target=self._stage, args=(command,), daemon=True).start()

    def _stage(self, command: Stage | Unstage) -> None:
        started = time.monotonic()
        program = [_python(INFER_PYTHON), "-m", "evalsched.staging"]
        program += ["--drop", command.digest] if isinstance(command, Unstage) else [command.path, command.digest]
        environment = self._environment(1, **self._worker_variables())
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:] or [""]
        if done.returncode != 0:
            self._report(CommandFailed(time=self._now(), command=command.kind, reason=last[0][:500]))
        elif isinstance(command, Stage):
            size = sum(path.stat().st_size for path in Path(last[0]).rglob("*") if path.is_file())
            seconds = time.monotonic() - started
            self._report(Staged(time=self._now(), digest=command.digest, path=last[0], bytes=size, seconds=seconds))


def train_python() -> str:
    """The interpreter of ranks, stores and persisters."""
    return _python(TRAIN_PYTHON)


def _python(variable: str) -> str:
    return os.environ.get(variable) or sys.executable


def _rank_key(job: str, incarnation: int, rank: int) -> str:
    return f"rank:{job}:{incarnation}:{rank}"


def _who(process: Watched) -> tuple[str, int, int]:
    return str(process.about["job"]), int(process.about["incarnation"]), int(process.about["rank"])


__all__ = ["AgentReport", "AgentWork"]
