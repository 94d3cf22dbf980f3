"""What a forked child does to become a process of its own: session, log, exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import NoReturn


def live(log: str, run: Callable[[], int | None], *, append: bool) -> NoReturn:
    """Be a program: a session of one's own, no standard input, what is said goes to the file ``log``; never returns.

    ``run`` sets itself up and does the work; what it returns is the exit code (None: 0), an exception that it raises is
    printed and makes it 1, ``SystemExit`` means what it means at the end of any program.
    """
    code = 1
    try:
        os.setsid()
        tempfile.tempdir = None  # the child's environment may name another
        said = os.open(log, os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC), 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (said, 1), (said, 2)):
            os.dup2(source, target)
        code = run() or 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
