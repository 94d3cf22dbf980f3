"""Logs of any size as a stream of the lines that can matter, in bounded memory.

Routine lines are never materialised: each block of the file is searched for signal words by one compiled pattern,
and only the lines around a hit are cut out, decoded and cleaned. Line numbers are 1-based and split at ``\\n``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planner.errors import BadInputError

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 8192
"""What is kept of one line; the rest of a longer one is dropped (its beginning and end are kept)."""

_SIGNAL_WORDS = (
    b"rror", b"RROR", b"xception", b"raceback", b"Xid", b"NCCL WARN", b"atchdog", b"ailed", b"ailure", b"AILURE",
    b"illed", b"DMAR", b"AMD-Vi", b"IO_PAGE_FAULT", b"SIGTERM", b"SIGKILL", b"SIGSEGV", b"signal", b"ssert", b"xitcode",
    b"xit code", b"CANCELLED", b"PREEMPT", b"reempt", b"Link DOWN", b"Link UP", b"link down", b"link is not ready",
    b"Down", b"NotReady", b"oom", b"OOM", b"ut of memory", b"timed out", b"imeout", b"TIMEOUT", b"NaN", b"nan", b"fatal",
    b"FATAL", b"panic", b"spike", b"diverge", b"EADDRINUSE", b"ECC", b"NVLink", b"fallen off", b"rank      :",
    b"host      :", b"No space", b"quota", b"unreachable", b"refused", b"reset by peer", b"usage:", b"unhealthy", b"Terminated",
    b"GSP", b"NVRM", b"completed", b"finished", b"exit", b"orrupt", b"throttl", b"SlowDown", b"evict",
    b"Insufficient", b"not responding", b"Stale", b"lost", b"hung", b"stuck", b"no progress", b"Init COMPLETE",
    b"dmesg", b"kernel", b"journalctl", b"port error", b"port active", b"Got completion",
)  # fmt: skip
_PROGRESS = rb"iteration\s+\d+\s*/|\bstep[ =:]+\d+"
_SIGNAL = re.compile(rb"(?:" + b"|".join(re.escape(word) for word in _SIGNAL_WORDS) + b"|" + _PROGRESS + rb")")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line that passed the prefilter: file, 1-based number and cleaned text (no colour codes, no CR)."""

    file: str
    number: int
    text: str


def clean(raw: bytes) -> str:
    """A raw line as text: broken UTF-8 replaced, colour codes, carriage returns and control bytes removed."""
    if len(raw) > MAX_LINE_BYTES:
        half = MAX_LINE_BYTES // 2
        raw = raw[:half] + b" ... " + raw[-half:]
    text = raw.decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    if "\r" in text:  # a progress bar rewrites its line: what stood last is what a reader saw
        text = text.rsplit("\r", 1)[-1]
    return _CONTROL.sub("", text)


def _blocks(path: Path) -> Iterator[bytes]:
    """Blocks that end at a line's end; a line longer than a block is shortened to its beginning and end."""
    rest = b""
    try:
        with path.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                cut = block.rfind(b"\n") + 1
                if cut == 0:
                    rest = _shorten(rest + block)
                    continue
                yield rest + block[:cut]
                rest = block[cut:]
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file; name an existing log") from None
    except IsADirectoryError:
        raise BadInputError(f"{path}: is a folder; name the log files in it") from None
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    if rest:
        yield rest


def _shorten(piece: bytes) -> bytes:
    if len(piece) <= 2 * MAX_LINE_BYTES:
        return piece
    return piece[:MAX_LINE_BYTES] + piece[-MAX_LINE_BYTES:]


class LogReader:
    """The signal lines of one file, with counts of what was read (``lines``, ``bytes``) once it is exhausted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = 0
        self.bytes = 0
        self.kept = 0
        self.cut = False
        """The file's last line has no end: it was cut or is still being written."""

    def __iter__(self) -> Iterator[LogLine]:
        name = str(self.path)
        for block in _blocks(self.path):
            yield from self._signals(block, name)
            self.lines += block.count(b"\n")
            self.bytes += len(block)
            self.cut = not block.endswith(b"\n")
        if self.cut:
            self.lines += 1

    def _signals(self, block: bytes, name: str) -> Iterator[LogLine]:
        position, counted, number = 0, 0, self.lines + 1
        while hit := _SIGNAL.search(block, position):
            start = block.rfind(b"\n", 0, hit.start()) + 1
            end = block.find(b"\n", hit.end())
            if end < 0:
                end = len(block)
            number += block.count(b"\n", counted, start)
            counted = start
            self.kept += 1
            yield LogLine(name, number, clean(block[start:end]))
            position = end
