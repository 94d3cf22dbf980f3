"""What recording, scoring and the ledger cost: CPU seconds per 1,000 requests, without any model."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.figures import Figure

_CHILD = """
import json, os, resource, sys, time
from dataclasses import replace
from pathlib import Path
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
folder, limit = Path(sys.argv[1]), int(sys.argv[2])
started = cpu()
import torch
import evalsched.lm_recording
import evalsched.lm_scoring
imported = cpu() - started
from evalsched.recording import RecordJob, record
from evalsched.scoring import ScoreJob, score
from evalsched.types import EvalSettings
from tests.support.hash_lm import respond
from tests.support.tiny_model import write_tokenizer
tokenizer = write_tokenizer(folder / "tokenizer")
tasks = ("stdlib_bits_per_byte", "stdlib_next_line", "stdlib_complete")
settings = EvalSettings(tasks=tasks, limit=limit)
job = RecordJob(settings=settings, tokenizer=str(tokenizer))
started = cpu(); recording = record(job); recorded = cpu() - started
answers = {request.id: respond(request) for request in recording.requests()}
scoring = ScoreJob(settings=settings, model="m", tokenizer=str(tokenizer), recording=str(recording.folder), answers="",
                   output=str(folder / "out"))
started = cpu(); score(scoring, answers); first = cpu() - started
started = cpu(); score(scoring, answers); again = cpu() - started
print(json.dumps([imported, recorded, first, again, len(answers)]))
"""


def measure(quick: bool) -> list[Figure]:
    """Recording and scoring of the shipped tasks, and bulk writes of the ledger."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*_lm_eval(folder, 200 if quick else 1000), *_ledger(folder, 100_000 if quick else 1_000_000)]


def _lm_eval(folder: Path, limit: int) -> list[Figure]:
    import json

    environment = os.environ | {"PLANARIA_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, "-c", _CHILD, str(folder), str(limit)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=900, env=environment)
    imported, recorded, first, again, requests = json.loads(done.stdout.splitlines()[-1])
    per = f"for {requests:,.0f} requests"
    return [
        Figure(name="import of lm-eval and torch", value=imported, unit="CPU s", note="once per process"),
        Figure(name="recording", value=recorded, unit="CPU s", note=per),
        Figure(name="scoring, first in a process", value=first, unit="CPU s", note=per),
        Figure(name="scoring, next checkpoint", value=again, unit="CPU s", note=per),
        Figure(
            name="recording and scoring per 1,000 requests", value=1000 * (recorded + again) / requests, unit="CPU s"
        ),
    ]


def _ledger(folder: Path, count: int) -> list[Figure]:
    from evalsched.ledger import Ledger, sqlite_url
    from evalsched.types import Request, Response

    def cpu() -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    requests = [
        Request(
            request_type="loglikelihood", task="t", doc_id=n // 4, idx=n % 4, occurrence=0,
            arguments=("x" * 200, "y" * 30), digest=f"{n:032x}",
        )
        for n in range(count)
    ]  # fmt: skip
    with Ledger(sqlite_url(folder / "ledger.db"), token=1) as ledger:
        started, wall = cpu(), time.monotonic()
        set_id = ledger.put_requests("d", "t", requests)
        put, put_wall = cpu() - started, time.monotonic() - wall
        trial = ledger.put_trial(key="k", key_parts={}, task="t", set_id=set_id, model_path="/m")
        answers = [Response(id=request.id, value=(-1.5, True)) for request in requests[: count // 5]]
        started = cpu()
        for start in range(0, len(answers), 200):
            ledger.put_responses({trial.id: answers[start : start + 200]})
        kept = cpu() - started
    return [
        Figure(
            name=f"ledger: {count:,} requests", value=put_wall, unit="s", bar="well under a minute for 1,000,000",
            reached=put_wall < 40 * count / 1e6, note=f"{put:.1f} CPU s, SQLite",
        ),
        Figure(
            name="ledger: responses in shards of 200", value=1000 * kept / len(answers), unit="CPU s per 1,000",
            note=f"{len(answers):,} responses, SQLite, durable after each shard",
        ),
    ]  # fmt: skip
