"""Two exporters at once, an export in the way, a broken checkpoint: what `planaria checkpoint export` must survive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from planner import manifest
from planner.errors import BadInputError, WorkFailedError
from planner.pretrain_config import PretrainConfig
from pretrain import description, llama_names, published
from pretrain.export import export
from pretrain.megatron_format import write_parts
from tests.support.ranks import tiny


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _checkpoint(folder: Path, config: PretrainConfig, step: int = 4) -> Path:
    """A published checkpoint with random weights, made without a model."""
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shapes: dict[str, tuple[int, ...]] = {}
    model = config.model
    for source in llama_names.sources(model, 320):
        stacked = () if source.layer is None else (model.layers,)
        shapes.setdefault(source.key, (*stacked, *source.shape))
    head = model.head_size
    shapes[llama_names.QKV] = (model.layers, (model.heads + 2 * model.groups) * head, model.hidden_size)
    shapes[llama_names.FC1] = (model.layers, 2 * model.ffn_hidden_size, model.hidden_size)
    tensors = [ShardedTensor.from_rank_offsets(key, torch.randn(shape), replica_id=0) for key, shape in shapes.items()]
    work = folder / "work"
    (work / "megatron").mkdir(parents=True)
    write_parts({"tensors": tensors}, {"train_state": {}}, work / "megatron")
    described = manifest.Described(
        job="j", step=step, consumed_samples=1, incarnation=1, created=1.0,
        description=description.describe(config, 320),
    )  # fmt: skip
    target = folder / manifest.step_dir_name(step)
    published.commit(work, target, fence=None, described=described)
    return target


def test_two_exporters_at_once_publish_one_whole_export(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, tiny())
    command = [sys.executable, "-m", "planner.cli", "checkpoint", "export", str(checkpoint)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out.strip()) == (0, f"{checkpoint}.hf"), err
    assert manifest.verify(Path(f"{checkpoint}.hf")) == []
    assert not [entry for entry in tmp_path.iterdir() if entry.name.endswith(".tmp")]
    before = Path(f"{checkpoint}.hf/manifest.json").stat().st_mtime_ns
    export(checkpoint, created=9.0)
    assert Path(f"{checkpoint}.hf/manifest.json").stat().st_mtime_ns == before, "what is there already stays"


def test_an_export_of_another_checkpoint_is_replaced_and_foreign_folders_are_not(tmp_path: Path) -> None:
    old, new = _checkpoint(tmp_path / "old", tiny()), _checkpoint(tmp_path / "new", tiny())
    place = tmp_path / "model"
    export(old, place, created=1.0)
    weights = (place / "model.safetensors").read_bytes()
    export(new, place, created=1.0)
    assert (place / "model.safetensors").read_bytes() != weights
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    with pytest.raises(BadInputError, match="in the way"):
        export(new, foreign, created=1.0)
    assert (foreign / "thesis.tex").exists()


def test_a_broken_checkpoint_is_not_exported(tmp_path: Path) -> None:
    checkpoint = _checkpoint(tmp_path, tiny())
    data = next((checkpoint / "megatron").glob("*.distcp"))
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(WorkFailedError, match=data.name):
        export(checkpoint, created=1.0)
    assert not Path(f"{checkpoint}.hf").exists()
    with pytest.raises(BadInputError, match="no such directory"):
        export(tmp_path / "nowhere", created=1.0)
