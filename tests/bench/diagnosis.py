"""Diagnosis: right answers on the labelled logs, speed on one core, memory on a 2 GB log, node check of four nodes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench.figures import Figure
from tests.support.failure_variants import variants

CORPUS = Path(os.environ.get("PLANARIA_LOGS", Path(__file__).parents[3] / "shared" / "logs"))
"""Folder of labelled logs with ``labels.jsonl``; left out where it is not there."""
_STEP = (
    " [{time}] iteration {step:8d}/  500000 | consumed samples: {samples:12d} | elapsed time per iteration (ms): "
    "{ms:.1f} | throughput per GPU (TFLOP/s/GPU): {flops:.1f} | learning rate: 2.910000E-04 | "
    "global batch size:   256 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {norm:.3f} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def measure(quick: bool) -> list[Figure]:
    """All figures of the issue; ``quick``: smaller logs."""
    figures = [*_answers(), *_speed(quick)]
    return [*figures, _memory(200 if quick else 2000), _node_check()]


# ------------------------------------------------------------------------------------------------- answers


def _answers() -> list[Figure]:
    from pretrain.diagnosis.pipeline import diagnose

    figures = []
    with tempfile.TemporaryDirectory() as name:
        rows = []
        for case in variants():
            path = Path(name) / f"{case.name}.log"
            path.write_text(case.text())
            rows.append((diagnose(path), case.root, case.node, tuple(case.evidence), case.severities))
        figures += _scored("other wordings", rows)
    if not (CORPUS / "labels.jsonl").exists():
        return figures
    rows, gone = [], []
    for line in (CORPUS / "labels.jsonl").read_text().splitlines():
        label = json.loads(line)
        verdict = diagnose(CORPUS / label["file"])
        rows.append((verdict, label["root"], label["node"], tuple(label["evidence"]), (label["severity"],)))
        if label["root"] == "none":
            gone.append(_gone(CORPUS / label["file"]))
    figures += _scored("labelled logs", rows)
    lost = sum(_root_lines_dropped(CORPUS / json.loads(line)["file"], json.loads(line)["evidence"])
               for line in (CORPUS / "labels.jsonl").read_text().splitlines())  # fmt: skip
    figures.append(Figure(name="root lines that compression dropped", value=lost, unit="", bar="0", reached=lost == 0))
    low = min(gone)
    return [*figures, Figure(name="short healthy logs: lines gone", value=100 * low, unit="%", bar="at least 99",
                             reached=low >= 0.99, note=f"worst of {len(gone)}")]  # fmt: skip


def _scored(name: str, rows: list[tuple]) -> list[Figure]:  # type: ignore[type-arg]
    with_node = [(verdict.node == node) for verdict, _, node, _, _ in rows if node is not None]
    with_lines = [bool(set(verdict.evidence) & set(lines)) for verdict, _, _, lines, _ in rows if lines]
    stops = sum(verdict.severity == "STOP" and "STOP" not in severities for verdict, _, _, _, severities in rows)

    def share(what: str, good: list[bool], bar: int) -> Figure:
        value = 100 * sum(good) / len(good)
        return Figure(name=f"{name}: {what}", value=value, unit="%", bar=f"at least {bar} %", reached=value >= bar,
                      note=f"{sum(good)} of {len(good)}")  # fmt: skip

    return [
        share("root class", [verdict.root == root for verdict, root, _, _, _ in rows], 95),
        share("node", with_node, 90),
        share("evidence line", with_lines, 90),
        Figure(name=f"{name}: false STOP", value=stops, unit="", bar="0", reached=stops == 0),
    ]


def _gone(path: Path) -> float:
    from pretrain.diagnosis.compression import compress

    return compress(path).gone


def _root_lines_dropped(path: Path, evidence: list[int]) -> int:
    """How many of the labelled root lines of one log are dropped as routine."""
    from pretrain.diagnosis.compression import Compressor
    from pretrain.diagnosis.reading import LogLine, all_lines

    kept: set[int] = set()

    class Watched(Compressor):
        def _group(self, line: LogLine) -> None:
            kept.add(line.number)
            super()._group(line)

    compressor = Watched()
    for line in all_lines(path):
        compressor.feed(line)
    compressor.finish()
    return len(set(evidence) - kept)


# --------------------------------------------------------------------------------------------------- speed


def healthy_lines(noise: random.Random) -> Iterator[str]:
    """An endless healthy log: progress in full length, monitors, checkpoints, library chatter."""
    step = 0
    while True:
        step += 1
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1_800_000_000 + 8 * step))
        yield _STEP.format(time=clock, step=step, samples=256 * step, ms=noise.uniform(7400, 7600),
                           flops=noise.uniform(72, 74), loss=2.3 + noise.uniform(-0.02, 0.02),
                           norm=noise.uniform(0.3, 0.9))  # fmt: skip
        for _ in range(3):
            yield (
                f"[gpumon gpu-a-{noise.randrange(64):02d}] util=100% temp={noise.randrange(40, 70)}C power="
                f"{noise.randrange(300, 700)}W sm_clock=1980MHz mem_clock=2619MHz ecc=0 xid=none"
            )
        if step % 100 == 0:
            yield f"saving checkpoint at iteration {step:8d} to /ckpt in torch_dist format"
            yield "    save-checkpoint ................................: (9085.17, 13647.01)"


def error_lines(noise: random.Random) -> Iterator[str]:
    """An endless wall of errors: watchdogs, tracebacks and stack frames of many ranks, interleaved."""
    while True:
        rank, address = noise.randrange(256), noise.getrandbits(48)
        head = f"[rank{rank}]:[E809 19:40:{noise.randrange(60):02d}.{noise.randrange(10**9):09d} ProcessGroupNCCL.cpp:"
        yield (
            f"{head}607] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL("
            f"SeqNum={noise.randrange(10**6)}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
            f"60{noise.randrange(10**4):04d} milliseconds before timing out."
        )
        yield f"[rank{rank}]: Traceback (most recent call last):"
        for depth in range(noise.randrange(3, 9)):
            yield f'[rank{rank}]:   File "/workspace/megatron/training.py", line {noise.randrange(2000)}, in f{depth}'
            yield f"[rank{rank}]:     return f{depth}(forward_step_func, data_iterator)"
        yield (
            f"[rank{rank}]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error "
            f"[10.{noise.randrange(255)}.{noise.randrange(255)}.{noise.randrange(255)}]:{noise.randrange(65535)}: "
            "Connection reset by peer"
        )
        for frame in range(6):
            yield (
                f"frame #{frame}: c10d::ProcessGroupNCCL::WorkNCCL::checkTimeout(std::optional<duration<long>"
                f" >) + 0x282 (0x{address:x} in /usr/local/lib/python3.10/dist-packages/torch/lib/libtorch_cuda.so)"
            )


def _write(path: Path, lines: Iterator[str], size: int) -> int:
    written = 0
    with path.open("w") as stream:
        while written < size:
            line = next(lines)
            stream.write(line + "\n")
            written += len(line) + 1
    return written


def _cpu(work: Callable[[], object], size: int, repeats: int = 3) -> tuple[float, float, float]:
    """Best, worst and median MB/s of processor time."""
    speeds = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        speeds.append(size / 1e6 / (time.process_time() - started))
    return max(speeds), min(speeds), sorted(speeds)[repeats // 2]


def _speed(quick: bool) -> list[Figure]:
    from pretrain.diagnosis.compression import compress
    from pretrain.diagnosis.pipeline import diagnose
    from pretrain.diagnosis.reading import LogReader

    size = (8 if quick else 60) * 1_000_000
    figures = []

    def speed(name: str, work: Callable[[], object], written: int, bar: int | None) -> None:
        high, low, middle = _cpu(work, written)
        figures.append(
            Figure(
                name=name,
                value=middle,
                unit="MB/s",
                low=low,
                high=high,
                runs=3,
                note="processor time, one core",
                bar=f"at least {bar}" if bar else "",
                reached=middle >= bar if bar else None,
            )
        )

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "job.log"
        for kind, lines in (("healthy", healthy_lines), ("error-dense", error_lines)):
            start = _write(path, healthy_lines(random.Random(2)), 200_000)
            written = _write(path, lines(random.Random(1)), size) if kind == "healthy" else start
            if kind != "healthy":
                with path.open("a") as stream:
                    source = lines(random.Random(1))
                    while written < size:
                        line = next(source)
                        written += stream.write(line + "\n")
            speed(f"prefilter, {kind} log", lambda: [0 for _ in LogReader(path).blocks()], written,
                  100 if kind == "healthy" else None)  # fmt: skip
            speed(f"whole pipeline, {kind} log", lambda: diagnose(path), written, 20)
            if kind == "healthy":
                speed("compression, healthy log", lambda: compress(path), written, None)
                gone = 100 * _gone(path)
                figures.append(Figure(name="compression of a healthy log", value=gone, unit="% of lines gone",
                                      bar="at least 99", reached=gone >= 99))  # fmt: skip
    return figures


# ------------------------------------------------------------------------------------------------- memory

_CHILD = """
import resource, sys
from pathlib import Path
from pretrain.diagnosis.pipeline import diagnose
verdict = diagnose(Path(sys.argv[1]))
print(verdict.root, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def _memory(megabytes: int) -> Figure:
    """Peak memory of a process that diagnoses one log of ``megabytes``, errors at its end."""
    noise = random.Random(4)
    with tempfile.TemporaryDirectory() as name:
        path, piece = Path(name) / "job.log", Path(name) / "piece.log"
        _write(piece, healthy_lines(noise), 20_000_000)
        body = piece.read_bytes()
        with path.open("wb") as stream:
            for _ in range(megabytes // 20 - 1):
                stream.write(body)
            errors = error_lines(noise)
            for _ in range(100_000):
                stream.write((next(errors) + "\n").encode())
        size = path.stat().st_size
        done = subprocess.run([sys.executable, "-c", _CHILD, str(path)], capture_output=True, check=True, timeout=900)
    root, peak = done.stdout.decode().split()
    value = int(peak) / 1024
    return Figure(name="peak memory", value=value, unit="MiB", bar="under 300", reached=value < 300,
                  note=f"{size / 1e9:.2f} GB log, root {root}")  # fmt: skip


def _node_check() -> Figure:
    from pretrain.nodecheck import LocalCheck

    started = time.monotonic()
    with LocalCheck([f"n-{index}" for index in range(4)]) as check:
        verdict = check.run()
    seconds = time.monotonic() - started
    return Figure(name="node check, four real nodes", value=seconds, unit="s", bar="under 10", reached=seconds < 10,
                  note="all good" if verdict.healthy else str(verdict.reasons))  # fmt: skip
