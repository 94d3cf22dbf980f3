"""The rendezvous store of a job: a process beside an agent, never inside a rank.

``python -m pretrain.store --fd N --host ADDRESS --port P --parent PID``: the agent binds and listens before it
tells anyone the port, and hands the socket over, so that no port is taken in between and ranks may connect while
this process still imports. One store serves all incarnations of a job, each under its own prefix. It ends with
the agent that started it; ranks may come and go.
"""

from __future__ import annotations

import argparse
import signal

from planner.processes import die_with_parent


def serve(fd: int, host: str, port: int) -> None:
    """Serve on the listening socket ``fd`` until a signal comes."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del store


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", required=True, type=int)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--parent", required=True, type=int)
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    die_with_parent(arguments.parent)
    serve(arguments.fd, arguments.host, arguments.port)


if __name__ == "__main__":
    main()
