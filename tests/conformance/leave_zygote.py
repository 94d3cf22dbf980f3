"""A node in small, for the suite of :mod:`test_leave_collective`: forks ranks, breaks one, tells the others.

It imports torch and Megatron once and forks six ranks per case, so that a case takes a second and not ten. Reads
one case per line on standard input (``{"kind", "phase", "backend", "store"}``), writes one result per line:
``{"left": {rank: seconds}, "blocked": [ranks that never came out], "rejoined": [ranks], "natural": [ranks that
raised by themselves]}``. Seconds run from the death, or from the declaration that a silent rank hangs.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

import torch

from pretrain import device

WORLD, STAGES = 6, 2
VICTIM = 4
"""Data-parallel rank 1 of the last stage (rank = stage · 3 + data rank)."""
BREAK_AT = 2
"""The iteration in which the victim breaks: the first ones prove that the group works."""
SILENT = ("sigstop", "link_cut_in", "link_cut_out")
DECLARE_SECONDS = 0.3
"""After this the fake agent declares a silent rank hung."""
LIMIT_SECONDS = 20.0
"""A survivor that is not out by then is blocked."""
_PR_SET_PDEATHSIG = 1


def say(fd: int, **line: Any) -> None:
    """One line in one write: lines of several processes never mix."""
    os.write(fd, (json.dumps(line) + "\n").encode())


def connected() -> Iterator[socket.socket]:
    """This process's connected TCP sockets."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family == socket.AF_INET:
                    sock.getpeername()
                    yield sock
        except OSError:
            continue


def cut_links(peers: Collection[int] | None = None) -> None:
    """Let nothing in any more by this process's TCP sockets (those to ``peers``' ports, where given): a filter drops
    every packet, so that the other side gets neither acknowledgements nor resets."""
    drop_all = struct.pack("HBBI", 0x06, 0, 0, 0)
    program_bytes = ctypes.create_string_buffer(drop_all)
    program = struct.pack("HL", 1, ctypes.addressof(program_bytes))
    for sock in connected():
        if peers is None or sock.getpeername()[1] in peers:
            sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


def fail(kind: str, out: int) -> None:
    """Break this rank as the case says, after noting when."""
    ports = [sock.getsockname()[1] for sock in connected()] if kind == "link_cut_out" else []
    say(out, broke=time.monotonic(), ports=ports)
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "exit":
        os._exit(13)
    if kind == "link_cut_in":
        cut_links()
    if kind == "link_cut_out":
        # What goes out is dropped where it arrives: the node in small tells the others which ports are this rank's.
        time.sleep(0.1)


class Step:
    """One iteration's collectives in the order of a real step, on the groups of a real job."""

    def __init__(self, rank: int, case: dict[str, str], out: int) -> None:
        self.rank, self.case, self.out = rank, case, out

    def moment(self, phase: str, iteration: int) -> None:
        """The victim breaks just before the collective of its phase, so that the others wait in it."""
        if self.rank == VICTIM and phase == self.case["phase"] and iteration == BREAK_AT:
            fail(self.case["kind"], self.out)

    def run(self, iteration: int) -> None:
        """Forward and backward transfers between stages, reduction, optimizer's norm, evaluation, save."""
        from megatron.core import parallel_state
        from torch import distributed as dist

        data = torch.ones(1 << 16)
        first = parallel_state.is_pipeline_first_stage()
        peer = dist.get_rank() + (1 if first else -1) * parallel_state.get_data_parallel_world_size()
        group = parallel_state.get_pipeline_model_parallel_group()
        for phase, sends in (("forward", first), ("backward", not first)):
            self.moment(phase, iteration)
            (dist.send if sends else dist.recv)(data, peer, group=group)
        self.moment("reduce", iteration)
        dist.all_reduce(data, group=parallel_state.get_data_parallel_group())
        self.moment("optimizer", iteration)
        dist.all_reduce(data[:1])
        self.moment("evaluate", iteration)
        for _ in range(3):
            dist.all_reduce(data[:1], group=parallel_state.get_data_parallel_group())
        self.moment("save", iteration)
        dist.all_gather_object([None] * dist.get_world_size(), {"rank": self.rank})


def listen(fd: int, membership: Any) -> None:
    """The channel's thread: leaves when the agent says so, and drops what comes from ports that it names."""
    from pretrain.collective import leave_collective

    with os.fdopen(fd) as lines:
        for line in lines:
            ports = [int(port) for port in line.split()]
            if not ports:
                leave_collective(membership, "told by the agent")
                return
            cut_links(ports)


def rank_main(rank: int, case: dict[str, str], inbox: int, out: int) -> None:
    """A rank: works until it is out, says when, and joins the survivors' next incarnation."""
    from pretrain import parallel
    from pretrain.collective import Membership, leave_collective

    host, port = case["store"].split(":")
    membership = Membership(1)
    threading.Thread(target=listen, args=(inbox, membership), daemon=True).start()
    step = Step(rank, case, out)
    place = parallel.layout(rank, WORLD, 1, STAGES)
    try:
        with membership.joining():
            step.moment("reform", BREAK_AT)
            parallel.join(place, store_host=host, store_port=int(port), prefix=f"{case['name']}/1")
        for iteration in range(1000):
            step.run(iteration)
    except Exception as error:
        natural = not membership.left.is_set()
        leave_collective(membership, str(error))
        say(out, rank=rank, out=time.monotonic(), natural=natural, error=type(error).__name__)
    parallel.leave()
    if place.data_rank == parallel.layout(VICTIM, WORLD, 1, STAGES).data_rank:
        os._exit(0)
    rejoin(rank, case, out)
    os._exit(0)


def rejoin(rank: int, case: dict[str, str], out: int) -> None:
    """The intact replicas form the next incarnation in the same processes and complete an iteration."""
    from pretrain import parallel
    from pretrain.collective import Membership

    host, port = case["store"].split(":")
    new = {0: 0, 2: 1, 3: 2, 5: 3}[rank]
    with Membership(2).joining():
        place = parallel.layout(new, 4, 1, STAGES)
        parallel.join(place, store_host=host, store_port=int(port), prefix=f"{case['name']}/2")
    Step(-1, case, out).run(0)
    say(out, rejoined=rank)


def start(case: dict[str, str]) -> tuple[dict[int, int], dict[int, int], int]:
    """Fork the ranks: (pid of each, write end of each one's inbox, read end of what all say)."""
    read, write = os.pipe()
    pids: dict[int, int] = {}
    inboxes: dict[int, int] = {}
    for rank in range(WORLD):
        inbox, inboxes[rank] = os.pipe()
        pids[rank] = os.fork()
        if pids[rank] == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                rank_main(rank, case, inbox, write)
            finally:
                os._exit(99)
        os.close(inbox)
    os.close(write)
    return pids, inboxes, read


def run_case(case: dict[str, str]) -> dict[str, Any]:
    """Play the agent: see the victim go (or declare it hung), tell the others at once, collect what they say."""
    pids, inboxes, read = start(case)
    pidfd = os.pidfd_open(pids[VICTIM])
    silent = case["kind"] in SILENT
    broke = told = None
    left: dict[int, float] = {}
    natural: list[int] = []
    rejoined: list[int] = []
    deadline = time.monotonic() + LIMIT_SECONDS
    buffer = b""
    while len(rejoined) < 4 and time.monotonic() < deadline:
        due = broke + DECLARE_SECONDS if silent and broke is not None and told is None else deadline
        watch = [read, pidfd] if told is None else [read]
        ready, _, _ = select.select(watch, [], [], max(0.0, due - time.monotonic()))
        if told is None and (pidfd in ready or (silent and broke is not None and time.monotonic() >= due)):
            told = time.monotonic()
            tell(inboxes, [])
        if read in ready:
            chunk = os.read(read, 65536)
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in map(json.loads, lines):
                broke = line.get("broke", broke)
                if line.get("ports"):
                    tell(inboxes, line["ports"])
                if "out" in line and line["rank"] != VICTIM:
                    left[line["rank"]] = line["out"]
                    natural += [line["rank"]] if line["natural"] else []
                if "rejoined" in line:
                    rejoined.append(line["rejoined"])
    finish(pids, [read, pidfd, *inboxes.values()])
    since = (told if silent else broke) or 0.0
    return {
        "left": {rank: round(moment - since, 4) for rank, moment in sorted(left.items())},
        "blocked": sorted(set(range(WORLD)) - {VICTIM} - left.keys()),
        "rejoined": sorted(rejoined),
        "natural": sorted(natural),
    }


def tell(inboxes: dict[int, int], ports: list[int]) -> None:
    """Tell the survivors to drop what comes from these ports, or (none) to leave."""
    for rank, inbox in inboxes.items():
        if rank != VICTIM:
            os.write(inbox, (" ".join(map(str, ports)) + "\n").encode())


def finish(pids: dict[int, int], fds: list[int]) -> None:
    """End whoever is left and close what this case opened."""
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for pid in pids.values():
        os.waitpid(pid, 0)
    for fd in fds:
        os.close(fd)


def main() -> None:
    """Serve cases until standard input ends."""
    torch.set_num_threads(1)
    device.prepare("cpu")
    import pretrain.parallel  # noqa: F401

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run_case(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
