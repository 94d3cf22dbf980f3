"""``status --json`` as DESIGN.md says, the dashboard's page and data, and that both only read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from planner.dashboard import LossCurves, document
from planner.errors import BadInputError
from planner.events import Action
from planner.leases import GrantRequest, Revocation
from planner.overview import JOB_FIELDS, find_named, overview
from planner.status import cordon_command, drain_command, nodes_command, status_command, uncordon_command
from planner.store import ClusterStore, NodeFacts
from tests.support.redis import await_that


def _fill(store: ClusterStore, folder: Path) -> None:
    """A cluster with a running job, a free, a held, a revoked and an unconfirmed slot."""
    fence = store.table.lock("me:1:x", 1)
    store.register_node(NodeFacts(name="n1", address="127.0.0.1", slots=4, boot="b"))
    marks = store.quarantine("n1")
    store.confirm_free("n1", {slot: mark for slot, mark in marks.items() if slot != "n1/3"})
    store.table.grant([GrantRequest(holder="job:a", node="n1", slots=(0,))], fence=fence)
    (other,) = store.table.grant([GrantRequest(holder="evaluation:n1-1", node="n1", slots=(1,))], fence=fence)
    store.table.revoke([Revocation(lease=other.id, grace_seconds=5.0)], fence=fence)
    store.put_job("a", {"name": "tiny", "state": "running", "step": 3, "steps": 9, "loss": 2.5, "faults": [{}, {}],
                        "folder": str(folder), "secret_stuff": "x"})  # fmt: skip
    store.put_document("evaluation", {"queued": 2, "running": 1, "done": 4, "workers": 1})
    store.tell(Action.JOB_STATE, job="a", old="starting", new="running", reason="<b>steps</b> complete")


def test_the_document_has_the_promised_shape(store: ClusterStore, tmp_path: Path) -> None:
    _fill(store, tmp_path)
    found = overview(store)
    (job,) = found["jobs"]
    assert job.keys() >= JOB_FIELDS.keys()
    assert (job["id"], job["name"], job["faults"], job["ettr_losses"]) == ("a", "tiny", 2, {})
    assert "secret_stuff" not in job
    rows = [(row["node"], row["slot"], row["holder"], row["state"]) for row in found["slots"]]
    assert rows == [
        ("n1", 0, "job:a", "held"),
        ("n1", 1, "evaluation:n1-1", "revoked"),
        ("n1", 2, None, "free"),
        ("n1", 3, None, "unconfirmed"),
    ]
    assert found["slots"][0]["lease_expires"] > store.server_time()
    assert found["evaluation"] == {"queued": 2, "running": 1, "done": 4, "workers": 1}
    (node,) = found["nodes"]
    assert (node["state"], node["held"], node["cordoned"]) == ("alive", 2, None)
    store.put_job("b", {"loss": float("nan"), "ettr": float("inf")})
    json.dumps(overview(store), allow_nan=False)


def test_an_empty_cluster_has_the_same_shape(store: ClusterStore) -> None:
    found = overview(store)
    assert (found["jobs"], found["slots"], found["nodes"], found["decision"], found["coordinator"]) == (
        [],
        [],
        [],
        None,
        None,
    )
    assert found["evaluation"] == {"queued": 0, "running": 0, "done": 0, "workers": 0}


def test_status_prints_tables_and_one_document(store: ClusterStore, tmp_path: Path) -> None:
    _fill(store, tmp_path)
    environment = {**os.environ, "PLANARIA_URL": store.url, "COLUMNS": "180"}
    for arguments in (["status", "a"], ["nodes"]):
        done = subprocess.run(
            [sys.executable, "-m", "planner.cli", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "n1" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "status", "--json"], env=environment, capture_output=True, timeout=60
    )
    assert json.loads(done.stdout)["jobs"][0]["loss"] == 2.5


def test_cordon_drain_uncordon_are_told_once_and_shown(
    store: ClusterStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fill(store, tmp_path)
    for command, mode in (
        (cordon_command, "cordon"),
        (cordon_command, "cordon"),
        (drain_command, "drain"),
        (uncordon_command, None),
    ):
        assert command(node="n1", state_dir=None, url=store.url) == 0
        assert overview(store)["nodes"][0]["cordoned"] == mode
        assert "n1" in capsys.readouterr().out
    assert nodes_command(json_output=True, state_dir=None, url=store.url) == 0
    assert json.loads(capsys.readouterr().out)["nodes"][0]["name"] == "n1"
    changes = [(event.old, event.new) for event in store.last_events() if event.action.value.startswith("node.")]
    assert changes == [(None, "cordon"), ("cordon", "drain"), ("drain", None)]
    with pytest.raises(BadInputError, match="nosuchjob: not known here"):
        status_command(job="nosuchjob", json_output=True, state_dir=None, url=store.url)


def test_the_nearest_names_are_offered() -> None:
    assert find_named("node", "n1", ["n1"]) == "n1"
    with pytest.raises(BadInputError, match="did you mean node-1"):
        find_named("node", "nod-1", ["node-1", "other"])
    with pytest.raises(BadInputError, match="known: none"):
        find_named("node", "x", [])


def test_loss_curves_follow_the_file_and_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curves, record = LossCurves(None), {"folder": str(tmp_path)}
    assert curves.points("a", record) == []
    path.write_text("".join(json.dumps({"step": n, "loss": 5.0 - n}) + "\n" for n in (1, 2, 3)) + '{"step": 4, "lo')
    assert curves.points("a", record) == [(1, 4.0), (2, 3.0), (3, 2.0)]
    with path.open("a") as stream:
        stream.write(
            'ss": 1.5}\n{"step": 3, "loss": 2.25}\nnot JSON\n{"step": 5, "loss": null}\n[]\n{"step": 6, "loss": NaN}\n'
        )
    assert curves.points("a", record) == [(1, 4.0), (2, 3.0), (3, 2.25), (4, 1.5)]
    path.write_text('{"step": 1, "loss": 9.0}\n')  # shorter: a new file
    assert curves.points("a", record) == [(1, 9.0)]
    path.write_text("".join(json.dumps({"step": n, "loss": 1.0}) + "\n" for n in range(5000)))
    points = curves.points("a", record)
    assert len(points) <= 241
    assert points[-1][0] == 4999
    assert LossCurves(tmp_path).points("../a", {}) == []


def _get(url: str, host: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_dashboard_serves_its_page_and_data_and_writes_nothing(store: ClusterStore, tmp_path: Path) -> None:
    _fill(store, tmp_path)
    environment = {**os.environ, "PLANARIA_URL": store.url}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.5}\n')
    before = store.link.call(lambda client: sorted(client.keys("*")))
    process = subprocess.Popen(
        [sys.executable, "-m", "planner.cli", "dashboard", "--state-dir", str(tmp_path)],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        told = tmp_path / "dashboard.json"
        await_that(told.exists, 30.0, "the dashboard says where it is")
        url = json.loads(told.read_text())["url"]
        status, page = _get(url)
        assert status == 200
        assert "<title>Planaria</title>" in page
        assert "http" not in page.replace("http://www.w3.org", ""), "the page needs something from elsewhere"
        status, text = _get(url + "data")
        assert status == 200
        data: dict[str, Any] = json.loads(text)
        assert data["jobs"][0]["curve"] == [[1, 3.5]]
        assert data["events"][0]["words"].startswith("job.state a starting → running: <b>")
        assert store.url.split("@")[0] not in text
        assert _get(url + "data", host="evil.example")[0] == 400
        assert _get(url + "nothing")[0] == 404
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url + "data", data=b"{}", method="POST"), timeout=10)
        assert refused.value.code == 405
        refused.value.close()
        second = subprocess.run(
            [sys.executable, "-m", "planner.cli", "dashboard", "--port", url.rstrip("/").rpartition(":")[2]],
            env=environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert second.returncode == 2
        assert "--port" in second.stderr
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=15)
    finally:
        process.kill()
        process.wait()
    assert store.link.call(lambda client: sorted(client.keys("*"))) == before
    assert document(store, LossCurves(None))["events"]
