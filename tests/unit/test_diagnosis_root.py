"""One root per log, whatever stands before and after it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pretrain.diagnosis.pipeline import diagnose
from tests.support.failure_logs import BY_A_RANK, BY_THE_KERNEL, Log, by_a_rank, by_the_kernel, cascade, healthy


def written(folder: Path, log: Log) -> Path:
    path = folder / "job.log"
    path.write_text(log.text())
    return path


@pytest.mark.parametrize("cascade_first", [False, True])
@pytest.mark.parametrize(("root", "line", "severity"), BY_A_RANK)
def test_a_rank_says_it(tmp_path: Path, root: str, line: str, severity: str, cascade_first: bool) -> None:
    log = by_a_rank(root, line, seed=len(line), cascade_first=cascade_first)
    verdict = diagnose(written(tmp_path, log))
    found = (verdict.root, verdict.severity, verdict.rank, verdict.evidence[0])
    if root == "connection_error" and cascade_first:
        # a reset that comes after the first time-out explains nothing that was before it
        assert verdict.root in ("connection_error", "nccl_timeout", "nccl_remote_error")
    else:
        assert found == (root, severity, log.rank, log.evidence)


@pytest.mark.parametrize(("root", "line", "severity"), BY_THE_KERNEL)
def test_only_the_kernel_says_it(tmp_path: Path, root: str, line: str, severity: str) -> None:
    log = by_the_kernel(root, line, seed=len(line))
    verdict = diagnose(written(tmp_path, log))
    assert (verdict.root, verdict.severity, verdict.node) == (root, severity, log.node)
    assert log.evidence in verdict.evidence


def test_a_handled_exception_is_no_root(tmp_path: Path) -> None:
    log = Log("none")
    log.add(
        "WARNING: optional extension missing (ImportError: No module named 'fast_rope'), falling back to the slow path"
    )
    healthy(log, 30, random.Random(1))
    log.add("Connection reset by peer while sending metrics, retrying 1/5")
    healthy(log, 30, random.Random(2), first=130)
    log.add("training is done", "exit code: 0")
    verdict = diagnose(written(tmp_path, log))
    assert (verdict.root, verdict.severity, verdict.method) == ("none", "NONE", "none")


def test_a_job_that_outlived_an_exception_died_of_something_else(tmp_path: Path) -> None:
    log = Log("key_error")
    healthy(log, 10, random.Random(1))
    log.add("[rank2]: ValueError: bad sample 17")
    healthy(log, 20, random.Random(2), first=110)
    log.blame("[rank5]: KeyError: 'labels'", rank=5)
    cascade(log, 5, random.Random(3), 300)
    verdict = diagnose(written(tmp_path, log))
    assert (verdict.root, verdict.rank) == ("key_error", 5)


def test_the_collective_alone(tmp_path: Path) -> None:
    log = Log("nccl_timeout")
    healthy(log, 20, random.Random(1))
    cascade(log, None, random.Random(2), 200)
    log.lines = [line for line in log.lines if "DistBackendError" not in line]
    assert diagnose(written(tmp_path, log)).root == "nccl_timeout"


def test_a_loss_that_leaves_its_band_and_stays(tmp_path: Path) -> None:
    log = Log("loss_spike")
    healthy(log, 60, random.Random(1))
    first = len(log.lines) + 1
    for index in range(12):
        log.add(f"iteration {160 + index}/ 9000 | lm loss: 7.{index}E+00 | grad norm: 88.0")
    verdict = diagnose(written(tmp_path, log))
    assert (verdict.root, verdict.evidence[0]) == ("loss_spike", first)


def test_a_bump_that_comes_back_is_nothing(tmp_path: Path) -> None:
    log = Log("none")
    healthy(log, 60, random.Random(1))
    log.add("iteration 160/ 9000 | lm loss: 6.0E+00", "iteration 161/ 9000 | lm loss: 5.0E+00")
    healthy(log, 20, random.Random(2), first=162)
    assert diagnose(written(tmp_path, log)).root == "none"


def test_silence_is_unknown_not_a_guess(tmp_path: Path) -> None:
    log = Log("unknown")
    healthy(log, 20, random.Random(1))
    log.add("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "  exitcode  : 1 (pid: 4711)")
    verdict = diagnose(written(tmp_path, log))
    assert (verdict.root, verdict.severity, verdict.evidence) == ("unknown", "SEV2", ())


def test_killed_alone_is_not_out_of_memory(tmp_path: Path) -> None:
    log = Log("unknown")
    healthy(log, 20, random.Random(1))
    log.add("bash: line 1: 4711 Killed                  python3 train.py", "srun: error: host-01: task 1: Killed")
    assert diagnose(written(tmp_path, log)).root != "host_out_of_memory"


def test_garbage_is_read(tmp_path: Path) -> None:
    noise = random.Random(7)
    path = tmp_path / "raw.log"
    log = by_a_rank("key_error", "[rank{r}]: KeyError: 'x'", 3, cascade_first=False)
    raw = log.text().replace("\n", "\r\n").encode()
    raw = raw.replace(b"[rank", b"\x1b[31m[rank") + b"\xff\xfe\x00" * 50 + b"A" * 300_000
    path.write_bytes(raw)
    assert diagnose(path).root == "key_error"
    path.write_bytes(bytes(noise.randrange(256) for _ in range(100_000)))
    assert diagnose(path).root in ("none", "unknown")
    path.write_bytes(b"")
    assert diagnose(path).root == "none"
