"""What a node has to offer: its GPUs, or on a CPU-only host shares of its cores."""

from __future__ import annotations

import os
from dataclasses import dataclass

from planner.errors import BadInputError

DEFAULT_CPU_SLOTS = 3


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The slots of a node."""

    kind: str
    """``cpu`` or ``cuda``."""
    slots: int
    threads_per_slot: int
    memory_bytes: int

    def name(self, slot: int) -> str:
        """The device of a slot: ``cpu`` or ``cuda:N``."""
        return f"cuda:{slot}" if self.kind == "cuda" else "cpu"


def count_gpus() -> int:
    """GPUs that NVML sees; 0 without the library, the driver or a device."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def threads_of(cores: int, slots: int, told: str | None) -> int:
    """Threads of a slot: its share of the cores, but no more than ``OMP_NUM_THREADS`` tells (where other agents share
    the host, shares of all its cores would be too many: threads that spin for each other make steps of seconds)."""
    share = max(1, cores // slots)
    return min(share, int(told)) if told is not None and told.isdigit() and int(told) > 0 else share


def find_devices(wanted: int | None) -> Devices:
    """The slots to offer: ``wanted`` of them, or all GPUs, or :data:`DEFAULT_CPU_SLOTS`.

    Raises:
        BadInputError: more slots than GPUs are wanted on a GPU host.
    """
    gpus = count_gpus()
    if gpus and wanted is not None and wanted > gpus:
        raise BadInputError(f"--slots {wanted}: this host has {gpus} GPUs")
    slots = wanted or gpus or DEFAULT_CPU_SLOTS
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Devices(
        kind="cuda" if gpus else "cpu",
        slots=slots,
        threads_per_slot=threads_of(usable_cores(), slots, os.environ.get("OMP_NUM_THREADS")),
        memory_bytes=memory,
    )
