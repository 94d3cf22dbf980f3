"""A language model whose answers are a function of the request's text alone: quick, deterministic, batch-free.

As a script it is stock lm-eval: ``python -m tests.support.hash_lm TOKENIZER FOLDER...``; each folder holds a
``settings.json`` and gets the results.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from evalsched.types import EvalSettings, Request, Response, Value, digest_of

WORDS = [
    "river",
    "stone",
    "cloud",
    "Amber",
    "violet",
    "copper",
    "meadow",
    "Lantern",
    "orchid",
    "falcon",
    "42",
    "harbor",
]


def answer(request_type: str, arguments: Any, occurrence: int) -> Value:
    """The model's answer; repeats of a request that samples differ."""
    rng = random.Random(digest_of([request_type, list(arguments), occurrence]))
    if request_type == "loglikelihood":
        return (-rng.random() * (1 + len(arguments[1])), rng.random() < 0.4)
    if request_type == "loglikelihood_rolling":
        return -rng.random() * 3 * (1 + len(arguments[0]))
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 5)))


def respond(request: Request) -> Response:
    """The response to a recorded request."""
    return Response(id=request.id, value=answer(request.request_type, request.arguments, request.occurrence))


def stock_run(settings: EvalSettings, tokenizer: str, output: Path) -> None:
    """Stock lm-eval with this model, as its command does it: evaluate, save results, save samples."""
    from collections import Counter

    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    class HashLM(TemplateLM):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[Any] = Counter()
            self._tokenizer = None

        @property
        def tokenizer(self) -> Any:
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(tokenizer)
            return self._tokenizer

        @property
        def eot_token_id(self) -> int:
            return 0

        @property
        def tokenizer_name(self) -> str:
            return "tokenizer"

        def tok_encode(self, string: str, **_: Any) -> list[int]:
            raise NotImplementedError

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> Any:
            raise NotImplementedError

        def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        def _run(self, kind: str, instances: Any) -> list[Any]:
            found = []
            for one in instances:
                key = (kind, one.task_name, one.doc_id, one.idx)
                found.append(answer(kind, one.args, self.seen[key]))
                self.seen[key] += 1
            return found

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[Any]:
            return self._run("loglikelihood", requests)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[Any]:
            return self._run("loglikelihood_rolling", requests)

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[Any]:
            return self._run("generate_until", requests)

    tracker = EvaluationTracker(output_path=str(output))
    results: Any = simple_evaluate(
        model=HashLM(),
        model_args={"pretrained": "hash"},
        tasks=list(settings.tasks),
        task_manager=TaskManager(include_path=list(settings.include_path), include_defaults=False),
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        samples={name: list(ids) for name, ids in settings.samples.items()} if settings.samples else None,
        system_instruction=settings.system_instruction,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.fewshot_as_multiturn,
        gen_kwargs=dict(settings.gen_kwargs) if settings.gen_kwargs else None,
        predict_only=settings.predict_only,
        evaluation_tracker=tracker,
        bootstrap_iters=settings.bootstrap_iters,
        fewshot_random_seed=settings.fewshot_random_seed,
        confirm_run_unsafe_code=True,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    folder = output / str(tracker.general_config_tracker.model_name_sanitized)
    for path in sorted(folder.glob("*.json*")):
        path.rename(output / (path.name.replace(f"_{tracker.date_id}", "")))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        asked = EvalSettings.from_json(json.loads((Path(name) / "settings.json").read_text()))
        stock_run(asked, sys.argv[1], Path(name))
