"""Shared fixtures: one Redis per session, thread bounds, and the environment that keeps every library offline."""

from __future__ import annotations

import os

for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}.items():
    os.environ.setdefault(_name, _value)

from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from tests.lanes import Lanes, take_lane  # noqa: E402
from tests.support.fork_server import engines, trainers  # noqa: E402, F401
from tests.support.redis import redis_of_session, store  # noqa: E402, F401

# Machines are shared: how long an example takes says nothing about the code. What judges a change gives the same
# verdict twice; new examples are looked for wherever else the tests run.
hypothesis.settings.register_profile("planaria", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("planaria")


def pytest_configure() -> None:
    """A worker beside the first keeps to its core."""
    take_lane()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes | None:
    """Each worker is a lane."""
    return Lanes(config, log)
