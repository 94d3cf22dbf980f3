"""Faults by coordinates: fire what the config asks for, once, and say so before it acts.

The trainer calls :meth:`Injector.fire` at fixed points of a step. Faults that end, stop or slow the process act
inside that call; those that change a value or a file are returned as :class:`Effect` for the caller to carry out
(:func:`distort_loss`, :func:`corrupt`).
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from planner.clock import Clock, SystemClock
from planner.messages import RankFault
from planner.pretrain_config import Fault, FaultKind, Phase

EXIT_CODE = 13
"""Exit code of the ``exit`` fault: none of the codes that mean something to Planaria."""

SPIKE_FACTOR = 8.0
"""What ``loss_spike`` multiplies the loss of a micro-batch by."""

LATER = frozenset({Phase.SAVE, Phase.EVALUATE, Phase.REFORM})
"""Phases that not every step has: a fault fires in the first such phase at its step *or after*."""

ACTS_IN = {
    FaultKind.NAN_LOSS: Phase.FORWARD, FaultKind.LOSS_SPIKE: Phase.FORWARD, FaultKind.CORRUPT_CHECKPOINT: Phase.SAVE,
}  # fmt: skip
"""Kinds that the caller carries out, and the phase whose caller can: fired in another one, they act in the next such
phase."""


class InjectedError(RuntimeError):
    """The exception of the ``exception`` fault: a software error on one rank."""


def default_phase(kind: FaultKind) -> Phase:
    """Where a fault without a phase fires: faults of storage in the save, all others in the forward pass."""
    return Phase.SAVE if kind in (FaultKind.CORRUPT_CHECKPOINT, FaultKind.DISK_FULL) else Phase.FORWARD


class Injector:
    """The faults of one rank.

    ``fired`` are the indices into ``faults`` that fired in earlier incarnations; ``origin_rank`` is the rank at
    the job's start, which coordinates name. ``report`` receives a :class:`planner.messages.RankFault` before a
    fault acts and must hand it to the kernel (not to a buffer of this process) before it returns.
    ``slow_seconds`` is what a ``slow`` fault adds to the step.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        fired: Iterable[int],
        origin_rank: int,
        report: Callable[[RankFault], None],
        *,
        slow_seconds: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        done = set(fired)
        self._pending = {
            index: fault for index, fault in enumerate(faults) if fault.rank == origin_rank and index not in done
        }
        self._carried: list[FaultKind] = []
        self._report = report
        self._slow_seconds = slow_seconds
        self._clock = clock or SystemClock()

    @property
    def pending(self) -> tuple[int, ...]:
        """Indices of this rank's faults that have not fired yet."""
        return tuple(self._pending)

    def forget(self, fired: Iterable[int]) -> None:
        """Drop faults that are known to have fired elsewhere (the supervisor's list in a re-form)."""
        for index in fired:
            self._pending.pop(index, None)

    def fire(self, phase: Phase, step: int, micro_batch: int | None = None) -> tuple[FaultKind, ...]:
        """Fire all faults of this moment; ``micro_batch`` counts this rank's own in this step, from 0.

        Returns the kinds that the caller must carry out (:data:`ACTS_IN`), in the order in which they fired. A fault
        of a micro-batch that this rank does not have fires after its last one, in the reduction.

        Raises:
            InjectedError: kind ``exception``.
            torch.distributed.DistBackendError: kind ``nccl_error``.
            OSError: kind ``disk_full`` (ENOSPC).
        """
        due = [index for index, fault in self._pending.items() if _due(fault, phase, step, micro_batch)]
        if not due and not self._carried:
            return ()
        faults = [self._pending.pop(index) for index in due]
        for index in due:
            self._report(
                RankFault(index=index, step=step, phase=phase.value, micro_batch=micro_batch, time=self._clock.time())
            )
        for fault in sorted(faults, key=lambda fault: fault.kind != FaultKind.SLOW):
            if fault.kind not in ACTS_IN:
                self._act(fault.kind, step, phase)
        carried = [*self._carried, *(fault.kind for fault in faults if fault.kind in ACTS_IN)]
        self._carried = [kind for kind in carried if ACTS_IN[kind] != phase]
        return tuple(kind for kind in carried if ACTS_IN[kind] == phase)

    def _act(self, kind: FaultKind, step: int, phase: Phase) -> None:
        where = f"injected at step {step}, {phase.value}"
        if kind == FaultKind.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == FaultKind.SIGSTOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == FaultKind.EXIT:
            os._exit(EXIT_CODE)
        elif kind == FaultKind.HANG:
            while True:
                self._clock.sleep(3600.0)
        elif kind == FaultKind.SLOW:
            self._clock.sleep(self._slow_seconds)
        elif kind == FaultKind.DISK_FULL:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({where})")
        elif kind == FaultKind.NCCL_ERROR:
            from torch.distributed import DistBackendError

            raise DistBackendError(
                f"NCCL error: unhandled system error, ncclRemoteError: remote process exited ({where})"
            )
        else:
            raise InjectedError(f"fault of kind exception, {where}")


def _due(fault: Fault, phase: Phase, step: int, micro_batch: int | None) -> bool:
    wanted = fault.phase or default_phase(fault.kind)
    if wanted in LATER:
        return phase == wanted and step >= fault.at_step
    if step != fault.at_step:
        return False
    if phase == wanted:
        return phase not in (Phase.FORWARD, Phase.BACKWARD) or (fault.micro_batch or 0) == (micro_batch or 0)
    return phase == Phase.REDUCE and wanted in (Phase.FORWARD, Phase.BACKWARD)


def distort_loss(loss: Any, effects: Iterable[FaultKind]) -> Any:
    """The loss (a tensor or float) after ``nan_loss`` and ``loss_spike``."""
    for kind in effects:
        if kind == FaultKind.NAN_LOSS:
            loss = loss * float("nan")
        elif kind == FaultKind.LOSS_SPIKE:
            loss = loss * SPIKE_FACTOR
    return loss


def corrupt(folder: Path) -> Path:
    """Flip one bit in the middle of the largest file below ``folder`` and return its path.

    Raises:
        FileNotFoundError: there is no file that is not empty.
    """
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size > 0 and path.name != "manifest.json"
    ]
    if not files:
        raise FileNotFoundError(f"{folder}: no file whose content could be damaged")
    victim = max(files, key=lambda path: (path.stat().st_size, str(path)))
    with victim.open("r+b") as stream:
        stream.seek(victim.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
        stream.flush()
        os.fsync(stream.fileno())
    return victim
