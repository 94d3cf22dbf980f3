"""What a node has to offer."""

from __future__ import annotations

import pytest

from pretrain.agent_devices import threads_of


@pytest.mark.parametrize(
    ("cores", "slots", "told", "threads"),
    [
        (8, 2, None, 4),
        (8, 2, "1", 1),
        (8, 2, "16", 4),
        (2, 3, None, 1),
        (8, 2, "", 4),
        (8, 2, "4,2", 4),
        (8, 2, "0", 4),
    ],
)
def test_a_slots_threads_are_its_share_and_no_more_than_told(
    cores: int, slots: int, told: str | None, threads: int
) -> None:
    assert threads_of(cores, slots, told) == threads
