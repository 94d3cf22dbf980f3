"""Which task names there are, found by reading task files as text: no lm-eval, no torch, about a second once.

The names found are all that lm-eval's index has and a few more (names of groups' inline members), so a name that is
missing here is unknown for certain. A name that is here may still fail to load: recording says why.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from evalsched.benchmark_sources import BENCHMARKS
from evalsched.digests import cache_folder
from planner.errors import BadInputError
from planner.files import write_json

_KEY = re.compile(r"""["']?\b(?:task|group|tag)\b["']?\s*:[ \t]*(\[[^\]]*\]|"[^"]*"|'[^']*'|[^\s,\[\]{}"'#]+|)""")
_ITEM = re.compile(r"""^\s*-\s+["']?([^\s"':#]+)["']?\s*(?:#.*)?$""")
_WORDS = re.compile(r"""[^\s,\[\]{}"']+""")


def names_in_text(text: str) -> set[str]:
    """Every name that stands behind ``task``, ``group`` or ``tag`` in a YAML text, in line or as a list."""
    found: set[str] = set()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        for match in _KEY.finditer(line):
            found.update(_WORDS.findall(match[1]))
            if not match[1]:
                found.update(_items(lines[number + 1 :]))
    return found


def _items(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _ITEM.match(line)
        if match is None:
            return
        yield match[1]


def _texts(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if "yaml" in path.name or path.suffix in ("", ".yml"):  # files that others include are called anything
            with contextlib.suppress(OSError):
                if path.is_file():
                    yield path.read_text(encoding="utf-8", errors="replace")


def names_in_folder(folder: Path) -> set[str]:
    """The names in all task files below a folder."""
    return {name for text in _texts(folder) for name in names_in_text(text)}


def lm_eval_names() -> set[str] | None:
    """Names of lm-eval's own tasks, groups and tags, kept in the cache once found; None where it is not installed."""
    try:
        own = version("lm_eval")
    except PackageNotFoundError:
        return None
    path = cache_folder() / f"lm-eval-{own}-names.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return set(json.loads(path.read_text()))
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        return None
    found = names_in_folder(Path(spec.origin).parent / "tasks")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, sorted(found))
    return found


def own_names() -> set[str]:
    """The shipped tasks and all that can be prepared."""
    from evalsched.benchmarks import prepared_folder, shipped_folder

    found = names_in_folder(shipped_folder()) | {benchmark.name for benchmark in BENCHMARKS}
    return found | (names_in_folder(prepared_folder()) if prepared_folder().is_dir() else set())


def refuse_unknown(names: Sequence[str], where: str, include_path: Sequence[str] = ()) -> None:
    """Refuse a name that no task file has. ``where`` names the field, for example ``--tasks``.

    Patterns must match something and paths of YAML files must be there. Where lm-eval is not installed nothing can
    be said about a name that is not ours, so it passes.

    Raises:
        BadInputError: ``<where>: unknown task '<name>'``, with the nearest names.
    """
    names = [name.strip() for name in names if name.strip()]
    folders = [Path(folder) for folder in include_path if Path(folder).is_dir()]
    known = own_names().union(*(names_in_folder(folder) for folder in folders))
    if all(name in known for name in names):
        return
    theirs = lm_eval_names()
    if theirs is None:
        return
    texts = [text for folder in folders for text in _texts(folder)]
    for name in names:
        if not _there(name, known | theirs) and not any(name in text for text in texts):
            raise BadInputError(f"{where}: unknown task {name!r}; {_hint(name, known, theirs)}")


def _there(name: str, known: set[str]) -> bool:
    if name in known or (name.endswith((".yaml", ".yml")) and Path(name).is_file()):
        return True
    return any(sign in name for sign in "*?[") and bool(fnmatch.filter(known, name))


def _hint(name: str, known: set[str], theirs: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    near += (
        difflib.get_close_matches(name, sorted(theirs - known), n=3 - len(near), cutoff=0.6) if len(near) < 3 else []
    )
    return f"did you mean {', '.join(near)}?" if near else "`planaria tasks list` shows what there is"
