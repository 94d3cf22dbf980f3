"""The demo's config, its view on a terminal and without one, and its summary."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from planner.events import Action, Event
from planner.pretrain_config import CPU_HEAD_SIZES, FaultKind
from pretrain.demo import checkpoints, demo_config, exit_code, print_summary, summary
from pretrain.demo_view import DemoView, sparkline

OVERVIEW: dict[str, Any] = {
    "slots": [
        {"node": "local", "slot": 0, "holder": "job:demo-1", "state": "held"},
        {"node": "local", "slot": 1, "holder": None, "state": "free"},
    ],
    "evaluation": {"queued": 1, "running": 2, "done": 3, "workers": 1},
}


def record(**changes: Any) -> dict[str, Any]:
    base = {
        "id": "demo-1", "state": "running", "step": 30, "steps": 300, "loss": 2.5, "incarnation": 1, "faults": [],
        "ettr": 0.9, "ettr_losses": {"detect": 0.02, "start": 4.0}, "folder": "/nowhere",
    }  # fmt: skip
    return {**base, **changes}


def test_the_demo_is_what_the_contract_says() -> None:
    config = demo_config()
    (fault,) = config.faults
    assert fault.kind is FaultKind.SIGKILL
    assert config.steps // 4 < fault.at_step < config.steps * 3 // 4, "in the middle"
    assert fault.at_step % config.checkpoint.every_steps, "between two checkpoints"
    assert config.steps // config.checkpoint.every_steps >= 5
    assert config.checkpoint.keep >= config.steps // config.checkpoint.every_steps, "all stay to be looked at"
    assert config.workers.max == 2
    assert config.model.head_size in CPU_HEAD_SIZES
    assert len(config.evaluate.tasks) >= 2


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    line = sparkline([float(n) for n in range(1000)])
    assert len(line) == 48
    assert (line[0], line[-1]) == ("▁", "█")


def test_without_a_terminal_it_prints_a_line_per_change() -> None:
    out = io.StringIO()
    told = [
        Event(time=0.0, action=Action.FAULT_DETECTED, job="demo-1", details={"rank": 1, "step": 31, "kind": "sigkill"}),
        Event(time=0.0, action=Action.SNAPSHOT_TAKEN, job="demo-1"),
    ]
    with DemoView(Console(file=out, force_terminal=False, width=200)) as view:
        view.show(OVERVIEW, record(), told)
        view.show(OVERVIEW, record(step=31, loss=2.4), [])
        view.show(OVERVIEW, record(step=60), [])
        view.say("a [bold]word[/bold]")
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert "fault.detected" in lines[0]
    assert "step 31, rank 1, kind sigkill" in lines[0]
    assert "step 30 of 300, loss 2.500; slots: job:demo-1, free; evaluation: 1 queued, 2 running, 3 done" in lines[1]
    assert "step 60" in lines[2]
    assert "[bold]word" in lines[3], "text is shown as it is"
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_it_is_a_live_view() -> None:
    out = io.StringIO()
    with DemoView(Console(file=out, force_terminal=True, width=120, height=40)) as view:
        view.show(OVERVIEW, record(), [])
        view.show(OVERVIEW, record(step=31, loss=2.0, state="healing"), [])
    text = out.getvalue()
    assert "\x1b[" in text
    for word in ("healing", "31 of 300", "job:demo-1", "1 queued"):
        assert word in text


def finished(folder: Path) -> dict[str, Any]:
    """A job's folder as the demo leaves it."""
    lines = [
        {
            "time": 1.0,
            "action": "checkpoint.published",
            "step": step,
            "path": str(folder / "checkpoints" / f"step-{step:08d}"),
        }
        for step in (50, 100)
    ]
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (50, 100):
        reports = folder / "reports" / f"step-{step:08d}"
        reports.mkdir(parents=True)
        results = {
            "t1": {
                "alias": "t1",
                "acc,none": 0.5,
                "acc_stderr,none": 0.1,
                "acc_norm,none": 0.4,
                "acc_norm_stderr,none": "N/A",
            },
            "t2": {"exact_match,name": 0.25, "exact_match_stderr,name": 0.05, " ": " "},
        }
        (reports / "results.json").write_text(json.dumps({"results": results}))
    fault = {"step": 75, "rank": 1, "kind": "sigkill", "recovered_seconds": 1.25, "severity": "SEV2"}
    return record(folder=str(folder), state="done", step=100, faults=[fault])


def test_the_summary_has_the_contracts_shape(tmp_path: Path) -> None:
    done = finished(tmp_path / "jobs" / "demo-1")
    document = summary(done, tmp_path, 12.0)
    assert document["state_dir"] == str(tmp_path)
    assert document["report"].endswith("reports/report.html")
    assert [entry["step"] for entry in document["checkpoints"]] == [50, 100]
    assert document["checkpoints"][0]["results"] == {
        "t1": {"acc": 0.5, "acc_stderr": 0.1, "acc_norm": 0.4},
        "t2": {"exact_match,name": 0.25, "exact_match_stderr,name": 0.05},
    }
    assert document["faults"] == [{"step": 75, "rank": 1, "kind": "sigkill", "recovered_seconds": 1.25}]
    assert (document["ettr"], document["seconds"]) == (0.9, 12.0)
    json.dumps(document, allow_nan=False)


def test_the_table_shows_error_bars_where_there_are_any(tmp_path: Path) -> None:
    done = finished(tmp_path / "j")
    out = io.StringIO()
    print_summary(Console(file=out, width=160), summary(done, tmp_path, 12.0), done)
    text = out.getvalue()
    assert "0.500 ± 0.100" in text
    assert "0.250 ± 0.050" in text
    assert "1.25 s later" in text
    assert "ETTR 90.0%" in text
    assert "start 4.0 s" in text
    assert "detect" not in text, "what rounds to nothing is left out"


def test_the_exit_code_tells_whether_the_whole_story_came_true(tmp_path: Path) -> None:
    config = demo_config()
    config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"tasks": ["t1", "t2"]})})
    done = finished(tmp_path / "j")
    document = summary(done, tmp_path, 12.0)
    assert exit_code(done, document, config) == 0
    unhealed = {**document, "faults": [{**document["faults"][0], "recovered_seconds": None}]}
    assert exit_code(done, unhealed, config) == 1
    (tmp_path / "j" / "reports" / "step-00000100" / "results.json").unlink()
    assert exit_code(done, summary(done, tmp_path, 12.0), config) == 1
    assert exit_code(record(state="failed"), document, config) == 5
    assert exit_code(record(state="preempted"), document, config) == 4
    assert [entry["results"] for entry in checkpoints(tmp_path / "j")][1] == {}
