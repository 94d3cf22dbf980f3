"""What a node's agent can tell of its own health, judged without I/O: devices, disk, memory, clock, writes.

Only a broken device isolates its node: that is the node's own fault. Disk, memory, clock and a write that is slow or
fails are warnings in the event log. Storage is mostly shared, so isolating for it would take all nodes off at once, and
ranks and savers meet the failure themselves, each with its own remedy.

Xid codes: NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors). Those that an application can cause by itself (13,
31, 43, 45, 68) say nothing about the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

LEAST_FREE_DISK = 0.02
"""Share of a file system below which it is nearly full …"""
LEAST_FREE_BYTES = 1 << 30
"""… unless this much is free all the same."""
LEAST_FREE_MEMORY = 0.05
"""Share of memory that is left to programs below which pages are about to be taken from the page cache for good."""
MEMORY_STALL = 20.0
"""Percent of the last ten seconds in which some process waited for memory (``/proc/pressure/memory``)."""
CLOCK_SECONDS = 5.0
"""Offset from the cluster's clock: above it times in the event log mislead."""
WRITE_SECONDS = 5.0
"""A small durable write takes milliseconds; this long means that storage hardly answers."""
DEVICE_XIDS: Mapping[int, str] = {
    48: "double-bit ECC error",
    61: "driver error: internal microcontroller breakpoint",
    62: "driver error: internal microcontroller halt",
    64: "ECC page retirement or row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "driver error: the GPU's system processor does not answer",
    120: "driver error: the GPU's system processor failed",
}
"""Xid codes after which a device must not be used before a person looked at it."""


class State(StrEnum):
    """What a check says."""

    GOOD = "good"
    WARNING = "warning"
    BROKEN = "broken"  #: the node is to be isolated
    SKIPPED = "skipped"  #: there is nothing to look at; the reason says why


@dataclass(frozen=True, kw_only=True)
class Device:
    """What NVML says of one device; counters are since the driver was loaded."""

    index: int
    lost: str = ""
    """Why it does not answer; empty: it does."""
    uncorrected_ecc: int | None = None
    """None: the device has no ECC memory, or it is off."""
    remap_failed: bool = False
    """A broken row of memory could not be replaced by a spare one."""
    xids: tuple[int, ...] = ()
    """Critical events since the agent began to look."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """One look at the node; None where that could not be read."""

    devices: tuple[Device, ...] = ()
    expected_devices: int = 0
    """Devices that were there when the agent started."""
    no_devices: str = ""
    """Why no device is looked at; empty: they are."""
    disk_free: Mapping[str, tuple[int, int]]
    """Folder → (bytes free, bytes in all) of its file system."""
    memory_free: float | None = None
    """Share of memory that programs can still get."""
    memory_stall: float | None = None
    clock_offset: float | None = None
    """Seconds that this node's clock is ahead of the cluster's."""
    writes: Mapping[str, float | str]
    """Folder → seconds of a small durable write there, or why it failed."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: State
    reason: str


def judge(readings: Readings) -> tuple[Check, ...]:
    """All checks, in a fixed order of names."""
    return (
        _devices(readings),
        _ecc(readings),
        _xid(readings),
        _disk(readings),
        _memory(readings),
        _clock(readings),
        _writes(readings),
    )


def broken(checks: Sequence[Check]) -> str:
    """Why the node is to be isolated; empty: it is not."""
    return "; ".join(check.reason for check in checks if check.state is State.BROKEN)


def changes(before: Sequence[Check], after: Sequence[Check]) -> tuple[Check, ...]:
    """Checks whose state changed, those that were bad from the start included."""
    states = {check.name: check.state for check in before}
    quiet = (State.GOOD, State.SKIPPED)
    return tuple(
        check
        for check in after
        if check.state is not states.get(check.name, check.state if check.state in quiet else None)
    )


def _devices(readings: Readings) -> Check:
    if readings.no_devices:
        return Check("devices", State.SKIPPED, readings.no_devices)
    lost = [f"GPU is lost: number {device.index}: {device.lost}" for device in readings.devices if device.lost]
    missing = readings.expected_devices - len(readings.devices)
    if missing > 0:
        lost.append(f"GPU is lost: {missing} of {readings.expected_devices} are not there any more")
    if lost:
        return Check("devices", State.BROKEN, "; ".join(lost))
    return Check("devices", State.GOOD, f"{len(readings.devices)} GPUs answer")


def _ecc(readings: Readings) -> Check:
    known = [device for device in readings.devices if device.uncorrected_ecc is not None]
    if not known:
        return Check("ecc", State.SKIPPED, readings.no_devices or "no device has ECC memory that is on")
    bad = [f"GPU {d.index}: {d.uncorrected_ecc} uncorrected ECC errors" for d in known if d.uncorrected_ecc]
    bad += [f"GPU {d.index}: ECC row remapping failed" for d in readings.devices if d.remap_failed]
    if bad:
        return Check("ecc", State.BROKEN, "; ".join(bad))
    return Check("ecc", State.GOOD, "no uncorrected error")


def _xid(readings: Readings) -> Check:
    if readings.no_devices:
        return Check("xid", State.SKIPPED, readings.no_devices)
    seen = [(device.index, xid) for device in readings.devices for xid in device.xids]
    bad = [f"GPU {index}: Xid {xid}: {DEVICE_XIDS[xid]}" for index, xid in seen if xid in DEVICE_XIDS]
    if bad:
        return Check("xid", State.BROKEN, "; ".join(bad))
    if seen:
        return Check("xid", State.GOOD, f"only of applications: {sorted({xid for _, xid in seen})}")
    return Check("xid", State.GOOD, "none")


def _disk(readings: Readings) -> Check:
    full = [
        f"{folder}: {free / 2**30:.1f} GiB of {total / 2**30:.0f} GiB are free"
        for folder, (free, total) in readings.disk_free.items()
        if free < LEAST_FREE_BYTES or free < LEAST_FREE_DISK * total
    ]
    if full:
        return Check("disk", State.WARNING, "; ".join(full))
    return Check("disk", State.GOOD, f"{len(readings.disk_free)} folders have room")


def _memory(readings: Readings) -> Check:
    if readings.memory_free is None and readings.memory_stall is None:
        return Check("memory", State.SKIPPED, "the kernel tells neither free memory nor pressure")
    if readings.memory_free is not None and readings.memory_free < LEAST_FREE_MEMORY:
        return Check("memory", State.WARNING, f"{100 * readings.memory_free:.1f}% of memory is left")
    if readings.memory_stall is not None and readings.memory_stall > MEMORY_STALL:
        reason = f"processes waited for memory in {readings.memory_stall:.0f}% of the last ten seconds"
        return Check("memory", State.WARNING, reason)
    return Check("memory", State.GOOD, "no pressure")


def _clock(readings: Readings) -> Check:
    offset = readings.clock_offset
    if offset is None:
        return Check("clock", State.SKIPPED, "the cluster's clock could not be read")
    if abs(offset) > CLOCK_SECONDS:
        ahead = "ahead of" if offset > 0 else "behind"
        return Check("clock", State.WARNING, f"{abs(offset):.1f} s {ahead} the cluster's clock")
    return Check("clock", State.GOOD, f"within {CLOCK_SECONDS:.0f} s of the cluster's clock")


def _writes(readings: Readings) -> Check:
    bad = [f"{folder}: {found}" for folder, found in readings.writes.items() if isinstance(found, str)]
    bad += [
        f"{folder}: a small write took {found:.1f} s"
        for folder, found in readings.writes.items()
        if not isinstance(found, str) and found > WRITE_SECONDS
    ]
    if bad:
        return Check("writes", State.WARNING, "; ".join(bad))
    return Check("writes", State.GOOD, f"{len(readings.writes)} folders take durable writes")
