"""Text to token ids: a byte-level tokenizer that every part of the system can load, and any Hugging Face one by path.

The byte-level tokenizer has one token per byte (id = byte) and two specials. It exists twice with the same ids:
here as a few lines of numpy for building the token index, and as a Hugging Face tokenizer folder
(:func:`save`) that transformers, lm-eval and vLLM load offline.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from planner.errors import BadInputError, one_line

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
END_OF_TEXT_ID = 256
PADDING_ID = 257
_FORMAT = "bytes-1"


class Tokenizer(Protocol):
    """What building a token index and an export need of a tokenizer."""

    @property
    def size(self) -> int:
        """Number of token ids, specials included (before the model pads its vocabulary)."""

    @property
    def end_of_document(self) -> int:
        """Id that is put after every document, and before the first token when a document is scored alone."""

    @property
    def digest(self) -> str:
        """Content digest; equal digests give equal ids."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text`` without specials."""

    def decode(self, ids: list[int]) -> str:
        """Text of ``ids``; specials are left out."""

    def save(self, folder: Path) -> None:
        """Write the Hugging Face files of this tokenizer into an existing folder."""


class ByteTokenizer:
    """One token per byte of UTF-8. Decoding what encoding made gives the same text back, whatever the text."""

    size = 258
    end_of_document = END_OF_TEXT_ID
    digest = hashlib.sha256(_FORMAT.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The bytes of ``text``, one id each."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``; a cut character becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json``."""
        _write_json(folder / "tokenizer.json", _tokenizer_json())
        _write_json(folder / "tokenizer_config.json", _tokenizer_config())
        specials = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PADDING}
        _write_json(folder / "special_tokens_map.json", specials)


class HuggingFaceTokenizer:
    """A tokenizer folder as transformers loads it, without any network."""

    def __init__(self, path: str) -> None:
        """Load ``path``.

        Raises:
            BadInputError: not a folder, not readable as a tokenizer, or without an end-of-text token.
        """
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise BadInputError(
                f"tokenizer: {path!r} is no folder; give 'bytes' or the folder of a Hugging Face tokenizer"
            )
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # whatever a broken folder makes transformers raise, it is the input's fault
            raise BadInputError(
                f"tokenizer: {path!r} cannot be read: {type(error).__name__}: {one_line(error)[:200]}"
            ) from error
        end = self._inner.eos_token_id if self._inner.eos_token_id is not None else self._inner.bos_token_id
        if end is None:
            raise BadInputError(f"tokenizer: {path!r} has neither an end-of-text nor a begin-of-text token; add one")
        self.end_of_document = int(end)
        self.size = len(self._inner)
        self.digest = _folder_digest(folder)

    def encode(self, text: str) -> np.ndarray:
        """Ids without specials."""
        return np.asarray(self._inner.encode(text, add_special_tokens=False), dtype=np.int32)

    def decode(self, ids: list[int]) -> str:
        """Text without specials."""
        return str(self._inner.decode(ids, skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the tokenizer's own files."""
        self._inner.save_pretrained(str(folder))


def load(name: str) -> Tokenizer:
    """The tokenizer of a config's ``tokenizer`` field: ``bytes`` or a folder's path.

    Raises:
        BadInputError: nothing that can be read stands there.
    """
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(name)


def _folder_digest(folder: Path) -> str:
    """Digest of the files that decide the ids: everything small enough not to be weights."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in {".json", ".model", ".txt", ".py", ".jinja", ".tiktoken"}:
            digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte, by byte value: itself where printable, else from U+0100 upwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacement = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(replacement)) for byte in range(256)]


def _special(token_id: int, content: str) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _tokenizer_json() -> dict[str, Any]:
    """A BPE without merges over byte stand-ins: the ``tokenizers`` library then gives one id per byte."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(END_OF_TEXT_ID, END_OF_TEXT), _special(PADDING_ID, PADDING)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    """Settings for transformers. ``split_special_tokens``: text that spells a special is text, so it round-trips."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_max_length": 1000000000000000019884624838656,
    }
