"""Reports from real results: HTML without a network, Markdown, JSON; what is broken is one line."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalsched.charts import Line, Point, line_chart, sparkline, ticks
from evalsched.recording import RecordJob, record
from evalsched.report_command import find_folder, report_command
from evalsched.report_data import markers, read_report
from evalsched.reports import refresh_report, to_html, to_json, to_markdown, write_report
from evalsched.scoring import ScoreJob, score
from evalsched.types import EvalSettings, Request, Response
from planner.errors import BadInputError, GateRegressError
from planner.events import Action, Event
from tests.support.tiny_model import write_tokenizer

STEPS = (60, 120, 180)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder: three checkpoints that get better at bytes, a fault between them, one untrusted document."""
    base = tmp_path_factory.mktemp("state")
    folder = base / "jobs" / "tiny-1a2b"
    (folder / "reports").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANARIA_CACHE", str(base / "cache"))
        tokenizer = write_tokenizer(base / "tokenizer")
        settings = EvalSettings(tasks=("stdlib_bits_per_byte", "stdlib_next_line"), limit=30, bootstrap_iters=0)
        recorded = record(RecordJob(settings=settings, tokenizer=str(tokenizer)))
        for number, step in enumerate(STEPS):
            answers = {request.id: _answer(request, number) for request in recorded.requests()}
            score(
                ScoreJob(
                    settings=settings, model=f"/models/step-{step:08d}.hf", tokenizer=str(tokenizer), answers="",
                    recording=str(recorded.folder), output=str(folder / "reports" / f"step-{step:08d}"),
                    block={"step": step, "engine": {"name": "vllm", "dtype": "<float32>"}},
                ),
                answers,
            )  # fmt: skip
    _write_job(folder)
    return folder


def _answer(request: Request, number: int) -> Response:
    rng = random.Random(request.digest)
    if request.request_type == "loglikelihood_rolling":
        nats = (4.0 - number + rng.gauss(0, 0.2)) * math.log(2)
        return Response(id=request.id, value=-nats * len(request.context.encode()))
    flags = ("continuation_truncated",) if (request.doc_id, number) == (3, 2) else ()
    return Response(id=request.id, value=(-rng.random() * 9, False), flags=flags)


def _write_job(folder: Path) -> None:
    events = [
        Event(time=0, action=Action.JOB_STATE, old="queued", new="starting"),
        Event(time=5, action=Action.JOB_STATE, old="starting", new="running"),
        Event(time=20, action=Action.FAULT_INJECTED, details={"step": 100, "rank": 1, "kind": "sigkill"}),
        Event(time=21, action=Action.FAULT_DETECTED, details={"step": 100, "rank": 1}),
        Event(time=30, action=Action.FAULT_RECOVERED, details={"step": 100, "rank": 1, "cure": "<b>restart</b>"}),
        Event(time=60, action=Action.JOB_STATE, old="running", new="done"),
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event.to_json()) + "\n" for event in events))
    lines = [
        {"step": s, "loss": 5 / s, "seconds": 0.25, "workers": 2, "incarnation": 1, "tokens": 9, "grad_norm": 1.0}
        for s in range(1, 181)
    ]
    lines[-1]["valid_loss"] = 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text('{"name": "tiny"}')


class _Page(HTMLParser):
    """Checks that tags nest, and collects what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetches: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.fetches.append(tag)
        self.fetches += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_needs_nothing_else_and_shows_what_happened(job: Path) -> None:
    text = to_html(read_report(job))
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.fetches == []
    assert "url(" not in text
    assert text.count("<svg") == 3  # two tasks and the loss
    assert len(re.findall(r'class="event fault"', text)) == 3  # the fault, once on each curve
    assert "sigkill, rank 1" in text
    assert "<b>restart</b>" not in text  # what events say is text
    assert "&lt;float32&gt;" in text
    assert "chance 0.25" in text
    assert "bits_per_byte (lower is better)" in text
    assert "continuation_truncated" in text
    assert "(1 not trusted)" in text


def test_json_compares_each_checkpoint_with_the_one_before(job: Path) -> None:
    data = to_json(read_report(job))
    assert [one["step"] for one in data["checkpoints"]] == list(STEPS)
    for one in data["checkpoints"][1:]:
        move = next(m for m in one["comparison"] if m["metric"] == "bits_per_byte,none")
        assert move["paired"]
        assert move["verdict"] == "better"
        assert move["difference"] < 0 < move["z"]
    assert data["checkpoints"][0]["gate"]["verdict"] == "none"
    assert data["checkpoints"][1]["gate"]["verdict"] == "pass"
    assert data["checkpoints"][2]["untrusted"] == {"stdlib_next_line": [3]}
    assert data["job"]["state"] == "done"
    assert 0 < data["job"]["ettr"] <= 1
    assert [marker["label"] for marker in data["job"]["markers"]] == ["sigkill, rank 1"]
    score_ = data["checkpoints"][0]["results"]["stdlib_bits_per_byte"]["bits_per_byte,none"]
    assert score_["low"] < score_["value"] < score_["high"]


def test_the_paired_error_of_bits_per_byte_is_in_its_own_unit(job: Path) -> None:
    """All documents move by one bit, so the difference is certain, whatever their own difficulty."""
    data = to_json(read_report(job))
    move = next(m for m in data["checkpoints"][1]["comparison"] if m["metric"] == "bits_per_byte,none")
    assert math.isclose(move["difference"], -1.0, abs_tol=1e-9)
    assert move["stderr"] < 1e-9


def test_markdown_has_a_row_per_checkpoint(job: Path) -> None:
    text = to_markdown(read_report(job))
    rows = [line for line in text.splitlines() if line.startswith("| step ")]
    assert [row.split("|")[1].strip() for row in rows[: len(STEPS)]] == [f"step {step}" for step in STEPS]
    assert "sigkill" in text or "restart" in text


def test_a_single_results_folder_has_all_numbers_and_no_curve(job: Path) -> None:
    data = read_report(job / "reports" / "step-00000060")
    text = to_html(data)
    assert "<svg" not in text
    assert "byte_perplexity" in text


def test_results_of_lm_evals_own_command_are_read(job: Path, tmp_path: Path) -> None:
    source = json.loads((job / "reports" / "step-00000060" / "results.json").read_text())
    del source["planaria"]
    (tmp_path / "some__model").mkdir()
    (tmp_path / "some__model" / "results_2026-01-01T00-00-00.json").write_text(json.dumps(source))
    data = to_json(read_report(tmp_path))
    assert data["checkpoints"][0]["step"] == 60  # from the model's name
    assert "stdlib_next_line" in data["checkpoints"][0]["results"]


def test_a_regression_is_named_and_ends_with_code_6(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, step in enumerate((180, 60)):  # the better one first
        folder = tmp_path / f"step-{number:08d}"
        folder.mkdir()
        for path in (job / "reports" / f"step-{step:08d}").iterdir():
            text = path.read_text()
            (folder / path.name).write_text(text.replace(f'"step": {step}', f'"step": {number}'))
    data = read_report(tmp_path)
    assert data.gates[1].verdict == "regress"
    assert "stdlib_bits_per_byte" in data.gates[1].reasons[0]
    assert "regresses" in to_markdown(data)
    assert "step 1 regresses:</span> stdlib_bits_per_byte bits_per_byte,none: +2, over 99 standard errors" in to_html(
        data
    )
    with pytest.raises(GateRegressError, match=r"^gate: step 1 regresses: stdlib_bits_per_byte") as refused:
        report_command(str(tmp_path), "json", None, None)
    assert refused.value.exit_code == 6
    assert json.loads(capsys.readouterr().out)["checkpoints"][1]["gate"]["verdict"] == "regress"
    assert (tmp_path / "report.html").is_file()


def test_writing_and_renewing(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_report(job) == job / "reports" / "report.html"
    assert refresh_report(job / "reports" / "step-00000060") == job / "reports" / "report.html"
    assert (job / "reports" / "report.md").is_file()
    assert report_command("tiny-1a2b", "json", job.parent.parent, None) == 0
    assert json.loads(capsys.readouterr().out)["title"].startswith("tiny")
    assert report_command(str(job), "md", None, None) == 0
    assert capsys.readouterr().out.startswith("# tiny")


def test_a_report_that_cannot_be_made_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "results.json").write_text("{ broken")
    assert refresh_report(tmp_path) is None
    assert "report.failed" in caplog.text


def test_what_is_not_there_is_one_line(job: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="did you mean tiny-1a2b"):
        find_folder("tiny-1a2c", job.parent.parent)
    with pytest.raises(BadInputError, match="no such job or folder"):
        find_folder("x", tmp_path)
    with pytest.raises(BadInputError, match=r"neither results\.json"):
        read_report(tmp_path)
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(BadInputError, match="not a results file"):
        read_report(tmp_path)


def test_a_job_without_results_has_a_report(job: Path, tmp_path: Path) -> None:
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_text((job / name).read_text() + '{"cut')
    assert "No checkpoint has been evaluated yet" in to_html(read_report(tmp_path))


def test_markers_show_a_fault_once() -> None:
    events = [
        Event(time=1, action=Action.FAULT_INJECTED, details={"step": 7, "kind": "hang", "rank": 0}),
        Event(time=2, action=Action.FAULT_DETECTED, details={"step": 8}),
        Event(time=3, action=Action.FAULT_DETECTED, details={"step": 30, "cause": "nccl timeout"}),
        Event(time=4, action=Action.REFORM_COMPLETED, details={"step": 30}),
    ]
    assert [(m.step, m.label) for m in markers(events)] == [
        (7, "hang, rank 0"), (30, "nccl timeout"), (30, "reform completed"),
    ]  # fmt: skip


numbers = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.tuples(numbers, numbers), max_size=30), st.lists(numbers, max_size=3))
def test_every_chart_is_well_formed_and_inside_its_frame(pairs: list[tuple[float, float]], at: list[float]) -> None:
    points = [Point(x=x, y=y, low=y - 1, high=y + 1) for x, y in sorted(pairs)]
    text = line_chart(points, title='a "title" & <more>', lines=[Line(x=x, label="<fault>", kind="fault") for x in at])
    if not points:
        assert "no values yet" in text
        return
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert "<fault>" not in text
    assert "nan" not in text
    for x, y in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', text):
        assert 0 <= float(x) <= 560
        assert 0 <= float(y) <= 250


@given(numbers, st.floats(1e-3, 1e6))
def test_ticks_are_few_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 12
    slack = 1e-6 * (width + abs(low))  # less than a pixel
    assert all(low - slack <= t <= low + width + slack for t in found)


def test_not_a_number_is_left_out_of_curves() -> None:
    text = line_chart([Point(x=1, y=math.nan), Point(x=2, y=1.0), Point(x=3, y=2.0)], title="t")
    assert text.count("<circle") == 2
    assert sparkline([1, 2, math.inf, 3]) == "▁▅█"
    assert sparkline([]) == ""


def test_long_curves_are_thinned_and_keep_their_peaks() -> None:
    values = [Point(x=n, y=100.0 if n == 5000 else 0.1) for n in range(20_000)]
    text = line_chart(values, title="t", dots=False)
    path: Any = re.search(r'class="line" d="M([^"]+)"', text)
    coordinates = [tuple(map(float, pair.split())) for pair in path[1].split("L")]
    assert len(coordinates) < 1300
    assert min(y for _, y in coordinates) < 60
