"""Everything that can be said about a job before anything is started: one line for whatever cannot work."""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path

from planner.errors import BadInputError, one_line
from planner.loading import load
from planner.pretrain_config import PretrainConfig
from pretrain import data, tokenizer

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def read_config(path: Path, overrides: list[str]) -> PretrainConfig:
    """The config with its overrides, its paths absolute, checked against this machine.

    Raises:
        BadInputError: one line naming file, field and value.
    """
    config = load(PretrainConfig, path, overrides)
    config = _absolute(config)
    _check_text(config, path)
    _check_tokenizer(config, path)
    _check_folder(config, path)
    return config


def _absolute(config: PretrainConfig) -> PretrainConfig:
    """Relative paths mean the caller's folder: ranks run elsewhere."""
    raw = config.to_json()
    text = config.data
    special = (data.STDLIB, data.STDLIB_HELD_OUT)

    def full(name: str) -> str:
        return name if name in special else os.path.abspath(os.path.expanduser(name))

    raw["data"] = {
        "train": [full(name) for name in text.train],
        "valid": [full(name) for name in text.valid],
        "cache": full(text.cache) if text.cache else None,
    }
    if config.tokenizer != tokenizer.BYTES:
        raw["tokenizer"] = full(config.tokenizer)
    checkpoint = config.checkpoint
    if checkpoint.dir and "://" not in checkpoint.dir:
        raw["checkpoint"] = checkpoint.model_dump(mode="json") | {"dir": full(checkpoint.dir)}
    return PretrainConfig.model_validate(raw)


def _check_text(config: PretrainConfig, path: Path) -> None:
    for field, patterns in (("data.train", config.data.train), ("data.valid", config.data.valid)):
        if not patterns:
            continue
        try:
            files = data.resolve(patterns, field)
        except BadInputError as error:
            raise BadInputError(f"{path}: {error}") from None
        unreadable = next((file for file in files if not os.access(file, os.R_OK)), None)
        if unreadable is not None:
            raise BadInputError(f"{path}: {field}: {unreadable} cannot be read; check its permissions")
        if not any(file.stat().st_size for file in files):
            raise BadInputError(f"{path}: {field}: all {len(files)} files of {patterns[0]!r} are empty; give some text")
        _check_utf8(files[0], field, path)


def _check_utf8(file: Path, field: str, path: Path) -> None:
    """The first file stands for the others; the rest is found by the ranks, which read it all."""
    with file.open("rb") as stream:
        head = stream.read(1 << 16)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            raise BadInputError(f"{path}: {field}: {file} is not UTF-8 text (byte {error.start})") from None


def _check_tokenizer(config: PretrainConfig, path: Path) -> None:
    """What can be seen without loading it comes first: that takes seconds."""
    if config.tokenizer == tokenizer.BYTES:
        return
    folder = Path(config.tokenizer)
    if not folder.is_dir():
        raise BadInputError(
            f"{path}: tokenizer: {folder} is no folder; write 'bytes' or the path of a Hugging Face tokenizer"
        )
    file = folder / "tokenizer.json"
    try:
        if file.exists():
            json.loads(file.read_text(encoding="utf-8"))
        tokenizer.load(config.tokenizer)
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path}: tokenizer: {file} cannot be read ({one_line(error)[:200]})") from None
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def _check_folder(config: PretrainConfig, path: Path) -> None:
    folder = config.checkpoint.dir
    if folder is None:
        return
    if "://" in folder:
        _check_url(folder, path)
        return
    here = Path(folder)
    try:
        while not here.exists():
            here = here.parent
        usable = here.is_dir()
    except OSError as error:
        raise BadInputError(f"{path}: checkpoint.dir: {folder} cannot be reached ({error.strerror})") from None
    if not usable:
        raise BadInputError(f"{path}: checkpoint.dir: {here} is not a directory; name another folder")
    if not os.access(here, os.W_OK | os.X_OK):
        raise BadInputError(f"{path}: checkpoint.dir: {folder} cannot be written ({here} is not writable)")


def _check_url(url: str, path: Path) -> None:
    """Whether this installation can speak to such a store; whether it answers is seen when the job claims it."""
    import fsspec

    protocol, _, rest = url.partition("://")
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise BadInputError(f"{path}: checkpoint.dir: {url}: {one_line(error)}") from None
    if not rest.strip("/"):
        raise BadInputError(f"{path}: checkpoint.dir: {url}: names no bucket or folder")


def check_slots(config: PretrainConfig, path: Path, slots: int, where: str) -> None:
    """Refuse a job whose minimum is more than there is.

    Raises:
        BadInputError: fewer slots than ``workers.min``.
    """
    if slots < config.workers.min:
        raise BadInputError(
            f"{path}: workers.min: {config.workers.min} ranks need as many slots, {where} {slots}; "
            "lower workers.min or add slots"
        )


def new_job_id(name: str) -> str:
    """An id that is never used again: the name and a random part."""
    plain = _UNSAFE.sub("-", name).strip("-.") or "job"
    return f"{plain[:40]}-{uuid.uuid4().hex[:8]}"
