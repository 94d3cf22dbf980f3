"""One exception hierarchy; every error that a user can cause or meet carries its exit code.

Messages are one line and name the file, the field, the value and what to do.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every ``planaria`` command (DESIGN.md, Contracts)."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    MISSING_SERVICE = 3
    PREEMPTED = 4
    GIVEN_UP = 5
    GATE_REGRESS = 6


class PlanariaError(Exception):
    """Root of all errors that Planaria raises on purpose. The work failed."""

    exit_code: ExitCode = ExitCode.FAILED


class WorkFailedError(PlanariaError):
    """The work was understood and started, and it failed."""


class BadInputError(PlanariaError):
    """The input is wrong: nothing was started and nothing half-made is left."""

    exit_code = ExitCode.BAD_INPUT


class MissingServiceError(PlanariaError):
    """A needed service or device is missing, unreachable or refuses us."""

    exit_code = ExitCode.MISSING_SERVICE


class PreemptedError(PlanariaError):
    """The work was told to leave; what it had is published: run it again."""

    exit_code = ExitCode.PREEMPTED


class GivenUpError(PlanariaError):
    """Restarting cannot help: a person must act before it is run again."""

    exit_code = ExitCode.GIVEN_UP


class GateRegressError(PlanariaError):
    """The evaluation gate says that the checkpoint is worse than its reference."""

    exit_code = ExitCode.GATE_REGRESS


class FencedError(PlanariaError):
    """A token older than the newest one was presented: the holder lost its right and must stop."""


def one_line(text: object) -> str:
    """Fold whatever an error says into a single line, for the one-line rule of exit code 2."""
    return " ".join(str(text).split())
