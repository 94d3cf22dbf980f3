"""A process that holds one engine for all tests of a session, and lm-eval's own vLLM class over the same weights.

It reads commands as JSON lines on standard input and answers as JSON lines on the descriptor that it was given.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.support.fork_server import KEPT, ForkServer


class EngineHost:
    """The tests' end."""

    def __init__(self, folder: Path, model: Path, engines: ForkServer, **settings: Any) -> None:
        self._log = folder / "engine-host.log"
        commands, command_end = os.pipe()
        self._read, answers = os.pipe()
        self._process = engines.start(
            "tests.support.engine_host:main", str(model), json.dumps(settings), out=self._log, stdin=commands,
            keep=answers,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._commands = os.fdopen(command_end, "w", buffering=1)
        self._buffer = b""

    def call(self, do: str, seconds: float = 300, **arguments: Any) -> Any:
        """Run one command and return its value; raises AssertionError with the host's error."""
        self._commands.write(json.dumps({"do": do, **arguments}) + "\n")
        end = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise AssertionError(f"no answer to {do} in {seconds} s\n{self.tail()}")
            if not (chunk := os.read(self._read, 1 << 20)):
                raise AssertionError(f"the engine host is gone\n{self.tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(f"{answer['error']}\n{answer.get('traceback', '')}")
        return answer["value"]

    def tail(self) -> str:
        """The last lines that it printed."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._commands.close()
        os.close(self._read)


# ---------------------------------------------------------------------- the process


class _Host:
    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        from evalsched.engine import EngineSettings, VllmEngine

        self.engine = VllmEngine(model, EngineSettings(**settings))

    def run(self, requests: list[Any], stop_after: int | None = None) -> list[Any]:
        """Responses; with ``stop_after`` the engine is told to stop once it made so many steps."""
        from evalsched.types import Request

        steps = iter(range(1 << 30))
        stop = (lambda: next(steps) >= stop_after) if stop_after is not None else (lambda: False)
        return [one.to_json() for one in self.engine.run([Request.from_json(r) for r in requests], stop)]

    def singly(self, requests: list[Any]) -> list[Any]:
        """Responses, each request alone."""
        return [one for request in requests for one in self.run([request])]

    def stock(self, requests: list[Any]) -> list[Any]:
        """What the methods of lm-eval's own class say, with every request in one call of its type."""
        from lm_eval.api.instance import Instance

        lm = _stock_class(self.engine)
        found: list[Any] = [None] * len(requests)
        for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
            at = [index for index, one in enumerate(requests) if one["request_type"] == kind]
            instances = [
                Instance(request_type=kind, doc={}, arguments=tuple(requests[index]["arguments"]), idx=0)
                for index in at
            ]
            for index, value in zip(at, getattr(lm, kind)(instances) if at else [], strict=True):
                found[index] = value
        return found

    def reference(self, pairs: list[Any]) -> list[float]:
        """Log-probability of each (context ids, continuation ids) by transformers, in float32."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(self.engine.facts.folder), dtype=torch.float32).eval()
        found = []
        with torch.no_grad():
            for context, continuation in pairs:
                table = torch.log_softmax(model(torch.tensor([context + continuation])).logits[0].float(), dim=-1)
                rows = range(len(context) - 1, len(context) + len(continuation) - 1)
                found.append(float(sum(table[row, token] for row, token in zip(rows, continuation, strict=True))))
        return found

    def encode(self, request: Any) -> Any:
        """A request's prompts."""
        from evalsched.types import Request

        one = self.engine.encoder.encode(Request.from_json(request))
        return [{"tokens": list(prompt.tokens), "from": prompt.scored_from} for prompt in one.prompts]

    def swap(self, model: str) -> None:
        """Another checkpoint."""
        self.engine.swap(Path(model))

    def why_not(self, model: str) -> str | None:
        """Whether another checkpoint could be swapped in."""
        from evalsched.models import ModelFacts

        return self.engine.why_not_swap(ModelFacts.read(Path(model)))

    def starve(self, tokens: int | None) -> None:
        """From now on a forward pass of more than ``tokens`` tokens runs out of memory; None: no more."""
        runner = self.engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        if not hasattr(self, "_forward"):
            self._forward = runner._model_forward
        forward = self._forward

        def starving(*args: Any, **kwargs: Any) -> Any:
            ids = kwargs.get("input_ids", args[0] if args else None)
            if tokens is not None and ids.shape[0] > tokens:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes")
            return forward(*args, **kwargs)

        runner._model_forward = starving

    def put_off(self, requests: list[Any]) -> int:
        """How often vLLM put a sequence off for lack of cache while it ran these requests."""
        scheduler = self.engine._llm.engine_core.engine_core.scheduler
        preempt, count = scheduler._preempt_request, 0

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return preempt(*args, **kwargs)

        scheduler._preempt_request = counting
        try:
            self.run(requests)
        finally:
            scheduler._preempt_request = preempt
        return count

    def rows(self, requests: list[Any], whole: bool) -> dict[str, Any]:
        """Responses, and how many rows of logits were computed for them; ``whole``: as vLLM itself would."""
        runner = self.engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        tails, model = runner._get_prompt_logprobs_dict, runner.model
        compute, count = model.compute_logits, 0

        def counting(states: Any) -> Any:
            nonlocal count
            count += len(states)
            return compute(states)

        model.compute_logits = counting
        if whole:
            runner._get_prompt_logprobs_dict = type(runner)._get_prompt_logprobs_dict.__get__(runner)
        try:
            answers = self.run(requests)
        finally:
            del model.compute_logits
            runner._get_prompt_logprobs_dict = tails
        return {"answers": answers, "rows": count}

    def shared(self, requests: list[Any]) -> dict[str, Any]:
        """Responses, the prompts' tokens that came from the prefix cache, and how many prompts were computed again."""
        note, cached, anew = self.engine._note, 0, 0

        def counting(flight: Any, part: int, output: Any) -> bool:
            nonlocal cached, anew
            cached += output.num_cached_tokens
            taken = note(flight, part, output)
            anew += not taken
            return taken

        self.engine._note = counting  # type: ignore[method-assign]
        self.engine.forget()
        try:
            answers = self.run(requests)
        finally:
            del self.engine._note
        return {"answers": answers, "cached": cached, "anew": anew}

    def wrong_weights(self) -> str:
        """Put a wrong number into the engine's weights; what the proof says to that."""
        import torch

        from evalsched.engine import EngineError

        runner = self.engine._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        parameter = runner.get_model().get_parameter("model.norm.weight")
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter += 1.0
        try:
            self.engine.verify()
        except EngineError as error:
            return str(error)
        finally:
            with torch.no_grad():
                parameter.copy_(kept)
        return ""


def _stock_class(engine: Any) -> Any:
    """lm-eval's ``VLLM`` without its constructor, on our engine."""
    import importlib.metadata

    real = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.32.0+cpu" if name == "vllm" else real(name)  # type: ignore[assignment]
    from lm_eval.models.utils import configure_pad_token
    from lm_eval.models.vllm_causallms import VLLM

    importlib.metadata.version = real
    lm = VLLM.__new__(VLLM)
    lm._rank, lm._world_size, lm._device = 0, 1, None
    from lm_eval.api.model import CacheHook

    lm.cache_hook = CacheHook(None)
    lm.model = _Offline(engine._llm)
    lm.tokenizer = configure_pad_token(engine.encoder.tokenizer)
    lm.batch_size, lm.data_parallel_size, lm.tensor_parallel_size = "auto", 1, 1
    lm._max_length, lm._max_gen_toks, lm.truncation_side = None, 256, "left"
    lm.add_bos_token = lm.custom_prefix_token_id = lm.think_end_token = lm.enable_thinking = lm.lora_request = None
    return lm


class _Offline:
    """The part of ``vllm.LLM`` that the class calls."""

    def __init__(self, engine: Any) -> None:
        self.llm_engine = engine
        self._count = 0

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: Any = None, lora_request: Any = None) -> list[Any]:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        names = []
        for prompt, parameters in zip(prompts, sampling_params, strict=True):
            self._count += 1
            names.append(f"stock-{self._count}")
            parameters.output_kind = RequestOutputKind.FINAL_ONLY
            self.llm_engine.add_request(names[-1], tokens_input(prompt["prompt_token_ids"]), parameters)
        found: dict[str, Any] = {}
        while len(found) < len(names):
            found |= {output.request_id: output for output in self.llm_engine.step() if output.finished}
        return [found[name] for name in names]


def main() -> None:
    """Serve until the input ends."""
    out = os.fdopen(KEPT, "w")
    host: _Host | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if host is None:
                host = _Host(Path(sys.argv[1]), json.loads(sys.argv[2]))
            answer = {"value": getattr(host, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
        out.flush()
