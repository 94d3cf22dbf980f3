"""Run real ranks (``python -m pretrain.rank``) without an agent, and read what they said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from planner.messages import RankSpec
from planner.pretrain_config import PretrainConfig
from planner.stdlib_corpus import library_folder
from tests.support.fork_server import Forked, ForkServer

DEADLINE_SECONDS = 120.0
RANK = "pretrain.rank:main"

TINY: dict[str, Any] = {
    "name": "tiny",
    "workers": {"min": 1, "max": 8},
    "model": {"layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "heads": 4, "kv_heads": 2, "seq_length": 32},
    "data": {"train": [str(library_folder() / name) for name in ("argparse.py", "difflib.py", "tarfile.py")]},
    "batch": {"global": 10, "micro": 2},
    "optimizer": {"lr": 2.0e-3, "min_lr": 2.0e-4, "warmup_steps": 2},
    "steps": 6,
    "seed": 7,
    "checkpoint": {"every_steps": 3, "keep": 10, "export": False},
}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` laid over it, mapping by mapping."""
    result = dict(base)
    for key, value in changes.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def tiny(**changes: Any) -> PretrainConfig:
    """A config that trains in a second, with ``changes``."""
    return PretrainConfig.model_validate(merged(TINY, changes))


@dataclass
class RankRun:
    """What one rank did."""

    code: int
    messages: list[dict[str, Any]]
    log: str

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Messages of one kind, in order."""
        return [message for message in self.messages if message["kind"] == kind]

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step."""
        return {message["step"]: message["loss"] for message in self.of("step")}


@dataclass
class Ranks:
    """Ranks of one incarnation, under way."""

    folder: Path
    processes: list[subprocess.Popen[bytes] | Forked] = field(default_factory=list)
    store: Any = None

    def output(self, rank: int) -> list[dict[str, Any]]:
        """What ``rank`` has said so far (a cut last line is left out)."""
        text = (self.folder / f"rank-{rank}.out").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n") and line[0] == "{"]

    def wait_for_step(self, step: int, rank: int = 0, seconds: float = DEADLINE_SECONDS) -> None:
        """Return once ``rank`` has completed ``step``."""

        def reached() -> bool:
            return any(message["kind"] == "step" and message["step"] >= step for message in self.output(rank))

        self.wait_for(reached, rank, seconds)

    def wait_for(self, condition: Callable[[], bool], rank: int = 0, seconds: float = DEADLINE_SECONDS) -> None:
        """Return once ``condition`` holds; an assertion error if ``rank`` ends or time passes without it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.processes[rank].poll() is not None
            if condition():
                return
            if ended:
                break
            time.sleep(0.02)
        raise AssertionError(f"rank {rank} did not come to what was waited for:\n{self.log(rank)[-3000:]}")

    def log(self, rank: int) -> str:
        """What ``rank`` wrote to standard error."""
        return (self.folder / f"rank-{rank}.err").read_text()

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        self.processes[rank].send_signal(number)

    def finish(self, seconds: float = DEADLINE_SECONDS) -> list[RankRun]:
        """Wait for all ranks (ending them at the deadline) and give what each did."""
        deadline = time.monotonic() + seconds
        try:
            for process in self.processes:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            logs = "\n".join(self.log(rank)[-1500:] for rank in range(len(self.processes)))
            raise AssertionError(f"ranks did not end within {seconds} s:\n{logs}") from error
        finally:
            self.end()
        return [
            RankRun(process.returncode, self.output(rank), self.log(rank))
            for rank, process in enumerate(self.processes)
        ]

    def end(self) -> None:
        """Kill whatever still runs."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def start_ranks(
    config: PretrainConfig | Sequence[PretrainConfig],
    world: int,
    job_folder: Path,
    *,
    incarnation: int = 1,
    server: ForkServer | None = None,
    **fields: Any,
) -> Ranks:
    """Start ``world`` ranks with a rendezvous store in this process, as new processes or forked by ``server``.

    ``config`` is that of all ranks, or a list with one for each.
    """
    from torch.distributed import TCPStore

    job_folder.mkdir(parents=True, exist_ok=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = Ranks(Path(tempfile.mkdtemp(dir=job_folder, prefix=f"inc-{incarnation}-")), store=store)
    for rank in range(world):
        values: dict[str, Any] = {
            "job": "job",
            "incarnation": incarnation,
            "rank": rank,
            "origin_rank": rank,
            "world_size": world,
            "store_host": "127.0.0.1",
            "store_port": store.port,
            "token": "token",
            "agent_socket": None,
            "job_folder": str(job_folder),
            "config": config if isinstance(config, PretrainConfig) else config[rank],
        }
        spec = RankSpec(**(values | fields))
        path = ranks.folder / f"rank-{rank}.json"
        path.write_text(spec.model_dump_json(by_alias=True))
        out, err = ranks.folder / f"rank-{rank}.out", ranks.folder / f"rank-{rank}.err"
        out.touch()
        err.touch()
        ranks.processes.append(server.start(RANK, str(path), out=out, err=err) if server else _spawn(path, out, err))
    return ranks


def _spawn(spec: Path, out: Path, err: Path) -> subprocess.Popen[bytes]:
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "pretrain.rank", str(spec)], stdout=stdout, stderr=stderr, start_new_session=True
        )


def run_ranks(
    config: PretrainConfig, world: int, job_folder: Path, *, codes: Sequence[int] = (0,), **fields: Any
) -> list[RankRun]:
    """Run ``world`` ranks to their end; every exit code must be one of ``codes``."""
    runs = start_ranks(config, world, job_folder, **fields).finish()
    for rank, run in enumerate(runs):
        assert run.code in codes, f"rank {rank} ended with {run.code}:\n{run.log[-3000:]}"
    return runs
