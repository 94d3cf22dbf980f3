"""One rank's life as its agent sees it: messages, exit codes, signals, bad gradients, failed saves, bad input."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from planner import manifest
from tests.support.fork_server import ForkServer
from tests.support.ranks import RankRun, run_ranks, start_ranks, tiny


@pytest.fixture(scope="module")
def calm(trainers: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> RankRun:
    """The run without any disturbance."""
    return run_ranks(tiny(), 1, tmp_path_factory.mktemp("calm"), server=trainers)[0]


def kinds(run: RankRun) -> list[str]:
    return [message["kind"] for message in run.messages]


def test_a_rank_tells_its_whole_story_in_order(calm: RankRun) -> None:
    assert kinds(calm)[0] == "hello"
    phases = [(message["phase"], message["step"]) for message in calm.of("phase")]
    assert phases[:3] == [("start", 0), ("load", 0), ("first_step", 1)]
    assert phases[3:7] == [("step", 2), ("step", 3), ("validate", 3), ("save", 3)]
    assert phases[-1] == ("done", 6)
    assert [step["step"] for step in calm.of("step")] == [1, 2, 3, 4, 5, 6]
    assert [(c["what"], c["step"]) for c in calm.of("checkpoint")] == [("published", 3), ("published", 6)]
    assert calm.of("done") == [calm.messages[-1]]
    assert calm.messages[-1]["why"] == "completed"
    step = calm.of("step")[1]
    assert step["tokens"] == 10 * 32
    assert sum(step["phases"].values()) == pytest.approx(step["seconds"], rel=0.2)
    assert step["phases"]["forward_backward"] > 0


def test_the_real_command_without_a_server(calm: RankRun, tmp_path: Path) -> None:
    run = run_ranks(tiny(), 1, tmp_path)[0]
    assert run.losses == calm.losses
    for path in (tmp_path / "checkpoints" / "step-00000006", tmp_path / "checkpoints" / "step-00000003"):
        assert manifest.verify(path) == []
    events = list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars = EventAccumulator(str(tmp_path / "tensorboard"))
    scalars.Reload()
    assert [event.step for event in scalars.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in scalars.Scalars("valid/loss")] == [3, 6]


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_on_one_rank_publishes_and_ends_all_with_4(
    trainers: ForkServer, calm: RankRun, tmp_path: Path, rank: int
) -> None:
    config = tiny(checkpoint={"every_steps": 1000}, steps=100000)
    ranks = start_ranks(config, 2, tmp_path, server=trainers)
    ranks.wait_for_step(3)
    ranks.signal(rank, signal.SIGTERM)
    runs = ranks.finish()
    assert [run.code for run in runs] == [4, 4]
    done = [run.of("done")[0] for run in runs]
    assert [message["why"] for message in done] == ["preempted", "preempted"]
    assert done[0]["step"] == done[1]["step"] == runs[0].of("step")[-1]["step"]
    published = [item for item in runs[0].of("checkpoint") if item["what"] == "published"]
    assert [item["step"] for item in published] == [done[0]["step"]]
    assert manifest.verify(Path(published[0]["path"])) == []


def test_sigterm_before_the_first_step_still_leaves_a_checkpoint(trainers: ForkServer, tmp_path: Path) -> None:
    ranks = start_ranks(tiny(steps=100000), 1, tmp_path, server=trainers)
    ranks.wait_for(lambda: bool(ranks.output(0)), 0)
    ranks.signal(0, signal.SIGTERM)
    run = ranks.finish()[0]
    assert run.code == 4
    assert run.of("done")[0]["why"] == "preempted"
    assert (tmp_path / "checkpoints" / manifest.step_dir_name(run.of("done")[0]["step"])).is_dir()


def test_a_bad_batch_is_left_out_and_said(trainers: ForkServer, calm: RankRun, tmp_path: Path) -> None:
    config = tiny(faults=[{"at_step": 2, "kind": "nan_loss", "rank": 1}])
    runs = run_ranks(config, 2, tmp_path, server=trainers)
    note = next(message for message in runs[0].of("note") if message["action"] == "samples.skipped")
    assert "loss nan" in note["reason"]
    assert note["details"]["step"] == 2
    before = sorted(calm.of("step")[1]["ids"])
    assert note["details"]["ids"] == before
    second = sorted(sample for run in runs for sample in run.of("step")[1]["ids"])
    assert second == sorted(calm.of("step")[2]["ids"]), "the step takes the next samples instead"
    assert [step["step"] for step in runs[0].of("step")] == [1, 2, 3, 4, 5, 6]
    assert runs[1].of("note") == []
    state = published_state(tmp_path, 6)
    assert state["consumed_samples"] == 70
    assert sorted(state["skipped"]) == before


def published_state(folder: Path, step: int) -> dict[str, Any]:
    """The training state inside a published checkpoint."""
    from pretrain import device

    device.prepare()
    from pretrain.megatron_format import read_common

    state: dict[str, Any] = read_common(folder / "checkpoints" / manifest.step_dir_name(step) / "megatron")[
        "train_state"
    ]
    return state


def test_a_retried_step_ends_like_an_undisturbed_one(trainers: ForkServer, calm: RankRun, tmp_path: Path) -> None:
    config = tiny(faults=[{"at_step": 2, "kind": "nan_loss"}], health={"on_bad_gradient": "retry_step"})
    run = run_ranks(config, 1, tmp_path, server=trainers)[0]
    assert run.losses == calm.losses
    assert [note["details"]["verdict"] for note in run.of("note")] == ["retry"]


def test_roll_back_ends_the_rank_with_a_named_exception(trainers: ForkServer, tmp_path: Path) -> None:
    config = tiny(faults=[{"at_step": 2, "kind": "nan_loss"}], health={"on_bad_gradient": "roll_back"})
    run = run_ranks(config, 1, tmp_path, server=trainers, codes=(1,))[0]
    error = run.of("exception")[0]
    assert error["type"] == "NonFiniteError"
    assert "step 2: loss nan" in error["message"]
    assert error["step"] == 2
    assert [step["step"] for step in run.of("step")] == [1]


def test_a_save_that_fails_is_said_and_made_up_for(trainers: ForkServer, calm: RankRun, tmp_path: Path) -> None:
    config = tiny(faults=[{"at_step": 3, "kind": "disk_full", "rank": 1}])
    runs = run_ranks(config, 2, tmp_path, server=trainers)
    story = [(item["what"], item["step"]) for item in runs[0].of("checkpoint")]
    assert story == [("failed", 3), ("published", 4), ("published", 6)]
    assert "No space left" in runs[0].of("checkpoint")[0]["reason"]
    assert runs[0].losses == pytest.approx(calm.losses, abs=1e-6)
    assert not (tmp_path / "checkpoints" / "step-00000003").exists()


def test_too_many_failed_saves_end_the_job(trainers: ForkServer, tmp_path: Path) -> None:
    faults = [{"at_step": 3, "kind": "disk_full"}, {"at_step": 4, "kind": "disk_full"}]
    config = tiny(faults=faults, checkpoint={"failures": 2, "every_steps": 3})
    run = run_ranks(config, 1, tmp_path, server=trainers, codes=(1,))[0]
    assert run.of("exception")[0]["type"] == "SaveFailedError"
    assert [item["what"] for item in run.of("checkpoint")] == ["failed", "failed"]


def test_a_damaged_checkpoint_is_refused_by_name_and_an_older_one_used(
    trainers: ForkServer, calm: RankRun, tmp_path: Path
) -> None:
    config = tiny(faults=[{"at_step": 6, "kind": "corrupt_checkpoint"}])
    run_ranks(config, 1, tmp_path, server=trainers)
    newest = tmp_path / "checkpoints" / "step-00000006"
    again = run_ranks(tiny(), 1, tmp_path, server=trainers, incarnation=2, resume=str(newest))[0]
    refused, loaded = again.of("checkpoint")[:2]
    assert (refused["what"], refused["step"]) == ("refused", 6)
    assert "megatron/" in refused["reason"]
    assert (loaded["what"], loaded["step"]) == ("loaded", 3)
    assert again.losses == {step: loss for step, loss in calm.losses.items() if step > 3}


def test_without_a_usable_checkpoint_it_does_not_start_over_in_silence(trainers: ForkServer, tmp_path: Path) -> None:
    config = tiny(steps=3, faults=[{"at_step": 3, "kind": "corrupt_checkpoint"}])
    run_ranks(config, 1, tmp_path, server=trainers)
    resume = str(tmp_path / "checkpoints" / "step-00000003")
    given_up = run_ranks(tiny(), 1, tmp_path, server=trainers, incarnation=2, resume=resume, codes=(5,))[0]
    assert given_up.of("exception")[0]["type"] == "GivenUpError"
    assert "start_over" in given_up.of("exception")[0]["message"]
    allowed = tiny(checkpoint={"start_over": True})
    fresh = run_ranks(allowed, 1, tmp_path, server=trainers, incarnation=3, resume=resume)[0]
    assert fresh.of("step")[0]["step"] == 1


def test_an_older_incarnation_may_not_publish(trainers: ForkServer, tmp_path: Path) -> None:
    run_ranks(tiny(steps=3), 1, tmp_path, server=trainers, incarnation=5)
    late = run_ranks(tiny(steps=3), 1, tmp_path, server=trainers, incarnation=4, codes=(1,))[0]
    assert "incarnation 5" in late.of("exception")[0]["message"]


def test_ranks_with_other_text_are_refused(trainers: ForkServer, tmp_path: Path) -> None:
    """Two nodes whose files differ: one and the same job, but what the pattern finds is not the same."""
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, path in enumerate(texts):
        path.write_text(f"text number {number} " * 200)
    first = tiny(data={"train": [str(texts[0])]})
    second = tiny(data={"train": [str(texts[1])]})
    ranks = start_ranks([first, second], 2, tmp_path / "job", server=trainers)
    runs = ranks.finish()
    assert [run.code for run in runs] == [2, 2]
    assert all("ranks [1] see other text than rank 0" in run.log for run in runs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"train": ["/nowhere/*.txt"]}}, "data.train: '/nowhere/*.txt' matches no file"),
        ({"tokenizer": "/nowhere/tokenizer"}, "tokenizer: '/nowhere/tokenizer' is no folder"),
        ({"model": {"seq_length": 10_000_000}}, "too few for one sample of model.seq_length 10000000"),
        ({"parallel": {"tensor": 2}, "workers": {"min": 2}}, "does not divide the 1 ranks"),
    ],
)
def test_bad_input_is_one_line_and_2(
    trainers: ForkServer, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    run = run_ranks(tiny(**changes), 1, tmp_path, server=trainers, codes=(2,))[0]
    assert message in run.log
    assert "Traceback" not in run.log
    assert run.of("exception")[0]["type"] == "BadInputError"
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("content", [None, "no json", "{}", json.dumps({"job": 3})])
def test_a_bad_spec_is_one_line_and_2(tmp_path: Path, content: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    from pretrain.rank import main

    before = signal.getsignal(signal.SIGTERM)
    spec = tmp_path / "spec.json"
    if content is not None:
        spec.write_text(content)
    try:
        assert main([str(spec)]) == 2
        assert main([]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    out, err = capfd.readouterr()
    assert out == ""
    assert str(spec) in err.splitlines()[0]
    assert len(err.splitlines()) == 2
