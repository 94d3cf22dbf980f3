"""What slots cost and how they fail: ``allocator.yaml`` in the state directory, read anew whenever it changes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

from pydantic import Field

from planner.cost_aware import CostSettings
from planner.errors import BadInputError
from planner.lending import LendingPolicy
from planner.loading import Settings, load

log = logging.getLogger(__name__)

SETTINGS_FILE = "allocator.yaml"
"""Name of the settings file in the state directory; defaults hold without it."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class AllocatorSettings(Settings):
    """``allocator.yaml``: what slots cost and how they fail."""

    mtbf_gpu_hours: Positive = 12000.0
    """Mean slot-hours between failures; D_running = mtbf_gpu_hours·3600/slots seconds."""
    gpus_per_node: Annotated[int, Field(gt=0)] = 8
    """Slots that a lost node takes along, for the table of next events."""
    price_per_gpu_hour: Amount = 0.0
    """Currency per slot-hour; counts only together with ``flop_value``."""
    flop_value: Amount = 0.0
    """FLOP that one currency unit is worth."""
    repair_seconds: Amount = 0.0
    """Seconds until a lost slot is back; with ``spares`` above 0, slots are held in reserve where that pays."""
    spares: Annotated[int, Field(ge=0)] = 0
    """Most slots held in reserve."""
    stop_probability: Annotated[float, Field(ge=0, le=1)] = 0.05
    """How likely a report stops or rolls back the run that it judges (unverified default)."""
    horizon_bound_seconds: Positive = 14400.0
    """Longest lending horizon."""
    ageing_seconds: Positive = 7200.0
    """A waiting report's probability grows by 1 each time that it has waited this long."""

    def costs(self) -> CostSettings:
        """As the planner takes them."""
        return CostSettings(
            mtbf_gpu_hours=self.mtbf_gpu_hours,
            gpus_per_node=self.gpus_per_node,
            price_per_gpu_hour=self.price_per_gpu_hour,
            flop_value=self.flop_value,
            repair_seconds=self.repair_seconds,
            spares=self.spares,
            stop_probability=self.stop_probability,
            lending=LendingPolicy(horizon_bound=self.horizon_bound_seconds, ageing_seconds=self.ageing_seconds),
        )


def read_settings(state_dir: Path | None) -> CostSettings:
    """The settings of a state directory, or the defaults.

    Raises:
        BadInputError: the file is there and wrong.
    """
    path = None if state_dir is None else state_dir / SETTINGS_FILE
    return load(AllocatorSettings, path).costs() if path is not None and path.exists() else CostSettings()


class SettingsWatch:
    """The settings of a running allocator: prices change while it runs.

    Raises:
        BadInputError: the file is there and wrong when the allocator starts. Later a wrong file changes nothing.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._stamp = self._look()
        self.settings = read_settings(state_dir)

    def changed(self) -> bool:
        """Whether the file now says something else; ``settings`` has it then. One ``stat`` when it was not touched."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            found = read_settings(self._state_dir)
        except BadInputError as error:
            log.error("action=settings.refused reason=%s; the settings before it stay", error)
            return False
        before, self.settings = self.settings, found
        return found != before

    def _look(self) -> tuple[int, int, int] | None:
        if self._state_dir is None:
            return None
        try:
            seen = (self._state_dir / SETTINGS_FILE).stat()
        except OSError:
            return None
        return seen.st_mtime_ns, seen.st_size, seen.st_ino
