"""Stock lm-eval with its own vLLM class: ``python -m tests.support.stock_vllm MODEL FOLDER...``, or forked.

Each folder holds a ``settings.json`` and gets lm-eval's results. lm-eval asks the metadata for a package that the CPU
build is not called by, so its version is given here; the engine runs under the conditions of ``--exact``.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

EXACT = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 256,
    "kv_cache_memory_bytes": 1 << 30,
}


def main() -> None:
    """Load the model once, evaluate each folder's settings."""
    from evalsched.engine import EngineSettings, prepare_environment

    prepare_environment(EngineSettings(exact=True), "cpu")
    real = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.32.0+cpu" if name == "vllm" else real(name)  # type: ignore[assignment]
    import torch
    from lm_eval.models.vllm_causallms import VLLM

    from evalsched.models import ModelFacts

    torch.set_num_threads(1)
    model = Path(sys.argv[1])
    lm = VLLM(pretrained=str(model), dtype=ModelFacts.read(model).dtype(), **EXACT)  # type: ignore[arg-type]
    generate = lm.model.generate
    # vLLM's progress bar divides by the seconds passed, which a coarse clock may give as zero.
    lm.model.generate = lambda *given, **named: generate(*given, **(named | {"use_tqdm": False}))  # type: ignore[method-assign]
    for name in sys.argv[2:]:
        _evaluate(lm, str(model), Path(name))


def _evaluate(lm: Any, model: str, output: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from evalsched.types import EvalSettings

    settings = EvalSettings.from_json(json.loads((output / "settings.json").read_text()))
    tracker = EvaluationTracker(output_path=str(output))
    results: Any = simple_evaluate(
        model=lm,
        model_args={"pretrained": model},
        tasks=list(settings.tasks),
        task_manager=TaskManager(include_path=list(settings.include_path), include_defaults=False),
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        system_instruction=settings.system_instruction,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.fewshot_as_multiturn,
        evaluation_tracker=tracker,
        bootstrap_iters=settings.bootstrap_iters,
        fewshot_random_seed=settings.fewshot_random_seed,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    folder = output / str(tracker.general_config_tracker.model_name_sanitized)
    for path in sorted(folder.glob("*.json*")):
        path.rename(output / (path.name.replace(f"_{tracker.date_id}", "")))


if __name__ == "__main__":
    main()
