"""Log-probabilities of one prompt under several models, in one vLLM engine where their shapes agree.

Reads ``{"tokens": [...], "models": [...]}`` from the file named first and writes, to the one named second, a list with
one list of log-probabilities (of each token after the first) per model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def shape_of(model: str) -> tuple[object, ...]:
    """What must agree for weights to be swapped in place."""
    config = json.loads((Path(model) / "config.json").read_text())
    keys = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "tie_word_embeddings")
    return tuple(config[key] for key in keys)


def main() -> None:
    """Serve one request."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    request = json.loads(Path(sys.argv[1]).read_text())
    tokens = request["tokens"]
    settings = SamplingParams(prompt_logprobs=1, max_tokens=1, temperature=0, detokenize=False)
    answers: list[list[float]] = []
    engine, loaded = None, None
    for model in request["models"]:
        if engine is not None and shape_of(model) == loaded:
            engine.collective_rpc("reload_weights", kwargs={"weights_path": model})
            engine.reset_prefix_cache()
        else:
            del engine
            engine = LLM(model=model, dtype="float32", enforce_eager=True, max_num_seqs=4, disable_log_stats=True)
            loaded = shape_of(model)
        out = engine.generate([TokensPrompt(prompt_token_ids=tokens)], settings, use_tqdm=False)[0]
        answers.append([out.prompt_logprobs[index][token].logprob for index, token in enumerate(tokens) if index])
    Path(sys.argv[2]).write_text(json.dumps(answers))
