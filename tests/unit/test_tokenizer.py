"""The byte-level tokenizer, in numpy and as transformers loads it, and Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.errors import BadInputError
from pretrain import tokenizer
from pretrain.tokenizer import ByteTokenizer, byte_characters

TEXTS = [
    "",
    "hello world",
    "  lead and trail \t\n\n  ",
    "<|endoftext|> spelled out, <|padding|> too",
    "don't , . ' n't  's",
    "é 漢字 🙂 \u2028 \u00a0 \ufeff \ufffd",
    "\x00\x01\x7f\r\n\r",
    "a" * 3000,
    "".join(map(chr, range(0x20, 0x3000))),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(saved: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(saved), local_files_only=True)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_bytes_and_every_text_comes_back(loaded: Any, text: str) -> None:
    own = ByteTokenizer()
    ids = own.encode(text).tolist()
    assert ids == list(text.encode())
    assert own.decode(ids) == text
    assert loaded.encode(text) == ids
    assert loaded(text, add_special_tokens=False)["input_ids"] == ids
    assert loaded.decode(ids) == text
    assert loaded.decode(ids, skip_special_tokens=True) == text


def test_specials_have_their_ids_and_decode_to_nothing(loaded: Any) -> None:
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (256, 256, 257)
    assert len(loaded) == ByteTokenizer.size == 258
    assert loaded.decode([256, 104, 105, 257], skip_special_tokens=True) == "hi"
    assert ByteTokenizer().decode([256, 104, 105, 257]) == "hi"


def test_saving_again_what_transformers_loaded_changes_no_id(loaded: Any, tmp_path: Path) -> None:
    loaded.save_pretrained(str(tmp_path))
    again = tokenizer.load(str(tmp_path))
    for text in TEXTS:
        assert again.encode(text).tolist() == list(text.encode())
    assert again.end_of_document == 256
    assert again.size == 258


def test_a_folder_is_loaded_and_saved(saved: Path, tmp_path: Path) -> None:
    outer = tokenizer.load(str(saved))
    outer.save(tmp_path)
    assert tokenizer.load(str(tmp_path)).encode("abc").tolist() == [97, 98, 99]
    assert outer.digest != ByteTokenizer.digest


def test_digest_follows_the_content(saved: Path, tmp_path: Path) -> None:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert tokenizer.load(str(tmp_path)).digest == tokenizer.load(str(saved)).digest
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text() + "\n")
    assert tokenizer.load(str(tmp_path)).digest != tokenizer.load(str(saved)).digest


def test_byte_characters_are_distinct() -> None:
    assert len(set(byte_characters())) == 256
    assert byte_characters()[ord("A")] == "A"
    assert byte_characters()[ord(" ")] == "Ġ"


def test_missing_and_broken_tokenizers_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"tokenizer: '.*nowhere' is no folder"):
        tokenizer.load(str(tmp_path / "nowhere"))
    (tmp_path / "broken").mkdir()
    with pytest.raises(BadInputError, match=r"tokenizer: '.*broken' cannot be read") as caught:
        tokenizer.load(str(tmp_path / "broken"))
    assert "\n" not in str(caught.value)
    (tmp_path / "broken" / "tokenizer.json").write_text("{not json")
    with pytest.raises(BadInputError, match="cannot be read"):
        tokenizer.load(str(tmp_path / "broken"))
