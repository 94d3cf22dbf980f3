"""The Hugging Face export of a published checkpoint: safetensors, config, tokenizer, own manifest.

One CPU process, whatever the layout that trained; no Megatron and no process group are needed. Tensors are cut
out of the distributed checkpoint and written one at a time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from planner import manifest
from planner.errors import BadInputError, WorkFailedError
from planner.files import write_json
from planner.pretrain_config import Model, PretrainConfig
from pretrain import llama_names, published, tokenizer
from pretrain.description import read_description
from pretrain.dist_reader import DistReader
from pretrain.safetensors_stream import Entry, write_model

MEGATRON = "megatron"
MAX_SHARD_BYTES = 4 << 30
"""Data of one safetensors file at most, as Hugging Face's own default order of size."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export(
    checkpoint: Path,
    target: Path | None = None,
    *,
    created: float,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write and publish the export of one checkpoint.

    Args:
        checkpoint: a published directory; every byte is verified before it is read.
        target: where; ``step-XXXXXXXX.hf`` beside the checkpoint when None. An existing export that verifies and
            comes from the same checkpoint stays as it is.
        created: seconds since the epoch, for the manifest.
        max_shard_bytes: bound of one safetensors file.

    Returns:
        The published export.

    Raises:
        WorkFailedError: the checkpoint is broken; names the files.
        BadInputError: no checkpoint, or a target that is in the way.
    """
    said = _verified(checkpoint)
    config, vocabulary = read_description(checkpoint)
    target = target or checkpoint.with_name(manifest.step_dir_name(said.step, export=True))
    source = {"checkpoint": checkpoint.name, "digest": said.digest()}
    if _source_of(target) == source and not manifest.verify(target):
        return target
    if target.exists() and not (target.is_dir() and (_source_of(target) or not any(target.iterdir()))):
        raise BadInputError(f"{target}: is in the way and no export of ours; name another --output")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}.{os.getpid()}.tmp"
    published.remove_tree(work)
    work.mkdir()
    try:
        _write(checkpoint, work, config, vocabulary, max_shard_bytes)
        described = manifest.Described(
            job=said.job,
            step=said.step,
            consumed_samples=said.consumed_samples,
            incarnation=said.incarnation,
            created=created,
            description={"format": 1, "source": source},
        )
        if _source_of(target) != source:  # of another checkpoint; one of this, made meanwhile, is kept by the commit
            published.remove_tree(target)
        published.commit(work, target, fence=None, described=described, latest=False)
    finally:
        published.remove_tree(work)
    return target


def _verified(checkpoint: Path) -> manifest.Manifest:
    if not checkpoint.is_dir():
        raise BadInputError(f"{checkpoint}: no such directory; give a published step-XXXXXXXX directory")
    if not (checkpoint / manifest.NAME).exists():
        raise BadInputError(f"{checkpoint}: not published (no {manifest.NAME}); give a step-XXXXXXXX directory")
    problems = manifest.verify(checkpoint)
    if problems:
        shown = "; ".join(f"{problem.file}: {problem.problem}" for problem in problems[:3])
        raise WorkFailedError(f"{checkpoint}: broken, not exported: {shown}")
    return manifest.read_manifest(checkpoint)


def _source_of(target: Path) -> Any:
    """What an export of ours says it was made from; None for anything else."""
    try:
        return json.loads((target / manifest.DESCRIPTION).read_text()).get("source")
    except (OSError, ValueError, AttributeError):
        return None


def _write(checkpoint: Path, work: Path, config: PretrainConfig, vocabulary: int, max_shard_bytes: int) -> None:
    model, dtype = config.model, _DTYPES[config.model.dtype]
    words = tokenizer.load(config.tokenizer)
    reader = DistReader(checkpoint / MEGATRON)
    sources = {source.name: source for source in llama_names.sources(model, vocabulary)}
    entries = [Entry(source.name, source.shape, dtype) for source in sources.values()]
    held: tuple[tuple[str, int | None], torch.Tensor] | None = None

    def get(name: str) -> torch.Tensor:
        nonlocal held
        source = sources[name]
        which = (source.key, source.layer)
        if held is None or held[0] != which:  # query, key and value are cut from one fused tensor, in a row
            held = which, reader.read(source.key, () if source.layer is None else (source.layer,))
        tensor = held[1]
        return (tensor if source.cut is None else source.cut(tensor)).to(dtype)

    write_model(work, entries, get, max_shard_bytes)
    write_json(work / "config.json", llama_config(model, vocabulary, words))
    write_json(work / "generation_config.json", {"_from_model_config": True} | _special_ids(words))
    words.save(work)


def _special_ids(words: tokenizer.Tokenizer) -> dict[str, int]:
    ids = {"eos_token_id": words.end_of_document}
    if isinstance(words, tokenizer.ByteTokenizer):
        ids |= {"bos_token_id": tokenizer.END_OF_TEXT_ID, "pad_token_id": tokenizer.PADDING_ID}
    return ids


def llama_config(model: Model, vocabulary: int, words: tokenizer.Tokenizer) -> dict[str, Any]:
    """``config.json`` of the Llama that computes what the Megatron model computes.

    The rotary base stands in both spellings, for transformers before and after version 5.
    """
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.groups,
        "head_dim": model.head_size,
        "max_position_embeddings": model.seq_length,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "use_cache": True,
        "torch_dtype": model.dtype,
        "dtype": model.dtype,
    } | _special_ids(words)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a Hugging Face model folder.

    Raises:
        BadInputError: missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: a JSON object is needed")
    return data
