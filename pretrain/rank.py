"""One training process: ``python -m pretrain.rank SPEC.json``.

Reads its spec, connects to its agent, joins the others, builds or loads the model, trains. Exit codes: 0 done,
1 an exception (told to the agent first), 2 bad input, 3 the agent or the store is gone, 4 preempted, 5 no
checkpoint can be used.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from planner.errors import BadInputError, ExitCode, GivenUpError, MissingServiceError, PlanariaError, one_line
from pretrain.collective import collective_of

if TYPE_CHECKING:
    from planner.messages import RankSpec
    from pretrain.channel import Channel
    from pretrain.trainer import Trainer

_LONGEST_TRACEBACK = 20_000


class _Signals:
    """SIGTERM means: leave, and lose nothing. Installed before the heavy imports.

    The handler only writes to a pipe: locks that the interrupted code holds are out of its reach.
    """

    def __init__(self) -> None:
        self.terminated = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b".")

    def bind(self, trainer: Trainer) -> None:
        """Pass each signal on to ``trainer``, also one that came before."""
        threading.Thread(target=self._pass_on, args=(trainer,), name="signals", daemon=True).start()

    def _pass_on(self, trainer: Trainer) -> None:
        while os.read(self._read, 1):
            trainer.told_to_leave()


def read_spec(path: Path) -> RankSpec:
    """The spec in ``path``.

    Raises:
        BadInputError: it is not there, or no spec.
    """
    from planner.loading import validate
    from planner.messages import RankSpec

    try:
        import json

        return validate(RankSpec, json.loads(path.read_text()), str(path))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise BadInputError(f"{path}: not valid JSON: {one_line(error)}") from error


def open_channel(spec: RankSpec) -> Channel:
    """The channel to the agent, or standard output where there is none."""
    from planner.messages import RankHello
    from pretrain.channel import SocketChannel, StreamChannel

    hello = RankHello(
        token=spec.token,
        job=spec.job,
        incarnation=spec.incarnation,
        rank=spec.rank,
        pid=os.getpid(),
        # On GPUs the distributed optimizer cuts its state: no shard has a live replica.
        heals=spec.device == "cpu" and spec.config.health.heal_in_place,
    )
    if spec.agent_socket is None:
        channel: Channel = StreamChannel()
        channel.send(hello)
        return channel
    return SocketChannel(Path(spec.agent_socket), hello)


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    signals = _Signals()
    if len(arguments) != 1:
        print("usage: python -m pretrain.rank SPEC.json", file=sys.stderr)
        return ExitCode.BAD_INPUT
    try:
        spec = read_spec(Path(arguments[0]))
        limit_threads(spec.threads)
        channel = open_channel(spec)
    except PlanariaError as error:
        print(one_line(error), file=sys.stderr)
        return error.exit_code
    code = _train(spec, channel, signals)
    channel.close()
    return code


def limit_threads(threads: int) -> None:
    """Bound every thread pool; must come before torch is imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)


def _train(spec: RankSpec, channel: Channel, signals: _Signals) -> int:
    """Build, run and leave; whatever goes wrong is told to the agent before the process is gone."""
    from planner.messages import RankPhase

    trainer: Trainer | None = None
    channel.send(RankPhase(phase="start", step=0, time=time.time()))
    try:
        from pretrain import device

        device.prepare(spec.device)  # before whatever imports Megatron-core
        from pretrain.assembly import assemble

        gc.freeze()  # collections during training need not walk through what was imported
        trainer = assemble(spec, channel)
        signals.bind(trainer)
        channel.listen(trainer.on_agent)
        why = trainer.run()
    except BaseException as error:
        if type(error).__name__ == "DismissedError":
            print(one_line(error), file=sys.stderr, flush=True)
            return ExitCode.PREEMPTED if signals.terminated else ExitCode.DONE
        _tell_exception(channel, error, trainer)
        if isinstance(error, (BadInputError, MissingServiceError, GivenUpError)):
            print(one_line(error), file=sys.stderr, flush=True)
            return error.exit_code
        traceback.print_exc()
        return ExitCode.FAILED
    finally:
        _leave_groups()
    return ExitCode.PREEMPTED if why == "preempted" else ExitCode.DONE


def _tell_exception(channel: Channel, error: BaseException, trainer: Trainer | None) -> None:
    from planner.messages import RankException

    text = "".join(traceback.format_exception(error))
    channel.send(
        RankException(
            type=type(error).__name__,
            message=one_line(error)[:2000],
            traceback=text[-_LONGEST_TRACEBACK:],
            collective=collective_of(error),
            step=trainer.state.step + 1 if trainer else 0,
            phase=trainer.phase if trainer else "start",
            time=time.time(),
        )
    )


def _leave_groups() -> None:
    """Close the connections to the others, so that they notice at once."""
    parallel: Any = sys.modules.get("pretrain.parallel")
    if parallel is not None:
        try:
            parallel.leave()
        except Exception:  # on the way out; a group whose peer died may refuse to close
            traceback.print_exc()


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is said and closed; taking the interpreter and its libraries apart would hold the slot for seconds.
    os._exit(exit_code)
