"""Token counts of requests on CPU, for cost estimates and cuts; the engine's own counts decide about flags.

Reads ``tokenizer.json`` with the ``tokenizers`` library, which loads in a tenth of a second; transformers
(3 s) is imported only for a tokenizer that has no such file, and for chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.errors import BadInputError, one_line

DEFAULT_BUDGET = 256
"""New tokens where a task names no number (lm-eval's default)."""


def chat_template_of(folder: Path) -> Any:
    """The transformers tokenizer of a model folder, for its chat template.

    Raises:
        BadInputError: it cannot be loaded or has no chat template.
    """
    tokenizer = _transformers_tokenizer(folder)
    if not tokenizer.chat_template:
        raise BadInputError(f"--apply-chat-template: the tokenizer in {folder} has no chat template")
    return tokenizer


def _transformers_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises almost anything here
        raise BadInputError(f"{folder}: its tokenizer cannot be loaded ({one_line(error)[:200]})") from error


def generation_budget(settings: dict[str, Any]) -> int:
    """New tokens that generation settings ask for, under any of the names that lm-eval takes."""
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        value = settings.get(name)
        if isinstance(value, (int, float, str)) and str(value).strip().isdigit():
            return int(value)
    return DEFAULT_BUDGET


class TokenCounter:
    """Counts tokens of texts with a model folder's tokenizer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fast: Any = None
        self._slow: Any = None
        path = folder / "tokenizer.json"
        if path.is_file():
            from tokenizers import Tokenizer

            try:
                self._fast = Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises plain Exception
                raise BadInputError(f"{path}: not a tokenizer ({one_line(error)[:200]})") from error
            self._fast.no_truncation()
            self._fast.no_padding()
        else:
            self._slow = _transformers_tokenizer(folder)

    def lengths(self, texts: Sequence[str], *, special: bool = True) -> list[int]:
        """Tokens of each text; ``special``: with the tokens that the tokenizer puts around a text."""
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        if self._fast is not None:
            return [len(found.ids) for found in self._fast.encode_batch_fast(clean, add_special_tokens=special)]
        return [len(ids) for ids in self._slow(clean, add_special_tokens=special).input_ids] if clean else []

    def count(self, rows: Sequence[tuple[str, tuple[Any, ...]]]) -> list[tuple[int, int]]:
        """(context, continuation or budget) of each (request type, arguments); equal texts are counted once."""
        texts = sorted({str(arguments[0]) for _, arguments in rows})
        contexts = dict(zip(texts, self.lengths(texts), strict=True))
        endings = sorted({str(arguments[1]) for kind, arguments in rows if kind == "loglikelihood"})
        continuations = dict(zip(endings, self.lengths(endings, special=False), strict=True))
        found: list[tuple[int, int]] = []
        for kind, arguments in rows:
            first = contexts[str(arguments[0])]
            if kind == "loglikelihood":
                found.append((first, continuations[str(arguments[1])]))
            elif kind == "generate_until":
                found.append((first, generation_budget(arguments[1])))
            else:
                found.append((first, 0))
        return found

    def info(self) -> dict[str, Any]:
        """Special tokens under the names that lm-eval writes into its results."""
        names = _special_names(self._folder)
        found: dict[str, Any] = {}
        for role in ("pad", "eos", "bos"):
            token = names.get(f"{role}_token")
            found[f"tokenizer_{role}_token"] = [token, str(self._id(token))]
        eos = names.get("eos_token")
        return found | {"eot_token_id": self._id(eos)}

    def _id(self, token: str | None) -> int | None:
        if token is None:
            return None
        if self._fast is not None:
            found = self._fast.token_to_id(token)
            return None if found is None else int(found)
        return int(self._slow.convert_tokens_to_ids(token))


def _special_names(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            data = json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
        for key in ("pad_token", "eos_token", "bos_token"):
            value = data.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[key] = value
    return found
