"""A job whose evaluation falls behind: checkpoints are left out or made smaller, and the report says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evalsched import outlook
from evalsched.app import make_app
from evalsched.arrears import Arrears
from evalsched.conductor import Conductor
from evalsched.ledger import Ledger, sqlite_url
from evalsched.report_data import read_report
from evalsched.reports import to_html, to_json, to_markdown
from evalsched.runs import Run, RunSpec
from evalsched.types import EvalSettings, RequestId
from planner.events import TrialState
from planner.store import ClusterStore
from tests.support.redis import await_that


@pytest.fixture
def conductor(store: ClusterStore, tmp_path: Path) -> Iterator[Conductor]:
    """One that nobody ticks: its runs stand as the tests put them."""
    with Ledger(sqlite_url(tmp_path / "l.sqlite"), 1) as ledger:
        made = Conductor(store, ledger, make_app(store.url))
        yield made
        made.close()


def spec(folder: Path, step: int, behind: str, **more: Any) -> RunSpec:
    return RunSpec(
        model=str(folder / "no-model"), settings=EvalSettings(tasks=("t",), **more),
        output=str(folder / "reports" / f"step-{step:08d}"), created=step * 10.0, job="j", step=step, behind=behind,
    )  # fmt: skip


def known(run: Run, seconds: float, documents: int = 400) -> Run:
    """As if its requests were recorded: that many seconds of them."""
    run.prepared = SimpleNamespace(  # type: ignore[assignment]
        trials={}, recording=SimpleNamespace(tasks=[SimpleNamespace(task="t", documents=documents)])
    )
    run.pace.begin({RequestId("loglikelihood", "t", n, 0, 0): seconds / 10 for n in range(10)})
    run.state = TrialState.RUNNING
    return run


def test_intermediate_checkpoints_are_left_out_and_the_report_says_why(conductor: Conductor, tmp_path: Path) -> None:
    job = tmp_path / "job"
    (job / "reports").mkdir(parents=True)
    (job / "events.jsonl").write_text("")
    runs = [known(conductor.add(spec(job, step, "skip")), 15.0) for step in (1, 2, 3, 4)]
    runs[0].pace.closed([RequestId("loglikelihood", "t", 0, 0, 0)], 0.0)
    Arrears(conductor).tend(time.time())
    assert [run.state is TrialState.SKIPPED for run in runs] == [False, True, True, False]
    assert conductor.table.runs().keys() == {runs[0].id, runs[3].id}
    assert not conductor.skip(runs[0], "too late", 0.0), "something of it was run"
    await_that(lambda: len(list(job.glob("reports/*/skipped.json"))) == 2)
    await_that(lambda: (job / "reports" / "report.json").is_file())
    data = read_report(job)
    assert [label for label, _ in data.left_out] == ["step 2", "step 3"]
    assert all("evaluation was behind" in text for _, text in data.left_out)
    assert "Left out" in to_html(data)
    assert "step 2: skipped: evaluation was behind" in to_markdown(data)
    assert to_json(data)["left_out"][0]["checkpoint"] == "step 2"


def test_a_new_checkpoint_gets_fewer_documents_and_says_so(conductor: Conductor, tmp_path: Path) -> None:
    arrears = Arrears(conductor)
    first = spec(tmp_path, 1, "limit")
    assert arrears.fitted(first) == first, "nothing is known yet"
    known(conductor.add(first), 60.0)
    fitted = arrears.fitted(spec(tmp_path, 2, "limit"))
    assert fitted.settings.limit == 25
    assert fitted.remark.startswith("25 documents per task instead of 400")
    assert arrears.fitted(spec(tmp_path, 2, "all")).settings.limit is None
    share = spec(tmp_path, 2, "limit", limit=0.5)
    assert arrears.fitted(share) == share, "a share of each task is left as it is"
    late = replace(spec(tmp_path, 2, "limit"), created=1000.0)
    assert arrears.fitted(late) == late, "with this pace there is time enough"


def test_what_waits_is_told_per_report_most_urgent_first(conductor: Conductor, tmp_path: Path) -> None:
    old = known(conductor.add(spec(tmp_path, 1, "all")), 60.0)
    old.tails, old.longest = {"t": 7.0}, 0.5
    new = conductor.add(replace(spec(tmp_path, 2, "all"), created=95.0))
    first, second = outlook.reports(conductor, 100.0)
    assert (first["name"], second["name"]) == (new.id, old.id)
    assert second == {
        "name": old.id, "slot_seconds": pytest.approx(60.0), "tail_seconds": 7.0, "longest_seconds": 0.5,
        "waited_seconds": pytest.approx(90.0), "job": "job:j",
    }  # fmt: skip
    assert first["slot_seconds"] == pytest.approx(60.0), "not recorded yet: taken to be like the others"
    assert outlook.load_seconds(conductor) is None
