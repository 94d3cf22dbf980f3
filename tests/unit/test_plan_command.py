"""``planaria plan`` from the outside: documents, tables, several files, and every bad input."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner.errors import BadInputError
from planner.plan_command import plan_command, plan_file
from planner.plan_input import read_plan_input

CLUSTERS = sorted((Path(__file__).parents[2] / "configs" / "clusters").glob("*.yaml"))
DESIGN = """
cluster: {gpus: 32, gpus_per_node: 8, mtbf_gpu_hours: 12000, price_per_gpu_hour: 2.0}
jobs:
  - name: a
    kind: pretrain
    weight: 1.0
    min_workers: 8
    throughput: {8: 1.0e15, 16: 1.9e15, 32: 3.2e15}
    workers: 8
    faulted: false
    transition_seconds: 120
"""


def plan_cli(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planner.cli", "plan", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}, check=False
    )


def written(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def document(capsys: pytest.CaptureFixture[str], *paths: Path, explain: bool = False) -> Any:
    plan_command(list(paths), json_output=True, explain=explain)
    out = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(out, parse_constant=refuse)


def test_the_document_of_the_design(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, written(tmp_path, DESIGN))
    assert set(found) == {"assignments", "unassigned", "objective", "reason", "jobs"}
    assert found["assignments"] == {"a": 32}
    assert found["unassigned"] == 0
    assert found["objective"] == 1.0 * 3.2e15 * (12000 * 3600 / 32) - 1.0e15 * 120
    assert found["jobs"] == {"a": {"waf": 3.2e15, "transition_cost": 1.2e17}}
    assert "a 8 → 32" in found["reason"]


def test_several_files_are_one_document_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = written(tmp_path, DESIGN, "one.yaml")
    two = written(tmp_path, DESIGN.replace("name: a", "name: b"), "two.yaml")
    found = document(capsys, two, one, two)
    assert [list(part["assignments"]) for part in found] == [["b"], ["a"], ["b"]]


def test_a_bad_file_among_good_ones_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = (
        written(tmp_path, DESIGN, "good.yaml"),
        written(tmp_path, DESIGN.replace("8: 1.0e15", "8: -1"), "bad.yaml"),
    )
    with pytest.raises(BadInputError, match=r"bad\.yaml: job a: throughput\.8"):
        plan_command([good, bad], json_output=True)
    assert capsys.readouterr().out == ""


def test_layouts_and_models_give_parallel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = DESIGN + "    layouts: {32: {tensor: 8, pipeline: 2}}\n"
    assert document(capsys, written(tmp_path, layouts))["jobs"]["a"]["parallel"] == {
        "tensor": 8,
        "pipeline": 2,
        "data": 2,
    }
    model = """
cluster: {gpus: 16, gpu: h100-80gb}
jobs: [{name: m, model: {layers: 24, hidden_size: 2048, heads: 16, seq_length: 2048, global_batch: 128}}]
"""
    found = document(capsys, written(tmp_path, model))
    parallel = found["jobs"]["m"]["parallel"]
    assert parallel["tensor"] * parallel["pipeline"] * parallel["data"] == found["assignments"]["m"] == 16
    assert 0 < found["jobs"]["m"]["waf"] < 16 * 989e12


def test_runner_ups_only_with_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, DESIGN)
    found = document(capsys, path, explain=True)
    assert found["runner_ups"][0]["assignments"] == {"a": 16}
    assert found["runner_ups"][0]["cost"] == pytest.approx(found["objective"] - found["runner_ups"][0]["objective"])
    assert "runner_ups" not in document(capsys, path)


def test_the_table_is_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_command([written(tmp_path, DESIGN.replace("name: a", "name: '[red]a'"))], explain=True)
    out = capsys.readouterr().out
    assert "32 slots" in out
    assert "[red]a" in out, "a name is not markup"
    assert "Runner-up plans" in out
    assert "3.2e+15" in out


def test_a_job_below_its_minimum_waits_and_the_reason_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
cluster: {gpus: 20}
jobs:
  - {name: rich, throughput: {8: 9.0e15}, workers: 8}
  - {name: big, min_workers: 10, throughput: {4: 1.0e15, 16: 1.0e15}}
"""
    found = document(capsys, written(tmp_path, text))
    assert found["assignments"] == {"rich": 8, "big": 0}
    assert "big waits: it needs at least 16 slots, 12 unassigned, 4 missing" in found["reason"]
    assert found["jobs"]["big"] == {"waf": 0.0, "transition_cost": 0.0}


def test_yaml_numbers_in_all_spellings(tmp_path: Path) -> None:
    text = """
cluster: {gpus: 32.0, mtbf_gpu_hours: 1e4}
jobs: [{name: a, throughput: {"8": 1e15, 16: 2}, workers: 7}]
"""
    cluster, (job,) = read_plan_input(written(tmp_path, text))
    assert cluster.gpus == 32
    assert job.profile.counts == (8, 16)
    assert job.profile.flops == (1e15, 2.0)
    assert job.workers == 7, "a present count that is not listed has no rate, but is no mistake"


def test_no_jobs_leave_all_slots_unassigned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, written(tmp_path, "cluster: {gpus: 4}\njobs: []\n"))
    assert found["assignments"] == {}
    assert (found["unassigned"], found["objective"]) == (4, 0.0)


JOB = "{name: a, throughput: {8: 1.0e15}%s}"
BAD: dict[str, tuple[str, list[str]]] = {
    "negative throughput": ("{name: a, throughput: {8: -1}}", ["job a", "throughput.8", "-1"]),
    "nan throughput": ("{name: a, throughput: {8: .nan}}", ["job a", "throughput.8", "nan"]),
    "infinite throughput": ("{name: a, throughput: {8: .inf}}", ["job a", "throughput.8", "inf"]),
    "count above the cluster": ("{name: a, throughput: {8: 1.0, 64: 1.0}}", ["job a", "throughput.64", "32 gpus"]),
    "duplicate names": (JOB % "" + ", " + JOB % "", ["job a", "name", "two jobs"]),
    "unknown kind": (JOB % ", kind: training", ["job a", "kind", "training", "pretrain"]),
    "no count reaches the minimum": (JOB % ", min_workers: 9", ["job a", "throughput", "no feasible count", "9"]),
    "no count at all": ("{name: a, throughput: {}}", ["job a", "throughput", "no feasible count"]),
    "no throughput": ("{name: a}", ["job a", "throughput"]),
    "count zero": ("{name: a, throughput: {0: 1.0}}", ["job a", "throughput.0"]),
    "negative count": ("{name: a, throughput: {-8: 1.0}}", ["job a", "throughput.-8"]),
    "fractional count": ("{name: a, throughput: {8.5: 1.0}}", ["job a", "throughput.8.5"]),
    "count twice": ("{name: a, throughput: {8: 1.0, '8': 2.0}}", ["job a", "throughput", "8", "twice"]),
    "throughput is text": ("{name: a, throughput: {8: fast}}", ["job a", "throughput.8", "fast"]),
    "throughput is yes": ("{name: a, throughput: {8: yes}}", ["job a", "throughput.8"]),
    "throughput is a list": ("{name: a, throughput: [1]}", ["job a", "throughput"]),
    "negative weight": (JOB % ", weight: -1", ["job a", "weight", "-1"]),
    "nan weight": (JOB % ", weight: .nan", ["job a", "weight", "nan"]),
    "negative workers": (JOB % ", workers: -1", ["job a", "workers", "-1"]),
    "fractional workers": (JOB % ", workers: 1.5", ["job a", "workers", "1.5"]),
    "workers above the cluster": (JOB % ", workers: 40", ["job a", "workers", "40", "32 gpus"]),
    "negative transition": (JOB % ", transition_seconds: -1", ["job a", "transition_seconds", "-1"]),
    "unknown key": (JOB % ", wieght: 1", ["job a", "wieght", "unknown key"]),
    "no name": ("{throughput: {8: 1.0}}", ["job number 1", "name"]),
    "empty name": ("{name: '', throughput: {8: 1.0}}", ["name"]),
    "job is a number": ("3", ["jobs.0", "3"]),
    "beyond floating point": ("{name: a, throughput: {8: 1.0e308}}", ["job a", "floating point"]),
    "layout of an unlisted count": (JOB % ", layouts: {16: {tensor: 2}}", ["job a", "layouts.16"]),
    "layout that does not multiply": (JOB % ", layouts: {8: {tensor: 3}}", ["job a", "layouts.8"]),
    "model too big": (
        "{name: a, model: {layers: 96, hidden_size: 12288, heads: 96, seq_length: 2048, global_batch: 8}}",
        ["job a", "model", "no feasible count"],
    ),
}


@pytest.mark.parametrize(("jobs", "named"), BAD.values(), ids=BAD)
def test_bad_jobs_are_refused_by_file_job_and_field(tmp_path: Path, jobs: str, named: list[str]) -> None:
    path = written(tmp_path, f"cluster: {{gpus: 32}}\njobs: [{jobs}]\n")
    with pytest.raises(BadInputError) as caught:
        plan_file(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    for part in named:
        assert part in message, message


@pytest.mark.parametrize(
    ("cluster", "named"),
    [
        ("{gpus: 0}", ["cluster", "gpus", "0"]),
        ("{gpus: -8}", ["cluster", "gpus", "-8"]),
        ("{}", ["cluster", "gpus", "missing"]),
        ("{gpus: yes}", ["cluster", "gpus"]),
        ("{gpus: 8, mtbf_gpu_hours: 0}", ["cluster", "mtbf_gpu_hours"]),
        ("{gpus: 8, mtbf_gpu_hours: .inf}", ["cluster", "mtbf_gpu_hours"]),
        ("{gpus: 8, price_per_gpu_hour: -2}", ["cluster", "price_per_gpu_hour", "-2"]),
        ("{gpus: 8, nodes: 1}", ["cluster", "nodes", "unknown key"]),
        ("[8]", ["cluster"]),
    ],
)
def test_bad_clusters_are_refused_by_field(tmp_path: Path, cluster: str, named: list[str]) -> None:
    path = written(tmp_path, f"cluster: {cluster}\njobs: []\n")
    with pytest.raises(BadInputError) as caught:
        plan_file(path)
    for part in [str(path), *named]:
        assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "jobs: []", "- 1", "cluster: {gpus: 8}", "cluster: {gpus: 8", "a: 1\na: 2"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadInputError, match=r"c\.yaml"):
        plan_file(written(tmp_path, text))


def test_exit_codes_streams_and_time_of_the_command(tmp_path: Path) -> None:
    good = written(tmp_path, DESIGN, "good.yaml")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = plan_cli(good, "--json")
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["assignments"] == {"a": 32}
    assert seconds < 3, "no heavy library is loaded for a plan"
    bad = plan_cli(written(tmp_path, DESIGN.replace("kind: pretrain", "kind: x"), "bad.yaml"), "--json")
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert len(bad.stderr.strip().splitlines()) == 1
    assert "Traceback" not in bad.stderr
    assert plan_cli(tmp_path / "missing.yaml").returncode == 2
    assert plan_cli(tmp_path).returncode == 2
    assert plan_cli(good, LANG="C", LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="0").returncode == 0


def test_planning_loads_neither_scipy_nor_a_framework(tmp_path: Path) -> None:
    path = written(tmp_path, DESIGN)
    script = (
        "import sys; from pathlib import Path; from planner.plan_command import plan_command; "
        f"plan_command([Path({str(path)!r})], json_output=True); "
        "print([m for m in ('scipy', 'torch', 'networkx', 'celery', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_shipped_cluster_is_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, path, explain=True)
    cluster, jobs = read_plan_input(path)
    assert sum(found["assignments"].values()) + found["unassigned"] == cluster.gpus
    assert list(found["assignments"]) == [job.name for job in jobs]


def test_clusters_are_shipped() -> None:
    assert len(CLUSTERS) >= 4
