"""Finding and loading lm-eval tasks: shared by recording and scoring, so that both see the same ones.

Imports lm-eval; only subprocesses and metric workers import this module.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import lm_eval.tasks
import lm_eval.utils
from lm_eval.api.group import Group
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, Kind, TaskIndex

from evalsched import code_eval, offline_data
from evalsched.benchmarks import how_to_prepare, prepared_folder, shipped_folder
from evalsched.digests import cache_folder
from evalsched.task_names import lm_eval_names
from evalsched.types import EvalSettings
from planner.errors import BadInputError, PlanariaError, one_line
from planner.files import write_json

ManagerT = TypeVar("ManagerT", bound="LoadingManager")


def _remember_templates() -> None:
    """lm-eval compiles a task's prompt template anew for every document, half of all its time: keep what is compiled.

    A compiled template has no state of its own, so the texts stay the same.
    """
    environment = lm_eval.utils.env
    if not hasattr(environment.from_string, "cache_info"):
        environment.from_string = functools.lru_cache(maxsize=4096)(environment.from_string)


_remember_templates()
code_eval.install()
offline_data.install()


class LoadingManager(TaskManager):  # type: ignore[misc]  # lm-eval has no types
    """lm-eval's task manager, which also keeps what it loaded and turns failures into one line each."""

    loaded: dict[str, Any]

    def load(self, task_list: Any) -> Any:
        """Load tasks and groups as lm-eval does, and keep them in ``loaded``.

        Raises:
            BadInputError: a task cannot be loaded, or stands twice (alone and in a group).
        """
        built: list[Any] = []
        for spec in task_list:
            found = self._load_one(spec)
            built.extend(found if isinstance(found, list) else [found])
        try:
            self.loaded = super().load(built)
        except ValueError as error:
            raise BadInputError(f"--tasks: {one_line(error)}; name it once") from error
        return self.loaded

    def _load_one(self, spec: Any) -> Any:
        if isinstance(spec, (Task, Group)):
            return spec
        try:
            with code_eval.loading_tasks():
                return self._load_spec(spec)
        except PlanariaError:
            raise
        except Exception as error:  # whatever a task's own code raises
            raise BadInputError(f"task {spec}: {_why(error, str(spec))}") from error


def _why(error: Exception, task: str) -> str:
    text = one_line(error)[:300] or type(error).__name__
    kinds = {base.__name__ for base in type(error).__mro__}
    if kinds & {
        "ConnectionError",
        "FileNotFoundError",
        "DatasetNotFoundError",
        "OfflineModeIsEnabled",
        "HfHubHTTPError",
    }:
        return f"its data is not on this machine ({text}); {how_to_prepare(task)}"
    if isinstance(error, ModuleNotFoundError):
        return f"it needs the Python module {error.name!r}, which is not installed"
    return f"cannot be loaded: {type(error).__name__}: {text}"


def task_names(settings: EvalSettings) -> list[str]:
    """The tasks asked for, each once, in order."""
    return list(dict.fromkeys(name.strip() for name in settings.tasks if name.strip()))


def task_manager(
    settings: EvalSettings,
    metadata: dict[str, Any],
    kind: type[ManagerT],
) -> tuple[ManagerT, list[str]]:
    """A manager that knows all tasks asked for, and their names with patterns expanded.

    lm-eval's own 14,000 task files take 8 s to index, so of them only the folders of what is asked for are
    read, unless a group reaches beyond them. Later folders win, the user's last.

    Raises:
        BadInputError: an include path is missing, or a task is unknown (with the nearest names).
    """
    for folder in settings.include_path:
        if not Path(folder).is_dir():
            raise BadInputError(f"--include-path {folder}: no such folder")
    paths: list[str | Path] = [shipped_folder()]
    if prepared_folder().is_dir():
        paths.append(prepared_folder())
    paths += [Path(folder) for folder in settings.include_path]
    names = task_names(settings)
    if not names:
        raise BadInputError("--tasks: no task is named; `planaria tasks list` shows what there is")
    manager = kind(include_path=paths, include_defaults=False, metadata=metadata)
    unknown = [name for name in names if not _known(name, manager.task_index)]
    if unknown:
        _refuse_unknown(unknown, manager.all_tasks)
        near = [default_tasks()[name] for name in unknown if name in default_tasks()]
        folders = [str(_default_root() / folder) for folder in dict.fromkeys(near) if folder]
        manager = kind(include_path=[*folders, *paths], include_defaults=False, metadata=metadata)
        if not folders or not all(_known(name, manager.task_index) for name in names):
            manager = kind(include_path=paths, include_defaults=True, metadata=metadata)
    return manager, _expand(names, manager)


def _default_root() -> Path:
    return Path(lm_eval.tasks.__file__).parent


@functools.cache
def default_tasks() -> dict[str, str]:
    """lm-eval's own tasks, groups and tags by name, with the folder of their file (empty for tags).

    Found out once per version of lm-eval and kept in the cache.
    """
    path = cache_folder() / f"lm-eval-{version('lm_eval')}-tasks.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        index = TaskIndex.build([_default_root()])
    found = {
        name: str(entry.yaml_path.parent.relative_to(_default_root())) if entry.yaml_path else ""
        for name, entry in index.items()
    }
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    return found


def _refuse_unknown(names: Sequence[str], ours: Sequence[str]) -> None:
    """Say at once that a name is nowhere (patterns and files are looked at later); lm-eval's index is not needed."""
    theirs = lm_eval_names() or set()
    for name in names:
        if name not in theirs and not any(c in name for c in "*?[") and not Path(name).is_file():
            _unknown(name, [*ours, *sorted(theirs)])


def _unknown(name: str, known: Sequence[str]) -> NoReturn:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {', '.join(near)}?" if near else "`planaria tasks list` shows what there is"
    raise BadInputError(f"--tasks: unknown task {name!r}; {hint}")


def _known(name: str, index: dict[str, Entry]) -> bool:
    """Whether ``index`` holds a name and, for a group, everything below it."""
    entry = index.get(name)
    if entry is None:
        path = Path(name)
        entry = TaskIndex.entry_from_path(path) if path.suffix in (".yaml", ".yml") else None
    if entry is None:
        return False
    if entry.kind is not Kind.GROUP:
        return True
    members = (entry.cfg or {}).get("task") or []
    return all(_member_known(member, index) for member in (members if isinstance(members, list) else [members]))


def _member_known(member: Any, index: dict[str, Entry]) -> bool:
    if isinstance(member, str):
        return _known(member, index)
    name = member.get("group") or member.get("task")
    if isinstance(name, str) and name in index:
        return _known(name, index)
    children = member.get("task")
    if "group" in member and isinstance(children, list):
        return all(_member_known(child, index) for child in children)
    return "dataset_path" in member or "custom_dataset" in member


def _expand(names: Sequence[str], manager: TaskManager) -> list[str]:
    found: list[str] = []
    for name in names:
        if name in manager.task_index or TaskIndex.entry_from_path(Path(name)):
            found.append(name)
        elif matched := manager.match_tasks([name]) if any(c in name for c in "*?[") else []:
            found.extend(matched)
        else:
            _unknown(name, manager.all_tasks)
    return list(dict.fromkeys(found))


def simple_evaluate_arguments(settings: EvalSettings) -> dict[str, Any]:
    """The arguments of ``lm_eval.simple_evaluate`` that recording and scoring must share."""
    return {
        "num_fewshot": settings.num_fewshot,
        "limit": settings.limit,
        "samples": {name: list(ids) for name, ids in settings.samples.items()} if settings.samples else None,
        "system_instruction": settings.system_instruction,
        "apply_chat_template": settings.apply_chat_template,
        "fewshot_as_multiturn": settings.fewshot_as_multiturn,
        "gen_kwargs": dict(settings.gen_kwargs) if settings.gen_kwargs else None,
        "predict_only": settings.predict_only,
        "random_seed": settings.random_seed,
        "numpy_random_seed": settings.numpy_random_seed,
        "torch_random_seed": settings.torch_random_seed,
        "fewshot_random_seed": settings.fewshot_random_seed,
        "confirm_run_unsafe_code": True,
    }
