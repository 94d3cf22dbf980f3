"""What a model directory says about itself, read from its JSON files alone: no torch, no engine.

The same facts decide the key of a trial, the requests' windows and what an engine is started with, so a second
run of the same evaluation needs no engine to find out that everything is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from evalsched.types import Window
from planner.errors import BadInputError
from planner.pretrain_config import CPU_HEAD_SIZES

DEFAULT_LENGTH = 2048
DTYPES = ("float32", "bfloat16", "float16")
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_SCALED_ALREADY = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file; a model directory in Hugging Face layout is needed") from None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: a JSON object is needed, found {type(data).__name__}")
    return data


@dataclass(frozen=True)
class ModelFacts:
    """A model directory in Hugging Face layout: its configuration and the files that its index names."""

    folder: Path
    config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> ModelFacts:
        """The facts of ``folder``.

        Raises:
            BadInputError: it is no complete model directory; the message names the file.
        """
        if not folder.is_dir():
            raise BadInputError(f"{folder}: no such directory; give the folder of a Hugging Face model")
        tokenizer = folder / "tokenizer_config.json"
        facts = cls(folder, _read_json(folder / "config.json"), _read_json(tokenizer) if tokenizer.exists() else {})
        if missing := facts.missing_files():
            raise BadInputError(f"{folder}: incomplete, {missing[0]} is missing" + _more(len(missing) - 1))
        return facts

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the text model (nested in composite models)."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def architecture(self) -> str:
        """Name of the model class."""
        names = self.config.get("architectures") or [self.config.get("model_type", "unknown")]
        return str(names[0])

    def missing_files(self) -> list[str]:
        """Files that must be there and are not: those that the weights' index names, tokenizer, weights at all."""
        missing = [name for name in ("config.json",) if not (self.folder / name).is_file()]
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(_read_json(index).get("weight_map", {}).values()))
            missing += [name for name in names if not (self.folder / name).is_file()]
        elif not self.weight_files():
            missing.append("model.safetensors")
        if not any((self.folder / name).is_file() for name in _TOKENIZER_FILES):
            missing.append("tokenizer.json")
        return missing

    def weight_files(self) -> list[Path]:
        """The weights, sorted by name."""
        found = sorted(self.folder.glob("*.safetensors"))
        return found or sorted(self.folder.glob("pytorch_model*.bin"))

    @property
    def weight_bytes(self) -> int:
        """Size of the weights on disk."""
        return sum(path.stat().st_size for path in self.weight_files())

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        if (given := self.text.get("head_dim")) is not None:
            return int(given)
        hidden, heads = self.text.get("hidden_size"), self.text.get("num_attention_heads")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            raise BadInputError(
                f"{self.folder}/config.json: hidden_size {hidden!r} and num_attention_heads {heads!r} are no head size"
            )
        return hidden // heads

    def dtype(self, wanted: str = "checkpoint") -> str:
        """The type that the engine computes in; ``checkpoint`` is that of the weights, without a silent downcast."""
        if wanted != "checkpoint":
            if wanted not in DTYPES:
                raise BadInputError(f"dtype {wanted!r} is not known; give one of checkpoint, {', '.join(DTYPES)}")
            return wanted
        own = str(self.text.get("dtype") or self.text.get("torch_dtype") or self.config.get("dtype") or "float32")
        own = own.removeprefix("torch.")
        return own if own in DTYPES else "bfloat16"

    def max_length(self) -> int:
        """Window in tokens, as vLLM derives it from the configuration."""
        lengths = [int(self.text[key]) for key in _LENGTH_KEYS if isinstance(self.text.get(key), (int, float))]
        tokenizer = self.tokenizer_config.get("model_max_length")
        if lengths and isinstance(tokenizer, (int, float)) and tokenizer > 0:
            lengths.append(int(min(tokenizer, 1 << 40)))
        length = float(min(lengths)) if lengths else float(DEFAULT_LENGTH)
        rope = self.text.get("rope_parameters") or self.text.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
        if kind == "longrope":
            return int(self.text.get("original_max_position_embeddings", length))
        if kind not in _SCALED_ALREADY and "gemma3" not in str(self.config.get("model_type")):
            length *= float(rope.get("factor") or 1.0)
        return int(length)

    def window(self, max_gen_toks: int = 256) -> Window:
        """The lengths an engine with this model works with."""
        return Window(max_length=self.max_length(), max_gen_toks=max_gen_toks)

    def cache_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values that one token takes in the engine's cache."""
        layers = int(self.text.get("num_hidden_layers", 1))
        groups = int(self.text.get("num_key_value_heads") or self.text.get("num_attention_heads", 1))
        return 2 * layers * groups * self.head_size * (4 if dtype == "float32" else 2)

    def check_cpu(self) -> None:
        """Refuse what the CPU attention kernel cannot run, before anything is loaded.

        Raises:
            BadInputError: naming the head size.
        """
        if self.head_size not in CPU_HEAD_SIZES:
            raise BadInputError(
                f"{self.folder}/config.json: head size {self.head_size} cannot be served on CPU "
                f"(possible: {', '.join(map(str, CPU_HEAD_SIZES))}); run it on a GPU"
            )


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "tekken.json")


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""
