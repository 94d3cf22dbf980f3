"""A probe of the node check with one fault: ``python -m tests.support.faulty_probe slow|dead|mute``."""

from __future__ import annotations

import sys
import time
from typing import Any

from pretrain.nodecheck_probe import Probe, serve


class SlowProbe(Probe):
    """Computes at half speed: each product is done several times over."""

    def compute(self) -> float:
        return sum(super(SlowProbe, self).compute() for _ in range(3))


class MuteProbe(Probe):
    """Computes, but its network never answers."""

    def gather(self, request: dict[str, Any]) -> float:
        raise RuntimeError("network is unreachable")


if __name__ == "__main__":
    kind = sys.argv[1]
    if kind == "dead":
        time.sleep(0.1)
        sys.exit(1)
    serve({"slow": SlowProbe, "mute": MuteProbe}[kind]())
