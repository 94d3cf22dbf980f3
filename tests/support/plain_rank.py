"""A rank without torch for tests of the agent and the supervisor: the real channel, the real fault injector, the real
manifests; the "training" is arithmetic whose result depends on every sample, so that a lost or doubled step shows.

Ranks meet in every step by files in the job's folder, and like gloo's they raise when a peer is gone.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
import traceback
from pathlib import Path

from planner import manifest
from planner.errors import BadInputError
from planner.messages import RankCheckpoint, RankDone, RankException, RankHello, RankPhase, RankSpec, RankStep
from planner.pretrain_config import Phase
from pretrain import published
from pretrain.channel import SocketChannel
from pretrain.faults import Injector
from pretrain.order import SampleOrder

SAMPLES = 1000


def step_seconds(name: str) -> float:
    """Seconds of a step of the job ``name``: ``plain-100ms`` takes a tenth."""
    found = re.search(r"-(\d+)ms$", name)
    return int(found.group(1)) / 1000 if found else 0.02


class Peers:
    """Lock-step through files: ``<folder>/sync/<incarnation>/<rank>`` holds the last step and the process id."""

    def __init__(self, spec: RankSpec) -> None:
        self.folder = Path(spec.job_folder) / "sync" / str(spec.incarnation)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.spec = spec
        self.said = ""

    def meet(self, step: int, said: str = "") -> list[str]:
        """Wait until every peer came as far; what each of them said. Raises ConnectionError when one is gone."""
        mine = self.folder / f"{self.spec.rank}"
        mine.with_suffix(".tmp").write_text(f"{step} {os.getpid()} {said}")
        mine.with_suffix(".tmp").rename(mine)
        words: list[str] = []
        for peer in range(self.spec.world_size):
            path = self.folder / f"{peer}"
            while True:
                at, pid, word = path.read_text().split(" ", 2) if path.exists() else ("-1", "0", "")
                if int(at) >= step:
                    words.append(word)
                    break
                if pid != "0" and not Path(f"/proc/{pid}").exists():
                    raise ConnectionError(f"Connection reset by peer: rank {peer} is gone")
                time.sleep(0.002)
        return words


class PlainRank:
    """One rank's run."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec = spec
        self.config = spec.config
        hello = RankHello(token=spec.token, job=spec.job, incarnation=spec.incarnation, rank=spec.rank, pid=os.getpid())
        assert spec.agent_socket is not None
        self.channel = SocketChannel(Path(spec.agent_socket), hello)
        self.peers = Peers(spec)
        self.injector = Injector(self.config.faults, spec.fired_faults, spec.origin_rank, self.channel.send)
        self.order = SampleOrder(SAMPLES, self.config.seed)
        self.step, self.loss, self.why = 0, 100.0, ""
        self.phase_now = "start"
        signal.signal(signal.SIGTERM, lambda *_: self._ask("preempted"))
        self.channel.listen(lambda message: self._ask(message.why) if message.kind == "stop" else None)

    def _ask(self, why: str) -> None:
        self.why = why

    def enter(self, phase: str, step: int) -> None:
        self.phase_now = phase
        self.channel.send(RankPhase(phase=phase, step=step, time=time.time()))

    def run(self) -> int:
        self.enter("start", 0)
        self.peers.meet(0)
        self.enter("load", 0)
        if self.spec.resume is not None:
            state = json.loads((Path(self.spec.resume) / "state.json").read_text())
            self.step, self.loss = state["step"], state["loss"]
            self._checkpoint("loaded", Path(self.spec.resume))
        why = "completed"
        while self.step < self.config.steps:
            why = self.one_step()
            if why != "completed":
                self.publish()
                break
        self.channel.send(RankDone(step=self.step, why=why, time=time.time()))  # type: ignore[arg-type]
        self.channel.close()
        return 4 if why == "preempted" else 0

    def one_step(self) -> str:
        step, world, rank = self.step + 1, self.spec.world_size, self.spec.rank
        self.enter("step", step)
        started = time.monotonic()
        ids = self.order.batch(self.step * self.config.batch.global_, self.config.batch.global_)
        if self.config.name == "hopeless":
            os._exit(13)
        self._misbehave(step, rank)
        self.injector.fire(Phase.FORWARD, step, 0)
        time.sleep(step_seconds(self.config.name))
        words = self.peers.meet(step, self.why)
        self.loss = self.loss * 0.99 + sum(ids) / SAMPLES / 1000
        self.step = step
        self.channel.send(
            RankStep(
                step=step, loss=self.loss, grad_norm=1.0, tokens=100, seconds=time.monotonic() - started, lr=0.1,
                workers=world, ids=list(ids[rank::world]), incarnation=self.spec.incarnation, time=time.time(),
            )
        )  # fmt: skip
        if step % self.config.checkpoint.every_steps == 0 or step == self.config.steps:
            self.publish()
        return next((word for word in words if word), "completed")

    def _misbehave(self, step: int, rank: int) -> None:
        """A fault in the program: ``bug`` at step 6 of every incarnation, ``bug-once`` of the first one only;
        ``mute-bug`` tells nobody but its log."""
        name = self.config.name
        due = name in ("bug", "mute-bug") or (name == "bug-once" and self.spec.incarnation == 1)
        if not due or step != 6 or rank != 0:
            return
        try:
            raise KeyError("router")
        except KeyError:
            if name != "mute-bug":
                raise
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def publish(self) -> None:
        """Rank 0 publishes; the others wait for it."""
        self.enter("save", self.step)
        if self.spec.rank == 0:
            self._publish_step()
        self.peers.meet(self.step, "")

    def _publish_step(self) -> None:
        folder = Path(self.spec.job_folder) / "checkpoints"
        target = folder / manifest.step_dir_name(self.step)
        if (target / manifest.NAME).exists():
            return
        target.mkdir(parents=True, exist_ok=True)
        (target / "state.json").write_text(json.dumps({"step": self.step, "loss": self.loss}))
        manifest.publish(
            target, job=self.spec.job, step=self.step, consumed_samples=self.step * self.config.batch.global_,
            incarnation=self.spec.incarnation, created=time.time(),
        )  # fmt: skip
        published.move_latest(folder, target.name)
        self._checkpoint("published", target)

    def _checkpoint(self, what: str, path: Path) -> None:
        if self.spec.rank == 0:
            message = RankCheckpoint(what=what, step=self.step, path=str(path), seconds=0.01, time=time.time())  # type: ignore[arg-type]
            self.channel.send(message)

    def fail(self, error: BaseException) -> None:
        self.channel.send(
            RankException(
                type=type(error).__name__, message=str(error), traceback="", step=self.step + 1, phase=self.phase_now,
                collective="reduce" if isinstance(error, ConnectionError) else None, time=time.time(),
            )
        )  # fmt: skip
        self.channel.close()


def main() -> int:
    spec = RankSpec.model_validate_json(Path(sys.argv[1]).read_text())
    random.seed(spec.rank)
    rank = PlainRank(spec)
    try:
        if spec.config.name == "refused":
            raise BadInputError("data.train: this name stands for input that only a rank can find wrong")
        return rank.run()
    except BadInputError as error:
        rank.fail(error)
        return 2
    except Exception as error:
        rank.fail(error)
        raise


if __name__ == "__main__":
    sys.exit(main())
