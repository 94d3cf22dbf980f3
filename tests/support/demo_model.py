"""The model that ``planaria demo`` trains, with random weights: its shape, its tokenizer, its export's files."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny_model import TEMPLATE

ROOT = Path(__file__).resolve().parents[2]


def write_demo_model(folder: Path, seed: int = 0) -> Path:
    """A folder as the export writes it, and a chat template besides, which the byte tokenizer has not."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from planner.loading import load
    from planner.pretrain_config import PretrainConfig
    from pretrain.export import llama_config
    from pretrain.model import padded_vocabulary
    from pretrain.tokenizer import ByteTokenizer

    words = ByteTokenizer()
    demo = load(PretrainConfig, ROOT / "configs" / "pretrain" / "demo.yaml", [])
    config = llama_config(demo.model, padded_vocabulary(words.size), words)
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    words.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
