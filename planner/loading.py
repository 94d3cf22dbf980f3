"""YAML through pydantic, with the one-line errors of exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import BadInputError, one_line

ModelT = TypeVar("ModelT", bound=BaseModel)


class Settings(BaseModel):
    """Base of every settings model: unknown keys are refused, values are frozen, each field is documented in place."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice, which plain YAML lets the last one win in silence."""


def _construct_mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (str, int, float)) and key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key if isinstance(key, (str, int, float)) else str(key))
    return yaml.SafeLoader.construct_mapping(loader, node, deep)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        BadInputError: missing, unreadable, no YAML, a key given twice, or no mapping at the top.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise BadInputError(f"{path}: not valid YAML: {one_line(error)}") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: a mapping is needed at the top, found {type(data).__name__}")
    return data


def _describe(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "(whole file)"
    value = first.get("input")
    kind = first["type"]
    if kind == "extra_forbidden":
        text = f"{where}: unknown key (value {value!r}); remove it or check its spelling"
    elif kind == "missing":
        text = f"{where}: missing, and it has no default"
    else:
        shown = repr(value)
        message = first["msg"].removeprefix("Value error, ")
        text = f"{where}: {message}" + ("" if isinstance(value, dict) else f" (value {shown[:80]})")
    more = error.error_count() - 1
    return one_line(text + (f" [and {more} more]" if more else ""))


def validate(model: type[ModelT], data: Any, source: str) -> ModelT:
    """``data`` as ``model``; ``source`` names the file (or option) in the message.

    Raises:
        BadInputError: one line naming source, field and value.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise BadInputError(f"{source}: {_describe(error)}") from error


def load(model: type[ModelT], path: Path, overrides: list[str] | None = None) -> ModelT:
    """Read, override (``key.sub=value``, the value as YAML) and validate one settings file."""
    data = read_yaml(path)
    for item in overrides or []:
        _override(data, item)
    return validate(model, data, str(path))


def _override(data: dict[str, Any], item: str) -> None:
    key, separator, raw = item.partition("=")
    if not separator or not key.strip():
        raise BadInputError(f"--set {item}: write it as key=value, for example --set batch.global=32")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise BadInputError(f"--set {item}: the value is not valid YAML: {one_line(error)}") from error
    *parents, last = key.strip().split(".")
    here = data
    for part in parents:
        below = here.setdefault(part, {})
        if not isinstance(below, dict):
            raise BadInputError(f"--set {item}: {part} is not a mapping, so {key} cannot be set below it")
        here = below
    here[last] = value
