"""The front door answers without loading anything heavy, and its errors are one line with the right code."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner import cli
from planner.cli import app

COMMANDS = [
    "demo", "up", "down", "submit", "run", "status", "logs", "cancel", "agent", "worker", "coordinator", "dashboard",
    "eval", "watch", "report", "checkpoint", "plan", "simulate", "diagnose", "nodecheck", "nodes", "drain", "cordon",
    "uncordon", "pause", "resume", "retry", "tasks",
]  # fmt: skip
HEAVY = ("torch", "celery", "vllm", "megatron", "lm_eval", "scipy", "sklearn")


def planaria(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planner.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_command_of_the_contract_is_there() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name for group in app.registered_groups}
    assert names | groups == set(COMMANDS)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from planner.cli import app;"
        "result = CliRunner().invoke(app, ['--help']); assert result.exit_code == 0, result.output;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("target", re.findall(r'_call\(\s*"([\w.]+:\w+)"', Path(cli.__file__).read_text()))
def test_every_command_leads_somewhere(target: str) -> None:
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_unknown_command_is_bad_input() -> None:
    assert planaria("levitate").returncode == 2


def test_errors_are_one_line_without_traceback(tmp_path: Path) -> None:
    result = planaria("plan", str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert "none.yaml" in result.stderr
