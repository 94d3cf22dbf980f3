"""Forks stub workers and conductors: hundreds of them cost one import. Each line on standard input is a JSON object.

``{"worker": NAME}`` starts a stub worker of the private fleet at ``PLANARIA_URL``, ``{"conductor": NUMBER}`` a
conductor that works off ``FLEET_RUNS`` (see :mod:`tests.support.fleet_chaos`). Answers with the child's pid.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from importlib import import_module
from typing import Any


def main() -> None:
    """Serve until standard input ends."""
    for name in ("celery.concurrency.thread", "celery.worker.consumer", "kombu.transport.redis", "evalsched.app"):
        import_module(name)
    from tests.support import fleet_chaos, stub_worker

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child: it is gone when it ends
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.environ["PLANARIA_PRIVATE_PARENT"] = str(os.getppid())
            try:
                if "worker" in command:
                    sys.argv[1:] = ["--kind", "infer", "--name", command["worker"]]
                    code = stub_worker.main()
                else:
                    code = fleet_chaos.conduct(int(command["conductor"]))
            except BaseException as error:
                print(f"{command}: {error!r}", file=sys.stderr, flush=True)
                code = 1
            os._exit(code)
        print(json.dumps({"pid": child}), flush=True)


if __name__ == "__main__":
    main()
