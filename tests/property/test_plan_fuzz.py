"""Whatever stands in a cluster file, ``planaria plan`` prints strict JSON or refuses in one line; never a traceback."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import BadInputError
from planner.plan_command import plan_file, to_json

EXTREMES = [10**15, -(10**30), 1e300, 1e-300, 5e-324, math.nan, math.inf, -0.0]
weird: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from(EXTREMES),
    st.floats(0, 1e16),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.integers(0, 40), st.floats(0, 1e16), max_size=3),
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Right seven times in eight."""
    return st.integers(0, 7).flatmap(lambda dice: weird if dice == 0 else good)


cluster = st.fixed_dictionaries(
    {"gpus": mostly(st.integers(1, 40))},
    optional={
        "mtbf_gpu_hours": mostly(st.floats(0.1, 1e6)),
        "price_per_gpu_hour": mostly(st.floats(0, 10)),
        "flop_value": mostly(st.floats(0, 1e18)),
        "spare_value": mostly(st.floats(0, 1e22)),
        "spares": mostly(st.integers(0, 50)),
    },
)
job = st.fixed_dictionaries(
    {
        "name": mostly(st.sampled_from(["a", "b", "c", "[x]", "ä", "evaluation"])),
        "throughput": mostly(st.dictionaries(st.integers(1, 40), mostly(st.floats(0, 1e16)), min_size=1, max_size=4)),
    },
    optional={
        "kind": mostly(st.sampled_from(["pretrain", "evaluation"])),
        "weight": mostly(st.floats(0, 4)),
        "min_workers": mostly(st.integers(0, 40)),
        "workers": mostly(st.integers(0, 45)),
        "faulted": mostly(st.booleans()),
        "transition_seconds": mostly(st.floats(0, 1e4)),
    },
)


@given(cluster, st.lists(job, max_size=4))
@settings(max_examples=150)
def test_a_plan_or_one_line(given_cluster: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.yaml"
        path.write_text(yaml.safe_dump({"cluster": given_cluster, "jobs": jobs}, allow_unicode=True), encoding="utf-8")
        refused: BadInputError | None = None
        try:
            _, decision = plan_file(path, explain=True)
        except BadInputError as error:
            refused = error
    if refused is not None:
        assert "fuzz.yaml" in str(refused)
        assert "\n" not in str(refused)
        return
    document = json.loads(json.dumps(to_json(decision, explain=True), allow_nan=False))
    counts = document["assignments"]
    assert sum(counts.values()) + document["unassigned"] == int(given_cluster["gpus"])
    assert document["unassigned"] >= 0
    for one in jobs:
        listed = {int(count) for count in one["throughput"]}
        assert counts[one["name"]] in {0, *listed}
        assert counts[one["name"]] == 0 or counts[one["name"]] >= int(one.get("min_workers", 1) or 0)
    assert all(other["cost"] >= 0 for other in document["runner_ups"])
