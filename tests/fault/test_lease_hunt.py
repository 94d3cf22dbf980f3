"""No slot is ever granted twice, whatever is killed; the long form is ``python -m tests.bench.leases --seconds 60``."""

from __future__ import annotations

from pathlib import Path

from tests.support.lease_hunt import as_json, hunting


def test_eight_racing_clients_find_no_double_grant_in_a_short_hunt(tmp_path: Path) -> None:
    with hunting(tmp_path / "hunt", seed=7) as hunt:
        result = hunt.run(14.0)
    seen = as_json(result)
    assert result.violations == []
    assert seen["granted"] > 100, seen
    assert seen["redis restarts"] >= 2, seen
    assert seen["bytes forgotten"] > 0, seen
    for what in ("expired", "lost", "revoked", "SlotsTakenError", "coordinators killed"):
        assert seen.get(what, 0) > 0, (what, seen)
