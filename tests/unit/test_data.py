"""From text files to samples: what is found, held out, indexed once, and refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from planner.errors import BadInputError, WorkFailedError
from planner.pretrain_config import Data
from pretrain import data, device
from pretrain.data import Corpus, Samples
from pretrain.folder_lock import FolderLock
from pretrain.tokenizer import ByteTokenizer

device.prepare()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    (folder / "below").mkdir(parents=True)
    for index in range(40):
        (folder / ("below" if index % 2 else ".") / f"{index:02}.txt").write_text(f"document {index}\n" * (index + 1))
    return folder


def prepared(text: Path, cache: Path, **fields: object) -> Corpus:
    return data.prepare(Data.model_validate({"train": [f"{text}/**/*.txt"], **fields}), ByteTokenizer(), cache)


def test_documents_stand_in_order_each_ended_by_its_token(text: Path, tmp_path: Path) -> None:
    files = [text / "00.txt", text / "02.txt"]
    settings = Data(train=[str(files[1]), str(files[0])], valid=[str(text / "04.txt")])
    corpus = data.prepare(settings, ByteTokenizer(), tmp_path / "cache")
    expected = [*files[1].read_bytes(), 256, *files[0].read_bytes(), 256]
    assert corpus.train.open().tolist() == expected
    assert (corpus.train.tokens, corpus.train.documents) == (len(expected), 2)


def test_samples_share_one_token_with_the_next(text: Path, tmp_path: Path) -> None:
    corpus = prepared(text, tmp_path / "cache")
    tokens = corpus.train.open()
    samples = Samples(corpus.train, 16)
    assert samples.count == (len(tokens) - 1) // 16
    batch = samples.batch([0, 1, samples.count - 1])
    assert batch.shape == (3, 17)
    assert batch.dtype == np.int64
    assert batch[0].tolist() == tokens[:17].tolist()
    assert batch[0, -1] == batch[1, 0]
    assert batch[2].tolist() == tokens[(samples.count - 1) * 16 : samples.count * 16 + 1].tolist()


def test_one_file_in_twenty_is_held_out_by_its_path(text: Path, tmp_path: Path) -> None:
    files = data.resolve([f"{text}/**/*.txt"], "data.train")
    train, held_out = data.split(files)
    assert len(held_out) == 2
    assert sorted([*train, *held_out]) == sorted(files)
    assert data.split(list(reversed(files)))[1] == list(reversed(held_out))
    corpus = prepared(text, tmp_path / "cache")
    assert corpus.valid is not None
    assert corpus.valid.documents == 2
    assert data.split(files[:2])[1] != []
    assert data.split(files[:1]) == (files[:1], [])


def test_the_index_is_built_once_per_content(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(text, tmp_path / "cache")
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: pytest.fail("encoded again"))
    assert prepared(text, tmp_path / "cache") == first
    monkeypatch.undo()
    trained_on = data.split(data.resolve([f"{text}/**/*.txt"], "data.train"))[0][0]  # by path: which ones differs
    trained_on.write_text("other content")
    assert prepared(text, tmp_path / "cache").train.digest != first.train.digest


def test_many_builders_at_once_make_one_index(text: Path, tmp_path: Path) -> None:
    corpora: list[Corpus] = []
    threads = [threading.Thread(target=lambda: corpora.append(prepared(text, tmp_path / "cache"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(corpora) == 6
    assert len(set(corpora)) == 1
    visible = [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".guard")]
    assert len(visible) == 2, f"two finished indices and no rest: {visible}"


def test_what_a_killed_builder_left_is_taken_over(text: Path, tmp_path: Path) -> None:
    whole = prepared(text, tmp_path / "whole")
    name = whole.train.prefix.parent.name
    cache = tmp_path / "cache"
    (cache / f".{name}.dead-owner").mkdir(parents=True)
    (cache / f".{name}.dead-owner" / "tokens.bin").write_text("half")
    dead = FolderLock(cache / f"{name}.lock", "dead-owner", lifetime=0.2)
    assert dead.try_acquire()
    corpus = prepared(text, cache)
    assert corpus.train.digest == whole.train.digest
    assert not (cache / f".{name}.dead-owner").exists()


def test_waiting_for_a_builder_has_an_end(text: Path, tmp_path: Path) -> None:
    name = prepared(text, tmp_path / "whole").train.prefix.parent.name
    cache = tmp_path / "cache"
    cache.mkdir()
    assert FolderLock(cache / f"{name}.lock", "slow-owner", lifetime=1000.0).try_acquire()
    settings = Data.model_validate({"train": [f"{text}/**/*.txt"]})
    with pytest.raises(WorkFailedError, match="slow-owner has been building"):
        data.prepare(settings, ByteTokenizer(), cache, wait_seconds=0.2)


def test_a_failed_build_leaves_nothing_half_made(text: Path, tmp_path: Path) -> None:
    (text / "zz.txt").write_bytes(b"\xff\xfe not text")
    with pytest.raises(BadInputError, match=r"data\.train: .*zz\.txt is not UTF-8 text \(byte 0\)"):
        prepared(text, tmp_path / "cache", valid=[str(text / "00.txt")])
    left = [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".guard")]
    assert left == []


@pytest.mark.parametrize("field", ["train", "valid"])
def test_missing_and_empty_data_name_their_field(text: Path, tmp_path: Path, field: str) -> None:
    good = {"train": [f"{text}/*.txt"], "valid": [f"{text}/*.txt"]}
    missing = Data.model_validate(good | {field: [str(tmp_path / "none" / "*.txt")]})
    with pytest.raises(BadInputError, match=rf"data\.{field}: '.*none/\*\.txt' matches no file"):
        data.prepare(missing, ByteTokenizer(), tmp_path / "cache")
    with pytest.raises(BadInputError, match=rf"data\.{field}: .* matches no file"):
        data.check(missing)
    (tmp_path / "empty.txt").touch()
    empty = Data.model_validate(good | {field: [str(tmp_path / "empty.txt")]})
    with pytest.raises(BadInputError, match=rf"data\.{field}: no text in .*empty\.txt"):
        data.prepare(empty, ByteTokenizer(), tmp_path / "cache")
    with pytest.raises(BadInputError, match=rf"data\.{field}: .*empty"):
        data.check(empty)


def test_stdlib_stands_for_two_halves_that_share_no_file() -> None:
    train = data.resolve(["stdlib"], "data.train")
    held_out = data.resolve(["stdlib-held-out"], "data.valid")
    assert len(train) > 200
    assert len(held_out) > 10
    assert not set(train) & set(held_out)


def test_line_ends_and_odd_characters_stay_what_they_are(tmp_path: Path) -> None:
    raw = "a\r\nb\rc\u2028d\x00é".encode()
    (tmp_path / "odd.txt").write_bytes(raw)
    (tmp_path / "other.txt").write_text("x")
    settings = Data(train=[str(tmp_path / "odd.txt")], valid=[str(tmp_path / "other.txt")])
    corpus = data.prepare(settings, ByteTokenizer(), tmp_path / "cache")
    assert corpus.train.open().tolist() == [*raw, 256]


def test_a_damaged_index_is_noticed(text: Path, tmp_path: Path) -> None:
    corpus = prepared(text, tmp_path / "cache")
    meta = corpus.train.prefix.parent / data.META
    meta.write_text(meta.read_text().replace(f'"tokens": {corpus.train.tokens}', '"tokens": 1'))
    with pytest.raises(WorkFailedError, match="delete the folder"):
        prepared(text, tmp_path / "cache").train.open()


def _unprivileged_attempt(text: Path, cache: Path) -> int:
    """Exit code of a child that tries as an ordinary user: 2 bad input, 0 it went through, 1 anything else."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        prepared(text, cache)
    except BadInputError as error:
        os._exit(2 if "data.cache" in str(error) and "cannot be written" in str(error) else 1)
    except BaseException:
        os._exit(1)
    os._exit(0)


def test_an_unwritable_cache_is_bad_input() -> None:
    import shutil
    import tempfile

    place = Path(tempfile.mkdtemp(prefix="planaria-data-"))
    try:
        place.chmod(0o755)
        text, cache = place / "text", place / "cache"
        text.mkdir()
        cache.mkdir()
        for name in ("a.txt", "b.txt"):
            (text / name).write_text("some text")
        cache.chmod(0o555)
        assert _unprivileged_attempt(text, cache) == 2
    finally:
        shutil.rmtree(place)
