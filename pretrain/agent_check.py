"""The agent's part in a node check: one probe process, asked by the coordinator's :mod:`pretrain.nodechecks`."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from planner.messages import NodeProbed, ProbeNode

if TYPE_CHECKING:
    from pretrain.nodecheck import ProbeProcess

IDLE_SECONDS = 120.0
"""A probe that nobody asked for so long is ended: its check is over or its coordinator gone."""


class NodeProbe:
    """At most one probe; a new check ends the one before. ``take`` is called in the agent's main thread."""

    def __init__(
        self, device: str, report: Callable[[NodeProbed], None], now: Callable[[], float], adopt: Callable[[int], None]
    ) -> None:
        self._device, self._report, self._now, self._adopt = device, report, now, adopt
        self._check = ""
        self._asked: queue.Queue[ProbeNode | None] = queue.Queue()

    def take(self, command: ProbeNode) -> None:
        """Carry out one step, or pass it to the probe's thread."""
        if command.op == "start" and command.check != self._check:
            from pretrain.nodecheck import ProbeProcess, local_probe  # an agent that checks nothing starts without it

            self.close()
            self._check, self._asked = command.check, queue.Queue()
            process = subprocess.Popen(
                local_probe(self._device), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            self._adopt(process.pid)
            probe = ProbeProcess(command.check, process)
            threading.Thread(target=self._serve, args=(probe, self._asked), name="probe", daemon=True).start()
        if command.check != self._check:
            return
        self._asked.put(None if command.op == "end" else command)

    def close(self) -> None:
        """End the probe."""
        self._asked.put(None)
        self._check = ""

    def _serve(self, probe: ProbeProcess, asked: queue.Queue[ProbeNode | None]) -> None:
        try:
            while (command := asked.get(timeout=IDLE_SECONDS)) is not None:
                self._report(self._answer(probe, command))
        except queue.Empty:
            pass
        finally:
            probe.end()

    def _answer(self, probe: ProbeProcess, command: ProbeNode) -> NodeProbed:
        if command.op == "start":
            ready = probe.ask(None, command.seconds)
            answer = probe.ask({"op": "compute"}, command.seconds) if ready else None
            value = answer["compute_seconds"] if answer else None
        elif command.op == "listen":
            answer = probe.ask({"op": "listen", "group": command.group}, command.seconds)
            value = answer["port"] if answer else None
        else:
            request = {"op": "gather", "group": command.group, "rank": command.rank, "size": command.size,
                       "store": [command.host, command.port], "timeout": command.seconds}  # fmt: skip
            answer = probe.ask(request, 3 * command.seconds)
            value = answer["gather_seconds"] if answer else None
        error = str(answer.get("error", "")) if answer else "the probe gave no answer"
        return NodeProbed(time=self._now(), check=command.check, op=command.op, group=command.group, value=value,
                          error=error)  # fmt: skip
