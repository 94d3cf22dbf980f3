"""Reads what :mod:`planner.local_checks` judges: NVML where there is one, file systems, memory, a small write."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from planner.errors import one_line
from planner.local_checks import WRITE_SECONDS, Device, Readings

_PROBE = b"a small durable write\n"


def nvml_module() -> Any:
    """The NVML binding, or None where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


class DeviceProbe:
    """The node's GPUs as NVML sees them; without NVML, driver or device it says why and looks at nothing.

    Args:
        nvml: the binding; tests give one of their own.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._xids: dict[int, list[int]] = {}
        self.count = 0
        self.why_not = ""
        """Why no device is looked at; empty: they are."""
        if nvml is None:
            self.why_not = "nvidia-ml-py is not installed"
            return
        try:
            nvml.nvmlInit()
            self.count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            self.why_not = f"no NVML here: {one_line(error)}"
            return
        if not self.count:
            self.why_not = "this host has no GPU"
            return
        self._listen()

    def _listen(self) -> None:
        """Ask for critical Xids; a driver that tells of none leaves that list empty."""
        nvml = self._nvml
        with contextlib.suppress(nvml.NVMLError):
            events = nvml.nvmlEventSetCreate()
            for index in range(self.count):
                with contextlib.suppress(nvml.NVMLError):
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self._events = events

    def read(self) -> tuple[Device, ...]:
        """Every device that is there, those included that do not answer."""
        if self.why_not:
            return ()
        self._collect_xids()
        try:
            present = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            return tuple(Device(index=index, lost=one_line(error)) for index in range(self.count))
        return tuple(self._device(index) for index in range(present))

    def _device(self, index: int) -> Device:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            nvml.nvmlDeviceGetMemoryInfo(handle)  # answers only where driver and device do
        except nvml.NVMLError as error:
            return Device(index=index, lost=one_line(error))
        uncorrected: int | None = None
        with contextlib.suppress(nvml.NVMLError):  # no ECC memory, or it is off
            kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            uncorrected = int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter))
        failed = False
        with contextlib.suppress(nvml.NVMLError):  # older devices retire pages instead
            failed = bool(nvml.nvmlDeviceGetRemappedRows(handle)[3])
        xids = tuple(self._xids.get(index, ()))
        return Device(index=index, uncorrected_ecc=uncorrected, remap_failed=failed, xids=xids)

    def _collect_xids(self) -> None:
        """Take the events that have come since the last look, without waiting for any."""
        nvml = self._nvml
        if self._events is None:
            return
        with contextlib.suppress(nvml.NVMLError):  # the time-out says that there is none left
            while True:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                index = int(nvml.nvmlDeviceGetIndex(event.device))
                self._xids.setdefault(index, []).append(int(event.eventData))

    def close(self) -> None:
        """Let NVML go."""
        if not self.why_not:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


def read(devices: DeviceProbe, folders: Iterable[Path], clock_offset: Callable[[], float | None]) -> Readings:
    """One look at everything; takes at most a few seconds, also where storage does not answer."""
    there = [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
    return Readings(
        devices=devices.read(),
        expected_devices=devices.count,
        no_devices=devices.why_not,
        disk_free={str(folder): (usage.free, usage.total) for folder in there if (usage := _usage(folder))},
        memory_free=_memory_free(),
        memory_stall=_memory_stall(),
        clock_offset=clock_offset(),
        writes={str(folder): write_probe(folder) for folder in there},
    )


def _usage(folder: Path) -> Any:
    try:
        return shutil.disk_usage(folder)
    except OSError:
        return None


def _memory_free() -> float | None:
    """``MemAvailable`` over ``MemTotal``."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) / int(lines["MemTotal"].split()[0])
    except (OSError, KeyError, ValueError, ZeroDivisionError):
        return None


def _memory_stall() -> float | None:
    """``some avg10`` of pressure stall information, percent."""
    try:
        first = Path("/proc/pressure/memory").read_text().split("\n", 1)[0]
        return float(dict(part.split("=") for part in first.split()[1:])["avg10"])
    except (OSError, KeyError, ValueError):
        return None


def write_probe(folder: Path, seconds: float = 2 * WRITE_SECONDS) -> float | str:
    """Seconds of a small durable write in ``folder``, or why it failed; storage that hangs is given up on."""
    answer: list[float | str] = []
    thread = threading.Thread(target=lambda: answer.append(_write(folder)), name="write-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else f"a small write did not end within {seconds:.0f} s"


def _write(folder: Path) -> float | str:
    path = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
    began = time.monotonic()
    try:
        with path.open("wb") as stream:
            stream.write(_PROBE)
            stream.flush()
            os.fsync(stream.fileno())
        path.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return f"a small write failed: {error.strerror or one_line(error)}"
    return time.monotonic() - began
