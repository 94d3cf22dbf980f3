"""A run that starts from a Hugging Face model goes on where that model stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.export import export
from tests.support.ranks import run_ranks, start_ranks, tiny


@pytest.mark.slow
def test_a_run_starts_from_exported_weights(tmp_path: Path) -> None:
    settings = {"every_steps": 8, "keep": 1}
    (first,) = run_ranks(tiny(steps=8, checkpoint=settings), 1, tmp_path / "first")
    model = export(tmp_path / "first" / "checkpoints" / "step-00000008", created=1.0)
    (second,) = run_ranks(tiny(steps=2, checkpoint=settings, start_from=str(model)), 1, tmp_path / "second")
    assert second.losses[1] < (first.losses[1] + first.losses[8]) / 2, "the weights are the trained ones"


@pytest.mark.slow
def test_a_model_of_another_shape_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96,'
        ' "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5}'
    )
    (run,) = start_ranks(tiny(start_from=str(tmp_path)), 1, tmp_path / "job").finish()
    assert run.code == 2, run.log
    said = str(run.of("exception")) + run.log
    assert "model.layers is 3, the job says 2" in said
