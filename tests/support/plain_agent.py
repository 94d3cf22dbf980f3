"""``planaria agent`` whose ranks are :mod:`tests.support.plain_rank`: everything real but the training itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pretrain.agent import agent_command

if __name__ == "__main__":
    node, slots, address, state_dir, secret_file = sys.argv[1:6]
    sys.exit(
        agent_command(
            url=None,
            node=node,
            slots=int(slots),
            address=address,
            state_dir=Path(state_dir),
            secret_file=Path(secret_file),
            rank_program=(sys.executable, "-m", "tests.support.plain_rank"),
            abandon_seconds=float(os.environ.get("PLAIN_ABANDON_SECONDS", "120")),
        )
    )
