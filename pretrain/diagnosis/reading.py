"""Logs of any size as a stream of the lines that can matter, in bounded memory.

Routine lines are never materialised: each line of a block is looked up by its shape (its digits masked); shapes not
seen before are searched for signal words in one vectorised pass, and only lines with a hit are decoded and cleaned.
Line numbers are 1-based and split at ``\\n``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from os import SEEK_END
from pathlib import Path
from typing import NamedTuple

import numpy as np

from planner.errors import BadInputError

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 8192
"""What is kept of one line; the rest of a longer one is dropped (its beginning and end are kept)."""

_SIGNAL_WORDS = (
    b"rror", b"RROR", b"xception", b"raceback", b"Xid ", b"NCCL WARN", b"atchdog", b"ailed", b"ailure", b"AILURE",
    b"illed", b"DMAR", b"AMD-Vi", b"IO_PAGE_FAULT", b"iommu", b"SIGTERM", b"SIGKILL", b"SIGSEGV", b"signal", b"ssert",
    b"xitcode", b"xit code", b"CANCELLED", b"PREEMPT", b"reempt", b"link ", b"Link ", b"Down", b"down", b"NotReady",
    b"not-ready", b"oom_", b"oom-", b"OOM ", b"OOMK", b"ut of memory", b"Out Of Memory", b"timed out", b"imeout",
    b"TIMEOUT",
    b"NaN ", b" NaN", b"nan\n", b": nan", b"is nan", b" inf ", b": inf", b"fatal", b"FATAL", b"Fatal", b"panic",
    b"spike",
    b"iverge", b"EADDRINUSE", b" ECC", b"ECC ", b"NVLink", b"nvlink e", b"nvlink f", b"nvswitch", b"fallen off",
    b"rank      :", b"host      :",
    b"No space", b"quota", b"unreachable", b"refused", b"reset by peer", b"usage:", b"nhealthy", b"Terminated", b" GSP",
    b"NVRM", b"mismatch", b"ompleted", b"inished", b"exiting", b"exited", b"COMPLETED", b"orrupt", b"throttl",
    b"SlowDown",
    b"evict", b"Insufficient", b"not responding", b"Stale", b"lost", b"Lost", b"hung", b"stuck", b"no progress",
    b"stalled",
    b"Init COMPLETE", b"dmesg", b"kernel", b"journalctl", b"port error", b"port active", b"Got completion", b"truncat",
    b"checksum", b"not known", b"o route to", b"resolution", b"not found", b"cannot be found", b"is missing", b"denied",
    b"unrecognized", b"Broken pipe", b"onnection", b"recvVector", b"remote", b"retry", b"Retry", b"interrupt",
    b"reclaim",
    b"Device-side", b"device-side", b"illegal", b"CUDA", b"FAILED", b"DUE TO", b"carrier", b"training is done",
    b"raining ",
    b"Aborted", b"aborted", b"iteration", b"step", b"Step", b"iter ", b"No devices", b"device handle", b"Gained",
    b'  File "', b"loss'", b"batch=", b"return code", b"xhausted", b"low on", b"busy", b"navailable", b"dead because",
    b"not ready", b"minimum", b"ERROR", b"terminat", b"F_TRANS", b"event ", b"state_dict", b"size mism",
    b"No such", b"ost-mortem", b"journal", b"is down", b"nreachable", b"state ch", b"IS_LOST", b"MEMLIMIT", b"memory",
    b"not in struct", b"override", b"contains", b"an't open", b"emote daemon", b"ebooted", b"Preempt",
b"Errno", b"ould not", b"Unable", b"annot ", b"invalid", b"nvalid", b"exceed",
)  # fmt: skip
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_HEX = re.compile(rb"0x[0-9a-fA-F]+")
_UNCLEAN = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")
_FRAME, _TRACEBACK = b'  File "', b"Traceback (most recent"
AFTER_FRAME = 2
"""Lines after a traceback's frame that are read whatever they say: an exception may have any name."""
MAX_SHAPES = 40_000
MAX_SHAPE_BYTES = 1024
_SIGNAL, _FOLLOWED, _CLEANED = 1, 2, 4


class LogLine(NamedTuple):
    """One line that passed the prefilter: file, 1-based number and cleaned text (no colour codes, no CR).

    ``shape`` is the raw line with every digit turned to 0: lines of one shape say the same but for numbers. Empty
    where the line is not plain ASCII as it stands, so that offsets in shape and text always agree.
    """

    file: str
    number: int
    text: str
    shape: bytes = b""


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


def _blocks(path: Path, last_bytes: int | None = None) -> Iterator[bytes]:
    """Blocks that end at a line's end; a line longer than a block is shortened to its beginning and end."""
    rest = b""
    try:
        with path.open("rb") as stream:
            if last_bytes is not None and stream.seek(0, SEEK_END) > last_bytes:
                stream.seek(-last_bytes, SEEK_END)
                stream.readline()
            else:
                stream.seek(0)
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


class SignalFilter:
    """Finds the lines of a block that hold a signal word, for all words in one vectorised pass.

    Each word is looked for by its first four bytes as two pairs (the pair-table idea of Hyperscan's Teddy, NSDI'19):
    one table says which buckets of words a byte pair can begin, a second which ones the pair two bytes later can
    continue; where both agree the word itself is compared.
    """

    _BUCKETS = 16
    _SPAN = 1 << 16

    def __init__(self, words: Sequence[bytes] = _SIGNAL_WORDS) -> None:
        short = [word for word in words if len(word) < 4]
        if short:
            raise ValueError(f"signal words need at least four bytes, got {short}")
        self._first = np.zeros(1 << 16, np.uint16)
        self._second = np.zeros(1 << 16, np.uint16)
        self._by_head: dict[bytes, tuple[bytes, ...]] = {}
        pairs = sorted({word[:2] for word in words})
        for word in words:
            bit = 1 << (pairs.index(word[:2]) % self._BUCKETS)
            self._first[word[0] | word[1] << 8] |= bit
            self._second[word[2] | word[3] << 8] |= bit
            self._by_head[word[:4]] = (*self._by_head.get(word[:4], ()), word)

    def positions(self, block: bytes) -> list[int]:
        """Offsets in ``block`` where the first four bytes of some word may stand, ascending."""
        raw = np.frombuffer(block, np.uint8)
        found: list[int] = []
        for start in range(0, max(0, len(raw) - 3), self._SPAN):
            piece = raw[start : start + self._SPAN + 3]
            pairs = piece[:-1].astype(np.uint16)
            pairs |= piece[1:].astype(np.uint16) << 8
            hits = self._first[pairs[:-2]]
            hits &= self._second[pairs[2:]]
            found.extend((np.flatnonzero(hits) + start).tolist())
        return found

    def spans(self, block: bytes) -> Iterator[tuple[int, int, int]]:
        """(number of line ends before it, start, end) of each line that holds a signal word."""
        end, counted, number = -1, 0, 0
        heads = self._by_head
        for position in self.positions(block):
            if position <= end:
                continue
            words = heads.get(block[position : position + 4])
            if words is None or not any(block.startswith(word, position) for word in words):
                continue
            start = block.rfind(b"\n", 0, position) + 1
            end = block.find(b"\n", position)
            if end < 0:
                end = len(block)
            number += block.count(b"\n", counted, start)
            counted = start
            yield number, start, end


_FILTER = SignalFilter()


def without_addresses(shape: bytes) -> bytes:
    """A shape with the hexadecimal addresses taken out, whose letters differ from run to run."""
    return _HEX.sub(b"0x", shape) if b"0x" in shape else shape


class ShapeTable:
    """What is known of each shape of line: whether it holds a signal word, is a frame, and needs cleaning.

    Logs repeat themselves: most lines differ from earlier ones only in numbers, so most are judged by one look-up.
    The signal words hold no digits, so the answer is a property of the shape. Bounded; lines that are new are
    searched together in one vectorised pass.
    """

    def __init__(self, words: Sequence[bytes] = _SIGNAL_WORDS) -> None:
        self._filter = _FILTER if words is _SIGNAL_WORDS else SignalFilter(words)
        self._known: dict[bytes, int] = {}

    def judge(self, shapes: list[bytes]) -> list[int]:
        """Flags of each shape, in order."""
        flags = list(map(self._known.get, shapes))
        if None not in flags:
            return flags  # type: ignore[return-value]
        new = [shape for shape, flag in zip(shapes, flags, strict=True) if flag is None]
        keys = [without_addresses(shape) for shape in new]
        fresh = dict(zip(keys, map(self._known.get, keys), strict=True))
        fresh |= self._learn({key for key, flag in fresh.items() if flag is None})
        found = iter(keys)
        return [fresh[next(found)] if flag is None else flag for flag in flags]  # type: ignore[misc]

    def _learn(self, fresh: set[bytes]) -> dict[bytes, int]:
        rows = list(fresh)
        hits = {number for number, _, _ in self._filter.spans(b"\n".join(rows))}
        learned: dict[bytes, int] = {}
        for number, shape in enumerate(rows):
            flag = _SIGNAL if number in hits else 0
            if _FRAME in shape or _TRACEBACK in shape:
                flag |= _FOLLOWED
            if not shape.isascii() or len(shape) > MAX_LINE_BYTES or _UNCLEAN.search(shape):
                flag |= _CLEANED
            learned[shape] = flag
        if len(self._known) > MAX_SHAPES:
            self._known.clear()
        self._known.update((shape, flag) for shape, flag in learned.items() if len(shape) <= MAX_SHAPE_BYTES)
        return learned


class Block:
    """Some consecutive lines of a file: their shapes, which of them are wanted, and each as a line on demand."""

    def __init__(self, file: str, before: int, raw: bytes, shapes: list[bytes], flags: list[int], owed: int) -> None:
        self.file = file
        self.before = before
        """Number of the first line."""
        self.raw = raw
        self.shapes = shapes
        self._flags = flags
        self.wanted: list[int]
        """Indices of the lines that hold a signal word."""
        self.followers: frozenset[int] = frozenset()
        """Those of them that stand right after a traceback's frame."""
        self.owed = owed
        self.ends: list[int] = []
        """Where each line ends in ``raw`` if it had no line ends."""
        self._choose()
        if self.wanted:
            self.ends = list(accumulate(map(len, shapes)))

    def _choose(self) -> None:
        flags, kinds = self._flags, set(self._flags)
        if not self.owed and not any(kind & _FOLLOWED for kind in kinds):
            signals = {kind for kind in kinds if kind & _SIGNAL}
            self.wanted = [index for index, flag in enumerate(flags) if flag in signals] if signals else []
            return
        self.wanted, followers = [], []
        for index, flag in enumerate(flags):
            if flag & _FOLLOWED:
                self.owed = AFTER_FRAME
                self.wanted.append(index)
            elif flag & _SIGNAL or self.owed:
                self.wanted.append(index)
                if self.owed:
                    followers.append(index)
                    self.owed -= 1
        self.followers = frozenset(followers)

    def start(self, index: int) -> int:
        """Offset of a line in ``raw``."""
        return self.ends[index] - len(self.shapes[index]) + index

    def line(self, index: int) -> LogLine:
        """A wanted line, cleaned."""
        shape = self.shapes[index]
        raw = self.raw[self.start(index) : self.ends[index] + index]
        if self._flags[index] & _CLEANED:
            return LogLine(self.file, self.before + index, clean(raw))
        return LogLine(self.file, self.before + index, raw.decode("ascii"), shape)


class LogReader:
    """The signal lines of one file, with counts of what was read (``lines``, ``bytes``) once it is exhausted.

    ``last_bytes``: read only so much of its end; line numbers then count from there.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self.path = path
        self._last_bytes = last_bytes
        self.lines = 0
        self.bytes = 0
        self.kept = 0
        self.cut = False
        """The file's last line has no end: it was cut or is still being written."""
        self._shapes = ShapeTable()

    def __iter__(self) -> Iterator[LogLine]:
        for block in self.blocks():
            for index in block.wanted:
                yield block.line(index)

    def blocks(self) -> Iterator[Block]:
        """The file in blocks of whole lines."""
        owed = 0
        for raw in _blocks(self.path, self._last_bytes):
            shapes = raw.translate(_DIGITS).split(b"\n")
            if shapes[-1] == b"":
                shapes.pop()
            block = Block(str(self.path), self.lines + 1, raw, shapes, self._shapes.judge(shapes), owed)
            owed = block.owed
            self.lines += len(shapes)
            self.bytes += len(raw)
            self.kept += len(block.wanted)
            self.cut = not raw.endswith(b"\n")
            yield block


def all_lines(path: Path) -> Iterator[LogLine]:
    """Every line of a file, cleaned, in a stream: for compression, which looks at routine lines too."""
    name, number = str(path), 0
    for block in _blocks(path):
        for raw in block.split(b"\n")[: -1 if block.endswith(b"\n") else None]:
            number += 1
            yield LogLine(name, number, clean(raw))
