"""Create ``.venv`` and install the pinned packages into it. Standard library only; ``make setup`` runs it.

Idempotent: what is installed already is not fetched again, and a run that was interrupted goes on where it
stopped (each lock file is one step with a stamp of its own). Exit codes: 2 unsupported Python, 3 no disk or no network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".planaria-installed"
LOCKS = (ROOT / "requirements-cpu.lock", ROOT / "requirements-dev.lock")
NEEDED_BYTES = 6 << 30
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", flush=True)


def stop(text: str, code: int) -> None:
    """End with one line that says what to do."""
    print(f"setup: {text}", file=sys.stderr)
    raise SystemExit(code)


def check_machine() -> None:
    """Refuse what cannot work, before anything is written."""
    if sys.version_info[:2] != (3, 11):
        stop(
            f"Python {sys.version.split()[0]} is not supported: the pinned packages need Python 3.11 "
            "(run `make setup PYTHON=/path/to/python3.11`)",
            2,
        )
    if not os.access(ROOT, os.W_OK):
        stop(f"{ROOT} is not writable: the environment goes to {VENV}; use a checkout of your own", 3)
    free = shutil.disk_usage(ROOT).free
    if not PYTHON.exists() and free < NEEDED_BYTES:
        stop(f"{free / 2**30:.1f} GiB free below {ROOT}, {NEEDED_BYTES / 2**30:.0f} GiB needed: free some disk", 3)


def digest(path: Path) -> str:
    """Content of a lock file, as the stamp of its step."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip inside the environment; its own words are shown only when it fails."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def explain(result: subprocess.CompletedProcess[str], what: str) -> None:
    """End with the one line that matters of a failed pip run."""
    noise = ("WARNING", "Location", "hint:", "note:")
    lines = [line for line in (result.stderr + result.stdout).splitlines() if line.strip()]
    telling = [line for line in lines if not line.lstrip().startswith(noise)] or lines or ["pip gave no reason"]
    text = " ".join(lines)
    if "No space left" in text:
        stop(f"{what}: the disk is full; free some space and run `make setup` again (it goes on where it stopped)", 3)
    signs = ("Temporary failure in name resolution", "NewConnectionError", "Network is unreachable", "ProxyError")
    if any(sign in text for sign in signs):
        stop(f"{what}: no package index can be reached; check the network and run `make setup` again", 3)
    stop(f"{what}: {telling[-1].strip()}", 3)


def install_torch(lock: Path) -> None:
    """The CPU build of torch: from where pip already finds it, else from PyTorch's own CPU index."""
    wanted = next(line for line in lock.read_text().splitlines() if line.startswith("torch=="))
    say(f"{wanted} (about 700 MB unpacked)")
    if pip("install", "--quiet", "--no-deps", wanted).returncode == 0:
        return
    result = pip("install", "--quiet", "--no-deps", "--extra-index-url", TORCH_CPU_INDEX, wanted)
    if result.returncode != 0:
        explain(result, wanted)


def install_lock(lock: Path) -> None:
    """One lock file, unless its stamp says that just this content is there."""
    stamp = VENV / f".{lock.name}.done"
    if stamp.exists() and stamp.read_text() == digest(lock):
        say(f"{lock.name}: there already")
        return
    started = time.monotonic()
    lines = lock.read_text().splitlines()
    if any(line.startswith("torch==") for line in lines):
        install_torch(lock)
    say(f"{lock.name}: {sum('==' in line for line in lines)} packages (the first time takes some minutes)")
    result = pip("install", "--quiet", "--no-deps", "--prefer-binary", "-r", str(lock))
    if result.returncode != 0:
        explain(result, lock.name)
    stamp.write_text(digest(lock))
    say(f"{lock.name}: done in {time.monotonic() - started:.0f} s")


def make_venv() -> None:
    """A virtual environment of this interpreter; one that is broken or of another Python is made again."""
    if PYTHON.exists():
        probe = subprocess.run([str(PYTHON), "-c", "import sys, pip; print(sys.version_info[:2] == (3, 11))"],
                               capture_output=True, text=True, check=False)  # fmt: skip
        if probe.stdout.strip() == "True":
            return
        say("the environment is unusable: making it again")
        shutil.rmtree(VENV)
    say(f"creating {VENV}")
    result = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        stop(f"the environment could not be made: {(result.stderr or result.stdout).strip().splitlines()[-1]}", 3)


def main() -> None:
    """All steps; the last one writes the stamp that `make` looks at."""
    check_machine()
    make_venv()
    for lock in LOCKS:
        install_lock(lock)
    result = pip("install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    if result.returncode != 0:
        explain(result, "planaria itself")
    STAMP.write_text("\n".join(digest(lock) for lock in LOCKS))
    say("ready: `make demo` shows the whole story, `.venv/bin/planaria --help` lists the commands")


if __name__ == "__main__":
    main()
