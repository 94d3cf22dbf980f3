"""Checkpoints in an object store: handed over to the persister, which alone writes there; fetched to be loaded."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from planner.errors import GivenUpError
from pretrain import published
from pretrain.handover import HandedOverCheckpoints, gathered
from pretrain.megatron_format import SaveFailedError, agreed
from pretrain.state import TrainState
from pretrain.targets import Target, open_target


@dataclass
class RemoteCheckpoints(HandedOverCheckpoints):
    """As its base, with an fsspec URL for a folder. ``folder`` is where fetched checkpoints are kept."""

    url: str = ""

    @cached_property
    def target(self) -> Target:
        """The object store; opened where it is needed."""
        return open_target(self.url, Path(tempfile.gettempdir()))

    def claim(self) -> None:
        """Take the right to publish (collective).

        Raises:
            SaveFailedError: a newer incarnation has it, or the store does not answer; on every rank.
        """
        with agreed(f"claiming {self.url}"):
            if self._main:
                self.target.claim(self.fence)

    def find(self, named: str | None) -> Path | None:
        """Fetch the newest checkpoint that verifies, once per node (collective).

        Raises:
            GivenUpError: there are checkpoints and none can be used, and ``checkpoint.start_over`` is false.
            SaveFailedError: the store does not answer; on every rank.
        """
        found: tuple[Path | None, int] = (None, 0)
        with agreed(f"looking for checkpoints in {self.url}"):
            if self.placement is not None and self.placement.first:
                found = self._fetch()
        newest: Path | None
        newest, broken = gathered(found)[0]
        if newest is None and broken and not self.parts.config.checkpoint.start_over:
            raise GivenUpError(
                f"{self.url}: none of {broken} checkpoints can be used; the event log says why. Repair one, or set "
                "checkpoint.start_over to begin from random weights"
            )
        return newest

    def _fetch(self) -> tuple[Path | None, int]:
        """The newest that verifies, in :attr:`folder`, which holds nothing else afterwards; and how many do not."""
        newest, refused = self.target.newest_verified(self.folder)
        for _, path in published.step_dirs(self.folder):
            if path != newest:
                published.remove_tree(path)
        for one in refused:
            self._tell("refused", one.step, one.path, reason=one.reason)
        return newest, len(refused)

    def _agree_on_way(self) -> bool:
        """There is no other way than through host memory.

        Raises:
            SaveFailedError: host memory cannot serve; on every rank.
        """
        super()._agree_on_way()
        if not self._can:
            raise SaveFailedError(
                f"{self.url}: rank 0's node has no host memory or not every part of the model, so no persister can "
                "publish it; name a shared folder as checkpoint.dir"
            )
        return True

    def hands_over(self) -> bool:
        """Always."""
        return True

    def _save_directly(self, state: TrainState) -> None:
        raise SaveFailedError(f"{self.url}: step {state.step} had no room in host memory")
