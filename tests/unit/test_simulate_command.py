"""``planaria simulate`` from the outside: documents, table, page, traces, determinism, and every bad input."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import BadInputError
from planner.ettr import LOSSES
from planner.simulate_command import simulate_command
from planner.simulation.parameters import default_path, read_parameters, sources
from planner.simulation.run import simulate
from planner.simulation.scenario import POLICIES, read_scenario

SCENARIOS = default_path().parent
SHIPPED = ["trace-a", "trace-b", "llama3-16k", "acme-eval-1node", "acme-eval-4node", "joint-sweep"]
KEYS = {
    "accumulated_waf",
    "useful_flop",
    "ettr",
    "gpu_hours",
    "cost",
    "makespan_seconds",
    "evaluation_latency",
    "losses",
}
SMALL: dict[str, Any] = {
    "name": "small",
    "seed": 3,
    "horizon_seconds": 86400,
    "cluster": {"nodes": 4, "gpus_per_node": 8, "price_per_gpu_hour": 2.0, "prices": [[43200, 4.0]]},
    "jobs": [
        {"name": "a", "min_workers": 8, "throughput": {8: 1e15, 16: 1.9e15, 24: 2.7e15},
         "checkpoint_interval_seconds": 900},
        {"name": "b", "weight": 2.0, "min_workers": 8, "throughput": {8: 1e15, 16: 1.8e15}},
    ],
    "failures": {
        "permanent": 3, "transient": 6, "switch": 0.5, "stragglers": 1, "preemptions": 1,
        "repair": {"low": 3600, "high": 20000},
    },
    "evaluation": {"load_share": 0.1},
    "policies": list(POLICIES),
}  # fmt: skip


def written(folder: Path, scenario: dict[str, Any], name: str = "s.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(scenario, sort_keys=False), encoding="utf-8")
    return path


def changed(*keys: str | int, value: Any) -> dict[str, Any]:
    """SMALL with one value put in place."""
    scenario = copy.deepcopy(SMALL)
    here: Any = scenario
    for key in keys[:-1]:
        here = here[key]
    here[keys[-1]] = value
    return scenario


def check_entry(entry: dict[str, Any]) -> None:
    assert set(entry) >= KEYS
    assert set(entry["evaluation_latency"]) == {"p50", "p95", "p99"}
    assert list(entry["losses"]) == list(LOSSES)
    assert all(value >= 0 for value in entry["losses"].values())
    wall = entry["makespan_seconds"]
    assert sum(entry["losses"].values()) + entry["ettr"] * wall == pytest.approx(wall, rel=1e-9)
    assert 0 <= entry["ettr"] <= 1


def test_all_policies_on_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command(written(tmp_path, SMALL), json_output=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["scenario"], document["seed"]) == ("small", 3)
    assert list(document["policies"]) == list(POLICIES)
    for entry in document["policies"].values():
        check_entry(entry)
        assert entry["gpu_hours"] == pytest.approx(32 * 24)
        assert entry["cost"] == pytest.approx(32 * 12 * 2.0 + 32 * 12 * 4.0)
        assert entry["evaluation_latency"]["p50"] > 0
    waf = {name: entry["accumulated_waf"] for name, entry in document["policies"].items()}
    assert waf["planaria"] > waf["megatron-restart"] > 0
    assert waf["planaria"] > waf["varuna"] > 0
    assert document["policies"]["planaria"]["reports"] > 50


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    command = [sys.executable, "-m", "planner.cli", "simulate", str(path), "--json"]
    runs = [subprocess.run(command, capture_output=True, timeout=120, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1]
    assert json.loads(runs[0]) == json.loads(json.dumps(simulate(path)))


def test_another_seed_is_another_trace(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL | {"policies": ["planaria"]})
    one, other = simulate(path), simulate(path, 4)
    assert other["seed"] == 4
    assert one["policies"]["planaria"]["accumulated_waf"] != other["policies"]["planaria"]["accumulated_waf"]


def test_a_job_with_an_end_ends_the_simulation(tmp_path: Path) -> None:
    scenario = copy.deepcopy(SMALL) | {
        "failures": {},
        "policies": ["planaria", "unicron", "megatron-restart", "recycle"],
    }
    del scenario["evaluation"]
    scenario["jobs"] = [SMALL["jobs"][1] | {"flop": 1.8e15 * 3600}]
    for name, entry in simulate(written(tmp_path, scenario))["policies"].items():
        check_entry(entry)
        assert entry["useful_flop"] == pytest.approx(1.8e15 * 3600, rel=1e-6), name
        assert 3600 <= entry["makespan_seconds"] < 3600 + 1500


def test_table_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    simulate_command(written(tmp_path, SMALL | {"policies": ["planaria", "unicron"]}), html=page)
    shown = capsys.readouterr().out
    assert "planaria" in shown
    assert "ETTR" in shown
    text = page.read_text(encoding="utf-8")
    assert "Accumulated WAF" in text
    assert "communicators.per_gpu" in text
    assert "<script src=" not in text
    assert "<link" not in text


# ---------------------------------------------------------------- shipped scenarios


def test_the_six_scenarios_are_there_and_load() -> None:
    for name in SHIPPED:
        assert read_scenario(SCENARIOS / f"{name}.yaml").name == name
    assert all(source.strip() for _, _, source in sources())
    assert read_parameters().trial.datasets == 63


@pytest.mark.parametrize("name", ["trace-b", "acme-eval-1node", "acme-eval-4node"])
def test_shipped_scenarios_run(name: str) -> None:
    document = simulate(SCENARIOS / f"{name}.yaml")
    for entry in document["policies"].values():
        check_entry(entry)
    if name == "trace-b":
        waf = {policy: entry["accumulated_waf"] for policy, entry in document["policies"].items()}
        assert waf["planaria"] >= waf["unicron"]
        assert waf["planaria"] >= 1.2 * waf["megatron-restart"]
    else:
        assert document["policies"]["planaria"]["makespan_seconds"] >= document["lower_bound_seconds"]


def test_a_sweep_has_intervals_and_a_reference(tmp_path: Path) -> None:
    sweep = {
        "name": "tiny", "kind": "sweep", "seeds": 2,
        "axes": {"failure_rate": [1.0], "evaluation_load": [0.1], "nodes": [4]},
        "reference_cell": {"failure_rate": 1.0, "evaluation_load": 0.1, "nodes": 4}, "partitions": [1, 2],
        "base": {key: SMALL[key] for key in ("cluster", "jobs", "failures")} | {"horizon_seconds": 20000},
    }  # fmt: skip
    document = simulate(written(tmp_path, sweep))
    (cell,) = document["cells"]
    assert cell["gain_over_fixed_partition"]["low"] <= cell["gain_over_fixed_partition"]["high"]
    assert set(cell["partitions"]) == {"1", "2"}
    assert "the allocator's price" in document["lending_rules"]
    for entry in document["policies"].values():
        check_entry(entry)
    bad = sweep | {"reference_cell": {"failure_rate": 2.0, "evaluation_load": 0.1, "nodes": 4}}
    with pytest.raises(BadInputError, match=r"reference_cell"):
        simulate(written(tmp_path, bad))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (changed("policies", value=["planaria", "magic"]), r"policies\.1.*magic"),
        (changed("policies", value=[]), "policies"),
        (changed("policies", value=["planaria", "planaria"]), "one stands twice"),
        (changed("horizon_seconds", value=-1), "horizon_seconds.*-1"),
        (changed("horizon_seconds", value=float("nan")), "horizon_seconds"),
        (changed("failures", "permanent", value=-3), r"failures\.permanent.*-3"),
        (changed("failures", "mix", value={"gremlins": 1}), "gremlins is no class of error"),
        (changed("failures", "repair", value={"low": 5, "high": 1}), "low 5.0 is above high 1.0"),
        (changed("cluster", "nodes", value=0), r"cluster\.nodes"),
        (changed("cluster", "nodes", value=True), "not yes or no"),
        (changed("cluster", "prices", value=[[50, 1], [20, 2]]), "times out of order"),
        (changed("jobs", 0, "min_workers", value=512), "asks for 512 GPUs and the cluster has 32"),
        (changed("jobs", 0, "throughput", value={12: 1e15}), r"throughput\.12: no whole number of nodes"),
        (changed("jobs", 0, "throughput", value={8: -1e15}), r"throughput\.8"),
        (changed("jobs", 0, "min_workers", value=32), "no feasible layout"),
        (changed("jobs", 0, "max_workers", value=8) | {"jobs": [{"name": "x", "min_workers": 8, "max_workers": 8,
            "model": {"layers": 96, "hidden_size": 12288, "heads": 96, "seq_length": 2048, "global_batch": 64}}]},
         "job x: no feasible layout"),
        (changed("jobs", 0, "weight", value="heavy"), r"jobs\.0\.weight.*heavy"),
        (changed("jobs", 1, "name", value="a"), "two jobs are called 'a'"),
        (changed("jobs", value=[]), "give jobs or a trace"),
        (changed("evaluation", value=None), "need an evaluation block"),
        (changed("evaluation", "load_share", value=1.5), r"load_share"),
        (changed("kind", value="opera"), "'opera' is none of"),
        (changed("surprise", value=1), "surprise: unknown key"),
    ],
)  # fmt: skip
def test_bad_scenarios_name_file_and_field(tmp_path: Path, scenario: dict[str, Any], said: str) -> None:
    path = written(tmp_path, scenario)
    with pytest.raises(BadInputError, match=said) as error:
        simulate(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_command_exits_with_2_and_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, changed("policies", value=["magic"]))
    command = [sys.executable, "-m", "planner.cli", "simulate", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_other_bad_arguments(tmp_path: Path) -> None:
    path = written(tmp_path, SMALL)
    with pytest.raises(BadInputError, match="--seed -1"):
        simulate_command(path, seed=-1)
    with pytest.raises(BadInputError, match="is not there"):
        simulate_command(path, html=tmp_path / "no" / "page.html")
    with pytest.raises(BadInputError, match="no such file"):
        simulate_command(tmp_path / "absent.yaml")


def test_parameters_without_a_source_are_refused(tmp_path: Path) -> None:
    text = default_path().read_text(encoding="utf-8")
    path = tmp_path / "parameters.yaml"
    for wrong, said in (
        (text.replace('source: "Acme: 63 datasets"', 'source: ""'), "source"),
        (text.replace('{value: 63, source: "Acme: 63 datasets"}', "63"), "write it as"),
        (text.replace("value: 12.5,", "value: -12.5,"), "bamboo.local"),
    ):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(BadInputError, match=said):
            read_parameters(path)


# ---------------------------------------------------------------- traces

ACME = "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"
DAY = "2023-05-16 "
ROWS = [
    f"j1,u1,2,16,32,Pretrain,COMPLETED,{DAY}12:00:00+08:00,{DAY}12:10:00+08:00,{DAY}14:10:00+08:00,7200,600,1",
    f"j2,u1,1,1,4,Evaluation,FAILED,{DAY}12:01:00+08:00,{DAY}12:02:00+08:00,{DAY}12:12:00+08:00,600,60,1",
    f"j3,u1,1,0,4,Other,COMPLETED,{DAY}12:05:00+08:00,{DAY}12:05:00+08:00,{DAY}12:06:00+08:00,60,0,0",
]


def trace_scenario(folder: Path, text: str, kind: str = "acme", name: str = "trace.csv") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    scenario = {key: value for key, value in SMALL.items() if key not in ("jobs", "evaluation", "failures")}
    policies = ["planaria", "megatron-restart"]
    return written(folder, scenario | {"trace": {"path": name, "format": kind}, "policies": policies})


def test_an_acme_trace(tmp_path: Path) -> None:
    document = simulate(trace_scenario(tmp_path, ACME + "\n".join(ROWS) + "\n"))
    for entry in document["policies"].values():
        check_entry(entry)
        assert entry["useful_flop"] == pytest.approx(16 * 1.5e14 * 7200, rel=1e-6)
        assert entry["evaluation_latency"]["p50"] > 0
        assert entry["reports"] == 1


def test_slurm_output(tmp_path: Path) -> None:
    text = (
        "JobID|JobName|State|Submit|Start|End|NNodes|AllocTRES\n"
        "7|pretrain|COMPLETED|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T01:01:00|1|cpu=8,gres/gpu=8,node=1\n"
        "7.batch|batch|COMPLETED|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T01:01:00|1|gres/gpu=8\n"
        "8|eval-mmlu|COMPLETED|2024-01-01T00:10:00|2024-01-01T00:11:00|2024-01-01T00:21:00|1|gres/gpu:a100=1\n"
        "9|later|PENDING|2024-01-01T00:10:00|Unknown|Unknown|1|gres/gpu=8\n"
    )
    entry = simulate(trace_scenario(tmp_path, text, "slurm"))["policies"]["planaria"]
    assert entry["useful_flop"] == pytest.approx(8 * 1.5e14 * 3600, rel=1e-6)
    assert entry["reports"] == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ACME.replace("gpu_num,", "") + ROWS[0].replace(",16,", ",") + "\n", r"trace\.csv:1: .*'gpu_num' is missing"),
        (ACME + ROWS[0].replace("12:10:00", "11:10:00") + "\n", r"trace\.csv:2: start_time: times out of order"),
        (ACME + ROWS[1] + "\n" + ROWS[0] + "\n", r"trace\.csv:3: submit_time: times out of order"),
        (
            ACME + ROWS[0].replace(",16,", ",4096,") + "\n",
            r"trace\.csv:2: gpus: job j1 is larger than the cluster's 32",
        ),
        (ACME + ROWS[0].replace(",16,", ",many,") + "\n", r"trace\.csv:2: gpu_num: a number is needed"),
        (ACME + ROWS[0].replace(DAY + "12:00:00+08:00", "yesterday") + "\n", r"trace\.csv:2: submit_time"),
        (ACME + "j1,u1\n", r"trace\.csv:2: .*ends before"),
        (ACME, "no training or evaluation job"),
        ("", r"trace\.csv:1: the column"),
    ],
)
def test_bad_traces_name_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        simulate(trace_scenario(tmp_path, text))


def test_a_real_event_log_is_replayed(tmp_path: Path) -> None:
    def line(time: float, action: str, **details: Any) -> str:
        return json.dumps({"time": 1000.0 + time, "action": action, "job": "real", "incarnation": 1} | details)

    events = [
        line(0, "job.state", old="queued", new="starting"), line(8, "incarnation.started"),
        line(9, "checkpoint.loaded", step=0), line(10, "job.state", old="starting", new="running"),
        line(12, "step.completed", step=1), line(31, "fault.detected", occurred=1030.0, rank=1),
        line(32, "decision.made"), line(33, "reform.completed"), line(35, "step.completed", step=11),
        line(54, "job.state", old="running", new="done"),
    ]  # fmt: skip
    steps = [{"step": step, "loss": 1.0, "seconds": 2.0, "workers": 2, "incarnation": 1} for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, steps)) + "\n", encoding="utf-8")
    path = trace_scenario(tmp_path, "\n".join(events) + "\n", "events", "events.jsonl")
    scenario = yaml.safe_load(path.read_text())
    scenario["cluster"] = {"nodes": 2, "gpus_per_node": 1}
    entry = simulate(written(tmp_path, scenario))["policies"]["planaria"]
    check_entry(entry)
    assert entry["useful_flop"] == pytest.approx(20, rel=1e-6)
    assert entry["losses"]["detect"] == pytest.approx(1.0)  # as in the log
    assert entry["losses"]["start"] == pytest.approx(10.0, abs=2.0)
    events[2], events[3], events[4] = events[4], events[2], events[3]  # they arrive from several processes
    (tmp_path / "events.jsonl").write_text("\n".join(events) + "\n", encoding="utf-8")
    assert simulate(path)["policies"]["planaria"] == entry
    (tmp_path / "events.jsonl").write_text(events[0] + "\n{not json\n", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"events\.jsonl:2"):
        simulate(path)
