"""Random kills of workers, conductors and Redis connections: every request is answered once, as without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fleet_chaos import chaos


@pytest.mark.timeout(300)
def test_random_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    found = chaos(tmp_path, kills=40, runs=6, requests=1200, seed=7)
    assert set(found.kills) == {"worker", "conductor", "connection", "all connections"}
    assert (found.answered, found.wrong, found.failed) == (found.requests, 0, 0), found
