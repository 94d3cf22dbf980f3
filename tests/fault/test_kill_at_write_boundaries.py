"""Kill -9 between any two system calls that change the disk, found by tracing a publication, not by hand."""

from __future__ import annotations

import json
import re
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner import manifest
from pretrain import published
from tests.support import snapshots

ZYGOTE = Path(__file__).parent.parent / "support" / "publication_zygote.py"
CALLS = "write,pwrite64,writev,rename,renameat,renameat2,fsync,fdatasync,unlink,unlinkat,rmdir,mkdir,mkdirat,ftruncate"
STEPS = (1, 2, 3)


class Zygote:
    """The forking process of :mod:`tests.support.publication_zygote`."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, str(ZYGOTE)], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream
            )
        self.log = log
        self._answer()

    def _answer(self, seconds: float = 60) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            raise TimeoutError(self.log.read_text()[-2000:])
        return dict(json.loads(self.process.stdout.readline() or b'{"gone": true}'))

    def _send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def persist(self, memory: Path, folder: Path, tracer: list[str] | None = None) -> int:
        """Persist in a forked child, under ``strace`` with these options if given; its exit code."""
        command = {"memory": str(memory), "folder": str(folder), "keep": 2, "wait": tracer is not None}
        self._send(json.dumps(command))
        pid = self._answer()["pid"]
        if tracer is None:
            return int(self._answer()["status"])
        trace = subprocess.Popen(["strace", "-f", "-p", str(pid), *tracer], stderr=subprocess.PIPE)
        assert trace.stderr is not None
        line = trace.stderr.readline()
        assert b"attached" in line, line
        self._send("go")
        status = int(self._answer()["status"])
        trace.communicate(timeout=30)
        return status

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not on PATH: the write boundaries cannot be found by tracing")
    forking = Zygote(tmp_path_factory.mktemp("zygote") / "log")
    yield forking
    forking.close()


def _prepare(place: Path, zygote: Zygote) -> tuple[Path, Path]:
    """Steps 1 and 2 published and a marked snapshot of step 3 in memory."""
    memory, folder = place / "memory", place / "checkpoints"
    folder.mkdir(parents=True)
    for step in STEPS:
        snapshots.take(memory, step, persist=True).close()
        if step != STEPS[-1]:
            assert zygote.persist(memory, folder) == 0
    return memory, folder


def _boundaries(log: Path) -> list[tuple[str, int]]:
    """(system call, how many of it came before + 1) of the publisher's main thread, in the order of the trace."""
    lines = log.read_text().splitlines()
    main = lines[0].split()[0]
    seen: Counter[str] = Counter()
    found = []
    for line in lines:
        match = re.match(r"(\d+)\s+(\w+)\(", line)
        if match and match.group(1) == main:
            seen[match.group(2)] += 1
            found.append((match.group(2), seen[match.group(2)]))
    return found


def _check(folder: Path, where: str) -> int:
    """No crash may leave anything listed that does not verify, nor lose the newest; the newest step."""
    listed = published.published(folder)
    for step, path in listed:
        assert not published.examine(path, step), f"{where}: {path.name} is listed and broken"
    newest, refused = published.newest_verified(folder)
    assert newest is not None, f"{where}: nothing is left"
    assert not refused
    latest = published.read_latest(folder)
    assert latest is not None, f"{where}: latest names nothing"
    assert not manifest.verify(latest), f"{where}: latest names a broken checkpoint"
    step = manifest.read_manifest(newest).step
    assert step in STEPS[1:], f"{where}: the newest is step {step}"
    return step


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_every_boundary_of_a_publication(zygote: Zygote, tmp_path: Path) -> None:
    """C1, C5, C6: whatever the moment of the kill, the newest verified state is found, and the next try completes."""
    memory, folder = _prepare(tmp_path / "start", zygote)
    log = tmp_path / "trace"
    traced = tmp_path / "traced"
    shutil.copytree(folder, traced)
    assert zygote.persist(memory, traced, ["-o", str(log), "-e", f"trace={CALLS}"]) == 0
    assert [step for step, _ in published.published(traced)] == [2, 3]
    boundaries = _boundaries(log)
    assert {"write", "rename", "fsync"} <= {name for name, _ in boundaries}, boundaries
    reached: Counter[int] = Counter()
    began = time.monotonic()
    for number, (name, count) in enumerate(boundaries):
        here = tmp_path / f"kill-{number}"
        shutil.copytree(folder, here)
        inject = f"--inject={name}:signal=KILL:when={count}"
        status = zygote.persist(memory, here, ["-o", str(log), "-e", f"trace={CALLS}", inject])
        where = f"killed before {name} number {count} (boundary {number} of {len(boundaries)})"
        assert status == -9, f"{where}: status {status}"
        reached[_check(here, where)] += 1
        assert zygote.persist(memory, here) == 0, f"{where}: the next try failed"
        assert _check(here, f"{where}, then tried again") == 3
        assert [step for step, _ in published.published(here)] == [2, 3]
        assert published.read_latest(here) == here / "step-00000003"
        assert not [entry for entry in here.iterdir() if entry.name.startswith(".step")], f"{where}: debris"
        shutil.rmtree(here)
    print(
        f"{len(boundaries)} boundaries in {time.monotonic() - began:.1f} s, newest step after the kill: {dict(reached)}"
    )
    assert set(reached) == {2, 3}, "kills before and after the commit point were both tried"
