"""Read ``failure_variants.txt``: labelled failure logs in the wordings of many training stacks.

Notation, a line each: ``=== NAME root=CLASS sev=SEV[,SEV] [node=N] [rank=R] [alt=CLASS,…]`` opens a case; ``%steps N
STYLE [k8s:POD|srun:TASK]`` is N healthy progress lines in a trainer's style, ``%spike N STYLE`` the same with a loss
far out of its band, ``%watchdog RANKS @S`` what the other ranks say S seconds later, ``%json HOST RANK LEVEL TEXT`` and
``%jsonsteps N HOST RANK`` structured lines. ``{iso}``, ``{isoz}``, ``{clock}``, ``{syslog}`` are the time, ``{iso+9}``
nine seconds later. ``!!`` marks the root's line; ``evidence-any: A; B`` accepts any line that holds A or B.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

START = datetime(2027, 3, 4, 5, 6, 7, tzinfo=UTC)
FORMATS = {"iso": "%Y-%m-%d %H:%M:%S", "isoz": "%Y-%m-%dT%H:%M:%SZ", "clock": "%H:%M:%S", "syslog": "%b %e %H:%M:%S"}
STYLES = {
    "megatron": " [{iso}] iteration {step:8d}/  476837 | consumed samples: {step:12d} | elapsed time per iteration "
    "(ms): 7924.3 | learning rate: 2.91E-04 | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 0.382 | number of "
    "skipped iterations:   0 | number of nan iterations:   0 |",
    "megatron-old": " iteration {step:8d}/  500000 | elapsed time per iteration (ms): 17924.3 | learning rate: 1.2E-04 "
    "| lm loss: {loss:.6E} | loss scale: 131072.0 | number of nan iterations:   0 |",
    "titan": "[rank0]:[titan] {iso},412 - root - INFO - step: {step:5d}  loss: {loss:8.5f}  grad_norm: 0.8123  "
    "memory: 61.20GiB(77.3%)  tps: 7,412  tflops: 412.11  mfu: 41.67%",
    "deepspeed": "worker-0: [{iso},123] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, lr=[0.0001], "
    "loss={loss:.4f}, mom=[(0.9, 0.95)]",
    "nemo": "Training epoch 0, iteration {step}/499999 | lr: 2.9e-05 | global_batch_size: 512 | global_step: {step} | "
    "reduced_train_loss: {loss:.4f} | train_step_timing in s: 9.412",
    "hf": "{{'loss': {loss:.4f}, 'grad_norm': 0.41, 'learning_rate': 0.0001, 'epoch': 0.02}}",
    "litgpt": "Epoch 1 | iter {step} step {step} | loss train: {loss:.3f}, val: n/a | iter time: 312.10 ms (step)",
    "composer": "[batch={step}/4800]: Train loss/train/total: {loss:.4f} Train throughput/tokens_per_sec: 81234.1",
    "nanotron": "[INFO|DP=0|PP=1|TP=0|tr-01]: iteration: {step} / 9000 | consumed_tokens: 17M | lm_loss: {loss:.3f} | "
    "grad_norm: 0.4",
    "olmo": "{iso}.123 n1:0 olmo.train:918 INFO [step={step}/739328] train/CrossEntropyLoss={loss:.3f}",
}


@dataclass
class Case:
    """One labelled log."""

    name: str
    root: str
    severities: tuple[str, ...]
    node: str | None = None
    rank: int | None = None
    alternatives: tuple[str, ...] = ()
    lines: list[str] = field(default_factory=list)
    evidence: list[int] = field(default_factory=list)

    def text(self) -> str:
        """The log."""
        return "\n".join(self.lines) + "\n"


class _Clock:
    """The log's time, a fixed number of seconds further with each step."""

    def __init__(self) -> None:
        self.seconds, self.step, self.noise = 0.0, 100, random.Random(5)

    def fill(self, text: str) -> str:
        def stamp(match: re.Match[str]) -> str:
            moment = START + timedelta(seconds=self.seconds + int(match[2] or 0))
            return moment.strftime(FORMATS[match[1]])

        return re.sub(r"\{(isoz|iso|clock|syslog)(\+\d+)?\}", stamp, text)

    def steps(self, count: int, style: str, level: float) -> Iterator[str]:
        for _ in range(count):
            self.seconds += 10
            self.step += 1
            loss = level + self.noise.uniform(-0.02, 0.02)
            yield self.fill(STYLES[style].replace("{iso}", "{{iso}}").format(step=self.step, loss=loss))

    def watchdog(self, ranks: list[int], later: int) -> Iterator[str]:
        for rank in ranks:
            head = self.fill(f"[rank{rank}]:[E304 {{clock+{later}}}.12 ProcessGroupNCCL.cpp:")
            yield (
                f"{head}616] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, "
                f"OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600021 milliseconds before "
                f"timing out."
            )
            yield f"{head}681] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down."


def _wrapped(line: str, wrap: str, clock: _Clock) -> str:
    kind, _, name = wrap.partition(":")
    if kind == "k8s":
        return clock.fill(f"{{isoz}} {name} pytorch | {line}")
    return f"{name:>2}: {line}" if kind == "srun" else line


def _directive(words: list[str], text: str, clock: _Clock) -> Iterator[str]:
    if words[0] in ("%steps", "%spike"):
        level = 2.4 if words[0] == "%steps" else 7.1
        for line in clock.steps(int(words[1]), words[2], level):
            yield _wrapped(line, words[3] if len(words) > 3 else "", clock)
    elif words[0] == "%watchdog":
        yield from clock.watchdog([int(rank) for rank in words[1].split(",")], int(words[2].lstrip("@")))
    elif words[0] == "%json":
        message = text.split(" ", 4)[4]
        yield clock.fill(
            f'{{"time": "{{isoz}}", "host": "{words[1]}", "rank": {words[2]}, "level": "{words[3]}", '
            f'"message": "{message}"}}'.replace("{{", "{").replace("}}", "}")
        )
    else:
        for _ in range(int(words[1])):
            clock.seconds += 10
            clock.step += 1
            head = clock.fill('"time": "{isoz}"')
            yield f'{{{head}, "host": "{words[2]}", "rank": {words[3]}, "level": "INFO", ' + (
                f'"message": "step {clock.step} loss 2.4{clock.step % 10} tokens/s 81234"}}'
            )


def _opened(line: str) -> Case:
    name, *pairs = line.split()[1:]
    told = dict(pair.split("=", 1) for pair in pairs)
    severities = (*told["sev"].split(","), *filter(None, [told.get("alt-sev")]))
    rank = int(told["rank"]) if "rank" in told else None
    alternatives = tuple(filter(None, told.get("alt", "").split(",")))
    return Case(name, told["root"], severities, told.get("node"), rank, alternatives)


def variants(path: Path = Path(__file__).with_suffix(".txt")) -> list[Case]:
    """All cases of the file."""
    cases: list[Case] = []
    clock = _Clock()
    for raw in path.read_text(encoding="utf-8").splitlines():
        if raw.startswith("=== ") and "root=" in raw:
            cases.append(_opened(raw))
            clock = _Clock()
        elif not cases:
            continue
        elif raw.startswith("%"):
            first = len(cases[-1].lines) + 1
            cases[-1].lines.extend(_directive(raw.split(), raw, clock))
            if raw.startswith("%spike"):
                cases[-1].evidence.append(first)
        elif raw.startswith("evidence-any: "):
            wanted = [word.strip() for word in raw.removeprefix("evidence-any: ").split(";")]
            cases[-1].evidence = [n for n, line in enumerate(cases[-1].lines, 1) if any(w in line for w in wanted)]
        else:
            line = clock.fill(raw.removeprefix("!!"))
            cases[-1].lines.append(line)
            if raw.startswith("!!"):
                cases[-1].evidence.append(len(cases[-1].lines))
    return cases
