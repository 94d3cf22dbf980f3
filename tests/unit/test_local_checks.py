"""A node's checks of itself: what isolates it, what is a warning, what is skipped and says why."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner import severity
from planner.job_events import Send, Tell
from planner.job_machine import decide
from planner.local_checks import Device, Readings, State, broken, changes, judge
from planner.severity import Detection, Method, Severity
from pretrain import local_probe
from pretrain.local_probe import DeviceProbe, read, write_probe

GIB = 1 << 30


def readings(**changes_: Any) -> Readings:
    good: dict[str, Any] = {
        "devices": (Device(index=0, uncorrected_ecc=0), Device(index=1, uncorrected_ecc=0)),
        "expected_devices": 2, "disk_free": {"/a": (50 * GIB, 100 * GIB)}, "memory_free": 0.5, "memory_stall": 0.0,
        "clock_offset": 0.1, "writes": {"/a": 0.01},
    }  # fmt: skip
    return Readings(**good | changes_)


def states(found: Readings) -> dict[str, State]:
    return {check.name: check.state for check in judge(found) if check.state is not State.GOOD}


def test_a_healthy_node_is_good_in_everything() -> None:
    assert states(readings()) == {}
    assert broken(judge(readings())) == ""


@pytest.mark.parametrize(
    ("device", "row"),
    [
        (Device(index=1, lost="GPU is lost"), "gpu_lost"),
        (Device(index=1, uncorrected_ecc=3), "ecc_error"),
        (Device(index=1, uncorrected_ecc=0, remap_failed=True), "ecc_error"),
        (Device(index=1, uncorrected_ecc=0, xids=(79,)), "gpu_lost"),
        (Device(index=1, uncorrected_ecc=0, xids=(48,)), "ecc_error"),
        (Device(index=1, uncorrected_ecc=0, xids=(74,)), "nvlink_error"),
        (Device(index=1, uncorrected_ecc=0, xids=(31, 119)), "gpu_driver_error"),
    ],
)
def test_a_broken_device_isolates_the_node_under_its_own_row(device: Device, row: str) -> None:
    checks = judge(readings(devices=(Device(index=0, uncorrected_ecc=0), device)))
    seen = Detection(method=Method.NODE_HEALTH, rank=0, node="n", time=0.0, message=broken(checks))
    found = severity.classify(seen)
    assert (found.name, found.severity) == (row, Severity.SEV1)


def test_a_device_that_is_not_there_any_more_is_lost() -> None:
    assert "GPU is lost" in broken(judge(readings(devices=(Device(index=0),))))


def test_an_application_s_own_xid_isolates_nobody() -> None:
    assert states(readings(devices=(Device(index=0, uncorrected_ecc=0, xids=(13, 31, 43)), Device(index=1)))) == {}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"disk_free": {"/a": (GIB // 2, 100 * GIB)}}, "disk"),
        ({"disk_free": {"/a": (3 * GIB, 1000 * GIB)}}, "disk"),
        ({"memory_free": 0.01}, "memory"),
        ({"memory_stall": 60.0}, "memory"),
        ({"clock_offset": -30.0}, "clock"),
        ({"writes": {"/a": "a small write failed: Read-only file system"}}, "writes"),
        ({"writes": {"/a": 9.0}}, "writes"),
    ],
)
def test_what_is_not_the_device_s_fault_warns_and_isolates_nobody(changed: dict[str, Any], name: str) -> None:
    assert states(readings(**changed)) == {name: State.WARNING}
    assert broken(judge(readings(**changed))) == ""


def test_only_changes_are_told_and_troubles_that_were_there_from_the_start() -> None:
    good, full = judge(readings()), judge(readings(memory_free=0.0))
    assert changes((), good) == ()
    assert [check.name for check in changes((), full)] == ["memory"]
    assert changes(full, full) == ()
    assert [(check.name, check.state) for check in changes(full, good)] == [("memory", State.GOOD)]


def test_without_a_device_its_checks_are_skipped_with_the_reason(tmp_path: Path) -> None:
    checks = {check.name: check for check in judge(read(DeviceProbe(None), [tmp_path], lambda: 0.0))}
    assert {name for name, check in checks.items() if check.state is State.SKIPPED} == {"devices", "ecc", "xid"}
    assert checks["devices"].reason == "nvidia-ml-py is not installed"
    assert checks["writes"].state is State.GOOD
    assert not list(tmp_path.iterdir()), "the probe leaves nothing"


class FakeNvml:
    """NVML with two devices, of which the second can be lost."""

    class NVMLError(Exception):
        pass

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, nvmlEventTypeXidCriticalError = 1, 0, 8

    def __init__(self) -> None:
        self.lost = False
        self.events = [SimpleNamespace(device=1, eventData=79)]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: int, kind: int, events: str) -> None:
        assert (kind, events) == (8, "set")

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        if not self.events:
            raise self.NVMLError("Timeout")
        return self.events.pop()

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1 and self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> None: ...
    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return handle * 5

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        raise self.NVMLError("Not Supported")


def test_what_nvml_says_becomes_readings() -> None:
    nvml = FakeNvml()
    probe = DeviceProbe(nvml)
    assert probe.count == 2
    expected = (Device(index=0, uncorrected_ecc=0), Device(index=1, uncorrected_ecc=5, xids=(79,)))
    assert probe.read() == expected
    assert probe.read() == expected, "an Xid stays known"
    nvml.lost = True
    assert probe.read()[1].lost == "GPU is lost"
    probe.close()


@pytest.mark.gpu
def test_the_devices_of_this_host_answer() -> None:
    probe = DeviceProbe(local_probe.nvml_module())
    if probe.why_not:
        pytest.skip(f"NVML checks need a GPU: {probe.why_not}")
    assert all(not device.lost for device in probe.read())
    probe.close()


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    assert "failed" in str(write_probe(Path("/proc"))), "nobody, not even root, makes files there"
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        if os.geteuid() != 0:
            assert "failed" in str(write_probe(tmp_path))
    finally:
        tmp_path.chmod(0o700)


def test_storage_that_does_not_answer_is_given_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    blocked = threading.Event()
    monkeypatch.setattr(local_probe, "_write", lambda folder: blocked.wait(10) and 0.0)
    assert "did not end" in str(write_probe(tmp_path, 0.05))
    blocked.set()


def test_a_node_that_finds_itself_broken_is_isolated_and_its_job_goes_on_elsewhere() -> None:
    from planner.job_events import Cordon, NodeBroken
    from planner.messages import LeaveCollective, TellRanks
    from tests.unit.test_job_healing import Play

    play = Play()
    for rank in (2, 3):
        play.job.ranks[rank].node = "m"
    decision = decide(play.job, NodeBroken("m", "GPU 0: Xid 79: the GPU has fallen off the bus"), play.now)
    play.job, play.actions = decision.job, list(decision.actions)
    told = [a.command for a in play.actions if isinstance(a, Send) and isinstance(a.command, TellRanks)]
    assert all(isinstance(command.message, LeaveCollective) for command in told)
    for rank in range(4):
        play.left(rank)
    assert [a.node for a in play.actions if isinstance(a, Cordon)] == ["m"]
    assert play.orders()[-1].ranks == {0: 0, 1: 1}
    causes = [a.event.details["cause"] for a in play.actions if isinstance(a, Tell) and "cause" in a.event.details]
    assert causes == ["gpu_lost"]
