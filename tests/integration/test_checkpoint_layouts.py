"""Any layout to any layout through every tier; failures on one rank; the export against transformers and vLLM.

One pool of four rank processes serves all tests of this module, because importing Megatron is what takes the time.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from planner import manifest
from pretrain import published
from pretrain.persister import PersisterSpec
from pretrain.persister_keeper import PersisterKeeper
from tests.support.checkpoint_pool import Pool
from tests.support.fork_server import ForkServer
from tests.support.waiting import wait_until

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
"""(tensor, pipeline, data)."""
MHA = {"heads": 4, "kv_heads": 4, "hidden_size": 128, "ffn_hidden_size": 192}
GQA = {"heads": 4, "kv_heads": 2, "hidden_size": 128, "ffn_hidden_size": 192}
TOKENS = [(index * 37 + 11) % 256 for index in range(31)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool(trainers: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    ranks = Pool(4, tmp_path_factory.mktemp("pool"), trainers)
    yield ranks
    ranks.close()


def _hear(keeper: PersisterKeeper, told: list[Any], what: str, count: int) -> None:
    """Wait until the persister has said ``what`` so many times."""
    wait_until(lambda: keeper.poll(0.05) or len([one for one in told if one.what == what]) >= count, what=what)


def _close(losses: list[float], wanted: list[float]) -> None:
    assert losses == pytest.approx(wanted, abs=1e-5)


def _write(pool: Pool, folder: Path, writers: list[tuple[int, int, int]], model: dict[str, Any]) -> list[str]:
    """A checkpoint and a snapshot of step 4 from each layout; the checkpoints' paths."""
    paths = []
    for writer in writers:
        memory = str(folder / "-".join(map(str, writer)))
        pool.join(*writer, model=model)
        pool.train(4)
        paths.append(pool.all("save", folder=memory)[0]["path"])
        pool.all("open_snapshots", memory=memory)
        pool.all("snapshot")
        assert not manifest.verify(Path(paths[-1]))
    return paths


def _reads(pool: Pool, paths: list[str], wanted: list[float], allowed: float, who: str) -> None:
    """Each checkpoint and snapshot gives the wanted losses, over whatever state the ranks had before."""
    for path in paths:
        assert pool.all("load", path=path)[0]["step"] == 4
        assert pool.train(2) == pytest.approx(wanted, abs=allowed), f"{path} → {who}, checkpoint"
        memory = str(Path(path).parent)
        assert pool.all("load_snapshot", memory=memory)[0]["state"]["step"] == 4
        assert pool.train(2) == pytest.approx(wanted, abs=allowed), f"{path} → {who}, snapshot"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layout_loads_into_every_other(pool: Pool, tmp_path: Path, dtype: str) -> None:
    """C10, issue 9 item 5: save in each layout, load in each; the next losses are those of the uninterrupted run."""
    model = {"dtype": dtype}
    pool.join(model=model)
    wanted = pool.train(6)[4:]
    paths = _write(pool, tmp_path, LAYOUTS, model)
    for reader in LAYOUTS:
        pool.join(*reader, model=model)
        _reads(pool, paths, wanted, 1e-5 if dtype == "float32" else 2e-2, str(reader))


def test_tensor_and_pipeline_parallel_together_load_into_and_from_the_others(pool: Pool, tmp_path: Path) -> None:
    """C10, issue 9 item 5, with four ranks: TP 2 × PP 2, and each of them with DP 2."""
    both, *others = layouts = [(2, 2, 1), *LAYOUTS, (2, 1, 2), (1, 2, 2)]
    pool.join()
    wanted = pool.train(6)[4:]
    paths = _write(pool, tmp_path, layouts, {})
    pool.join(*both)
    _reads(pool, paths, wanted, 1e-5, str(both))
    for reader in others:
        pool.join(*reader)
        _reads(pool, paths[:1], wanted, 1e-5, str(reader))


def test_later_saves_hold_later_state(pool: Pool, tmp_path: Path) -> None:
    """C3: nothing of an earlier save is written again."""
    pool.join(2, 1, 1)
    hashes = []
    for _ in range(3):
        pool.train(1)
        path = Path(pool.all("save", folder=str(tmp_path))[0]["path"])
        files = manifest.read_manifest(path).files
        hashes.append({name: entry["xxh3"] for name, entry in files.items() if name.endswith(".distcp")})
    for name in hashes[0]:
        assert len({one[name] for one in hashes}) == 3, f"{name} is the same in two checkpoints"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all(pool: Pool, tmp_path: Path, failing: int) -> None:
    """C8: the half-written directory goes, older checkpoints stay, training goes on, the next save works."""
    pool.join(2, 1, 1)
    pool.train(1)
    pool.all("save", folder=str(tmp_path))
    pool.train(1)
    pid = pool.members[failing].process.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        errors = pool.errors("save", folder=str(tmp_path))
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    for error in errors:
        assert re.search(rf"SaveFailedError: .* failed on rank {failing}: OSError.*File too large", error)
    assert [step for step, _ in published.published(tmp_path)] == [1]
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-00000001", "latest", ".lock"}
    pool.train(1)
    pool.all("save", folder=str(tmp_path))
    assert published.newest_verified(tmp_path)[0] == tmp_path / "step-00000003"


def test_an_older_incarnation_cannot_publish(pool: Pool, tmp_path: Path) -> None:
    """R10: after a newer incarnation claimed the folder, the old one is refused on every rank and leaves nothing."""
    pool.join(1, 1, 2)
    pool.train(1)
    published.claim(tmp_path, published.Fence("pool", 5))
    for error in pool.errors("save", folder=str(tmp_path), incarnation=4):
        assert re.search(r"FencedError: .* incarnation 5 \(token 0\) has taken over", error)
    assert published.published(tmp_path) == []
    pool.all("save", folder=str(tmp_path), incarnation=5)
    assert [step for step, _ in published.published(tmp_path)] == [1]


def test_the_persister_makes_what_the_ranks_would_have_saved(pool: Pool, tmp_path: Path) -> None:
    """Snapshots of two tensor ranks become one checkpoint that any layout loads, without the ranks waiting."""
    told: list[Any] = []
    spec = PersisterSpec(job="pool", memory_dir=str(tmp_path / "m"), target=str(tmp_path / "c"), keep=2)
    keeper = PersisterKeeper(spec, tmp_path / "k", told.append)
    keeper.start()
    try:
        pool.join(2, 1, 1)
        pool.all("open_snapshots", memory=str(tmp_path / "m"))
        for _step in (1, 2, 3):
            pool.train(1)
            pool.all("snapshot", persist=True)
            published_by_now = len([one for one in told if one.what == "published"])
            _hear(keeper, told, "published", published_by_now + 1)
        wanted = pool.train(2)
        _hear(keeper, told, "deleted", 1)
    finally:
        assert keeper.stop()
    assert [step for step, _ in published.published(tmp_path / "c")] == [2, 3]
    newest, refused = published.newest_verified(tmp_path / "c")
    assert newest == published.read_latest(tmp_path / "c")
    assert not refused
    for layout in LAYOUTS[1:]:
        pool.join(*layout)
        assert pool.all("load", path=str(newest))[0]["step"] == 3
        _close(pool.train(2), wanted)


def _export(path: str) -> Path:
    command = [sys.executable, "-m", "planner.cli", "checkpoint", "export", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def exports(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Exports of models trained in several layouts, with Megatron's own logits on the same tokens."""
    folder = tmp_path_factory.mktemp("exports")
    cases: list[dict[str, Any]] = []
    for name, model, layouts in (
        ("mha", MHA, LAYOUTS[:3]),
        ("gqa", GQA, LAYOUTS[:3]),
        ("tied", GQA | {"tie_embeddings": True}, LAYOUTS[2:3]),
    ):
        for layout in layouts:
            place = folder / f"{name}-{'-'.join(map(str, layout))}"
            pool.join(*layout, model=model)
            pool.train(6)
            path = pool.all("save", folder=str(place))[0]["path"]
            pool.join(model=model)
            pool.all("load", path=path)
            logits = torch.tensor(pool.all("logits", tokens=TOKENS)[0], dtype=torch.float64)
            export = _export(path) if not cases else _export_here(path)
            cases.append({"name": place.name, "checkpoint": path, "path": str(export), "logits": logits})
    return cases


def test_transformers_computes_what_megatron_computes(exports: list[dict[str, Any]]) -> None:
    """Issue 2 item 7: tensor and pipeline parallel 1 and 2, with and without grouped queries, to 1e-4 in float32."""
    from transformers import AutoModelForCausalLM

    for case in exports:
        model = AutoModelForCausalLM.from_pretrained(case["path"], dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.tensor([TOKENS])).logits[0]
        assert (logits - case["logits"]).abs().max() < 1e-4, case["name"]


def test_vllm_computes_what_megatron_computes(
    engines: ForkServer, exports: list[dict[str, Any]], tmp_path: Path
) -> None:
    """The same with vLLM's log-probabilities; one engine, weights swapped in place where the shapes agree."""
    request, answer, log = tmp_path / "request.json", tmp_path / "answer.json", tmp_path / "log"
    request.write_text(json.dumps({"tokens": TOKENS, "models": [case["path"] for case in exports]}))
    done = engines.start(
        "tests.support.vllm_logprobs:main", str(request), str(answer), out=log,
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
                     "TORCHDYNAMO_DISABLE": "1"},
    )  # fmt: skip
    assert done.wait(290) == 0, log.read_text()[-3000:]
    for case, found in zip(exports, json.loads(answer.read_text()), strict=True):
        logprobs = torch.log_softmax(case["logits"], dim=-1)
        wanted = [float(logprobs[index - 1, token]) for index, token in enumerate(TOKENS) if index]
        assert found == pytest.approx(wanted, abs=1e-4), case["name"]


def test_import_gives_the_exported_weights_back(pool: Pool, exports: list[dict[str, Any]], tmp_path: Path) -> None:
    """Issue 9 item 6: export → import in another layout → export again: the same tensors, bit by bit."""
    for case, layout in zip(exports[1:4:2], (LAYOUTS[2], LAYOUTS[1]), strict=True):
        model = MHA if case["name"].startswith("mha") else GQA
        pool.join(*layout, model=model)
        pool.all("import_weights", path=case["path"])
        path = pool.all("save", folder=str(tmp_path / case["name"]))[0]["path"]
        again = _export_here(path)
        assert _tensors(again) == _tensors(Path(case["path"])), case["name"]


def _tensors(folder: Path) -> dict[str, bytes]:
    from safetensors.torch import load_file

    loaded = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    return {name: tensor.numpy().tobytes() for name, tensor in loaded.items()}


def _export_here(path: str) -> Path:
    from pretrain.export import export

    return export(Path(path), created=1.0, max_shard_bytes=200_000)
