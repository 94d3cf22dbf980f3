"""Each kind of fault acts once, at its coordinates, and is reported before it acts."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from planner.clock import ManualClock
from planner.messages import RankFault
from planner.pretrain_config import Fault, FaultKind, Phase
from pretrain.faults import ACTS_IN, EXIT_CODE, InjectedError, Injector, corrupt, distort_loss


def fault(kind: str, step: int = 2, **more: object) -> Fault:
    return Fault.model_validate({"at_step": step, "kind": kind, **more})


def injector(*faults: Fault, fired: tuple[int, ...] = (), rank: int = 0) -> tuple[Injector, list[RankFault]]:
    said: list[RankFault] = []
    return Injector(faults, fired, rank, said.append, clock=ManualClock(100.0)), said


CHILD = """
import json, os, sys
from planner.pretrain_config import Fault, Phase
from pretrain.faults import Injector
def report(message):
    os.write(1, (message.model_dump_json() + "\\n").encode())
faults = [Fault.model_validate(item) for item in json.loads(sys.argv[1])]
box = Injector(faults, [], 1, report)
box.fire(Phase.FORWARD, 1, 0)
box.fire(Phase.FORWARD, 2, 0)
os.write(1, b"survived\\n")
"""


def child(*faults: dict[str, object]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(list(faults))], stdout=subprocess.PIPE)


@pytest.mark.parametrize(("kind", "code"), [("sigkill", -signal.SIGKILL), ("exit", EXIT_CODE)])
def test_fatal_kinds_report_and_end_the_process(kind: str, code: int) -> None:
    process = child({"at_step": 2, "kind": kind, "rank": 1}, {"at_step": 2, "kind": "sigkill", "rank": 0})
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    lines = [json.loads(line) for line in out.decode().splitlines()]
    assert [line["index"] for line in lines] == [0], "reported before it acted, and the other rank's fault stayed away"


@pytest.mark.parametrize("kind", ["sigstop", "hang"])
def test_stopping_kinds_report_and_never_return(kind: str) -> None:
    process = child({"at_step": 2, "kind": kind, "rank": 1})
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["kind"] == "fault"
        ready, _, _ = select.select([process.stdout], [], [], 0.3)
        assert not ready, "nothing more may come"
        assert process.poll() is None
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def test_raising_kinds() -> None:
    box, said = injector(fault("exception", phase="optimizer"), fault("nccl_error", phase="reduce"), fault("disk_full"))
    box.fire(Phase.FORWARD, 2, 0)
    with pytest.raises(RuntimeError, match="NCCL error"):
        box.fire(Phase.REDUCE, 2)
    with pytest.raises(InjectedError, match="step 2, optimizer"):
        box.fire(Phase.OPTIMIZER, 2)
    with pytest.raises(OSError, match="No space") as caught:
        box.fire(Phase.SAVE, 5)
    assert caught.value.errno == errno.ENOSPC
    assert [message.index for message in said] == [1, 0, 2]
    assert box.pending == ()


def test_each_fires_once_and_not_again_after_a_roll_back() -> None:
    box, said = injector(fault("nan_loss"), fault("loss_spike", micro_batch=1))
    assert box.fire(Phase.FORWARD, 2, 0) == (FaultKind.NAN_LOSS,)
    assert box.fire(Phase.FORWARD, 2, 1) == (FaultKind.LOSS_SPIKE,)
    assert box.fire(Phase.FORWARD, 2, 0) == box.fire(Phase.FORWARD, 2, 1) == ()
    assert len(said) == 2
    again, silent = injector(fault("nan_loss"), fault("loss_spike"), fired=(0, 1))
    assert again.fire(Phase.FORWARD, 2, 0) == ()
    assert silent == []


def test_several_at_one_moment_are_all_reported_before_the_first_acts() -> None:
    box, said = injector(fault("exception"), fault("slow"), fault("nan_loss"))
    with pytest.raises(InjectedError):
        box.fire(Phase.FORWARD, 2, 0)
    assert [message.index for message in said] == [0, 1, 2]


def test_slow_delays_and_lets_the_step_go_on() -> None:
    clock = ManualClock(0.0)
    box = Injector([fault("slow")], [], 0, lambda _: None, slow_seconds=1.5, clock=clock)
    assert box.fire(Phase.FORWARD, 2, 0) == ()
    assert clock.now == 1.5


def test_a_micro_batch_that_the_rank_does_not_have_fires_after_its_last() -> None:
    box, _ = injector(fault("exception", phase="backward", micro_batch=7))
    for batch in range(3):
        box.fire(Phase.FORWARD, 2, batch)
        box.fire(Phase.BACKWARD, 2, batch)
    with pytest.raises(InjectedError):
        box.fire(Phase.REDUCE, 2)


def test_phases_that_not_every_step_has_fire_at_the_first_chance() -> None:
    box, said = injector(fault("exception", phase="reform"), fault("corrupt_checkpoint"))
    assert box.fire(Phase.SAVE, 1) == ()
    assert box.fire(Phase.SAVE, 10) == (FaultKind.CORRUPT_CHECKPOINT,)
    with pytest.raises(InjectedError):
        box.fire(Phase.REFORM, 4)
    assert [message.step for message in said] == [10, 4]


def test_faults_known_to_have_fired_elsewhere_are_forgotten() -> None:
    box, said = injector(fault("exception"), rank=0)
    box.forget([0])
    assert box.fire(Phase.FORWARD, 2, 0) == ()
    assert said == []


def test_the_loss_is_distorted() -> None:
    assert distort_loss(2.0, [FaultKind.LOSS_SPIKE]) > 10
    assert distort_loss(2.0, [FaultKind.NAN_LOSS]) != distort_loss(2.0, [FaultKind.NAN_LOSS])
    assert distort_loss(2.0, []) == 2.0


def test_corrupt_flips_one_bit_of_the_largest_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    big = tmp_path / "deep" / "big.distcp"
    big.write_bytes(bytes(1000))
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "manifest.json").write_bytes(bytes(5000))
    assert corrupt(tmp_path) == big
    assert sum(bin(byte).count("1") for byte in big.read_bytes()) == 1
    with pytest.raises(FileNotFoundError, match="no file"):
        corrupt(tmp_path / "deep" / "none")


class Acted(Exception):
    """Raised in place of what would end this process."""


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("kind", list(FaultKind))
def test_every_kind_fires_in_every_phase_and_says_so_before_it_acts(
    kind: FaultKind, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of two micro-batches a step that validates, saves and re-forms after each step."""

    def acted(*_: object) -> None:
        raise Acted

    monkeypatch.setattr(os, "kill", acted)
    monkeypatch.setattr(os, "_exit", acted)
    clock = ManualClock(100.0)
    monkeypatch.setattr(clock, "sleep", acted)
    said: list[RankFault] = []
    box = Injector([fault(kind.value, phase=phase.value)], [], 0, said.append, clock=clock)
    walk = [(step, place, batch) for step in (1, 2, 3) for place, batch in WALK]
    effects: list[tuple[Phase, FaultKind]] = []
    for step, place, batch in walk:
        try:
            effects += [(place, effect) for effect in box.fire(place, step, batch)]
        except (Acted, InjectedError, OSError, RuntimeError):
            effects.append((place, kind))
    (message,) = said
    assert (message.step, message.phase) == (2, phase.value)
    assert effects == [(ACTS_IN.get(kind, phase), kind)], "it acts once, where it can"
    assert box.pending == ()


WALK = [
    (Phase.FORWARD, 0), (Phase.BACKWARD, 0), (Phase.FORWARD, 1), (Phase.BACKWARD, 1), (Phase.REDUCE, None),
    (Phase.OPTIMIZER, None), (Phase.EVALUATE, None), (Phase.SAVE, None), (Phase.REFORM, None),
]  # fmt: skip
