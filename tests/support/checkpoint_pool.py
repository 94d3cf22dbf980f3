"""A pool of rank processes for checkpoint tests: start once, re-join in any layout, kill, collect answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import time
from pathlib import Path
from typing import Any

from tests.support.fork_server import ForkServer


class RankFailedError(AssertionError):
    """A rank answered with an error."""


class Member:
    """One rank process and its two pipes."""

    def __init__(self, log: Path, trainers: ForkServer) -> None:
        self.log = log
        commands, command_end = os.pipe()
        self._read, answers = os.pipe()
        self.process = trainers.start("tests.support.checkpoint_rank:main", out=log, stdin=commands, keep=answers)
        os.close(commands)
        os.close(answers)
        self._commands = os.fdopen(command_end, "w", buffering=1)
        self._buffer = b""

    def send(self, do: str, **arguments: Any) -> None:
        """Give a command without waiting for its answer."""
        self._commands.write(json.dumps({"do": do} | arguments) + "\n")

    def answer(self, seconds: float = 90) -> Any:
        """The next answer; raises when the rank failed, died or took too long."""
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._read], [], [], left)[0]:
                raise TimeoutError(f"no answer after {seconds} s\n{self.tail()}")
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RankFailedError(f"rank died with {self.process.wait()}\n{self.tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if "error" in message:
            raise RankFailedError(f"{message['error']}\n{message['traceback']}")
        return message.get("value")

    def tail(self) -> str:
        """The last lines of the rank's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def kill(self) -> None:
        """End the process and whatever it started."""
        self.process.kill()
        self.process.wait()
        os.close(self._read)
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()


class Pool:
    """Ranks that can form any layout of up to ``size`` processes."""

    def __init__(self, size: int, folder: Path, trainers: ForkServer) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._prefix = itertools.count()
        self.members = [Member(folder / f"rank-{index}.log", trainers) for index in range(size)]
        for member in self.members:
            member.answer()
        self.active: list[Member] = []

    def join(self, tensor: int = 1, pipeline: int = 1, data: int = 1, **overrides: Any) -> None:
        """Form a layout from the first ranks; model and optimizer start from the seed."""
        world = tensor * pipeline * data
        for member in self.active[world:]:
            member.send("leave")
        for member in self.active[world:]:
            member.answer()
        self.active = self.members[:world]
        prefix = f"pool/{next(self._prefix)}"
        for rank, member in enumerate(self.active):
            member.send(
                "join", rank=rank, world=world, tensor=tensor, pipeline=pipeline, port=self._store.port, prefix=prefix,
                **overrides,
            )  # fmt: skip
        for member in self.active:
            member.answer()

    def all(self, do: str, seconds: float = 90, **arguments: Any) -> list[Any]:
        """Run one command on every active rank and return the answers in rank order."""
        for member in self.active:
            member.send(do, **arguments)
        return [member.answer(seconds) for member in self.active]

    def errors(self, do: str, seconds: float = 90, **arguments: Any) -> list[str]:
        """Run a command that fails on every active rank; each rank's error."""
        for member in self.active:
            member.send(do, **arguments)
        found = []
        for rank, member in enumerate(self.active):
            try:
                value = member.answer(seconds)
            except RankFailedError as error:
                found.append(str(error).splitlines()[0])
            else:
                found.append(f"rank {rank} did not fail: {value}")
        return found

    def train(self, steps: int) -> list[float]:
        """Train; the losses as rank 0 knows them."""
        return list(self.all("train", steps=steps)[0])

    def close(self) -> None:
        """End all ranks."""
        for member in self.members:
            member.kill()
