"""The one engine of a worker: swapped while it is sound, never started a second time in a process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evalsched.engine import EngineError, EngineSettings
from evalsched.messages import ModelRef
from evalsched.residency import NewProcessNeededError, Resident


class FakeEngine:
    """Takes every folder but one named ``broken``."""

    def __init__(self, folder: Path, settings: EngineSettings) -> None:
        self.swap(folder)

    def why_not_swap(self, facts: Any) -> str | None:
        return None

    def swap(self, folder: Path) -> None:
        if folder.name == "broken":
            raise EngineError(f"{folder}: its weights cannot be loaded")


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> Resident:
    monkeypatch.setattr("evalsched.residency.VllmEngine", FakeEngine)
    monkeypatch.setattr("evalsched.residency.ModelFacts.read", lambda folder: None)
    return Resident()


def model(name: str) -> ModelRef:
    return ModelRef(path=f"/models/{name}", digest=name, tokenizer="t", stage=False)


def test_checkpoints_are_swapped_and_the_same_one_is_left_alone(resident: Resident) -> None:
    engine = EngineSettings().to_json()
    assert [resident.hold(model(name), engine) for name in ("a", "a", "b", "a")] == ["start", None, "swap", "swap"]
    assert (resident.starts, resident.swaps) == (1, 2)


def test_an_engine_whose_swap_failed_is_used_no_more_and_none_is_started_beside_it(resident: Resident) -> None:
    engine = EngineSettings().to_json()
    resident.hold(model("a"), engine)
    with pytest.raises(EngineError, match="cannot be loaded"):
        resident.hold(model("broken"), engine)
    with pytest.raises(EngineError, match="no model is loaded"):
        _ = resident.engine
    with pytest.raises(NewProcessNeededError):
        resident.hold(model("a"), engine)


def test_a_start_that_failed_is_tried_again_in_the_same_process(resident: Resident) -> None:
    engine = EngineSettings().to_json()
    with pytest.raises(EngineError, match="cannot be loaded"):
        resident.hold(model("broken"), engine)
    assert resident.hold(model("a"), engine) == "start"


def test_other_settings_need_another_process(resident: Resident) -> None:
    resident.hold(model("a"), EngineSettings().to_json())
    with pytest.raises(NewProcessNeededError):
        resident.hold(model("a"), EngineSettings(exact=True).to_json())
