"""How far a job goes back for a spike or a loss that is not finite, and when it is given up."""

from __future__ import annotations

from pathlib import Path

from planner import manifest
from planner.events import Action, JobState
from planner.job_events import Holding, Spiked, StoreAt
from planner.job_record import RollBack
from planner.loss_watch import Spike
from planner.messages import RankException
from pretrain import published
from tests.unit.test_job_machine import LEASES, Life


def spiked(life: Life, first: int, last: int) -> None:
    """The loss spikes; all ranks are ended."""
    life.happen(Spiked(Spike(first, last, "loss 9 above 3")))
    assert life.job.stage == "stopping"
    for rank in range(life.job.size):
        life.exit(rank, signal=9)


def test_a_spike_again_goes_further_back_and_after_the_limit_the_job_is_failed() -> None:
    life = Life(steps=900)
    life.come_up()
    life.complete(*range(1, 23))
    spiked(life, 20, 22)
    assert life.job.state == JobState.HEALING
    back = life.job.roll_back
    assert back is not None
    assert (back.incarnation, back.at_most, back.older, back.beyond) == (2, 18, 0, 22)
    life.happen(Holding(LEASES))
    life.happen(StoreAt(2, "n1", "127.0.0.1", 5, "/c/step-00000015", 15, 88))
    assert life.job.roll_back is not None
    assert (life.job.roll_back.resumed, life.job.roll_back.skip_to) == (15, 88)
    life.come_up()
    life.complete(16)
    assert life.told(Action.FAULT_RECOVERED)[-1]["kind"] == "loss_spike"
    spiked(life, 25, 27)
    back = life.job.roll_back
    assert (back.incarnation, back.at_most, back.older, back.beyond, back.anchor) == (3, 18, 1, 27, (15, 88))
    for _ in range(2):
        life.come_up()
        life.complete(16)
        spiked(life, 25, 27)
    assert life.job.state == JobState.FAILED
    assert "loss_spike again after 3 roll-backs" in life.job.reason


def test_a_later_stretch_begins_anew() -> None:
    life = Life(steps=900)
    life.come_up()
    life.complete(1)
    spiked(life, 20, 22)
    life.come_up()
    life.complete(16)
    spiked(life, 200, 202)
    assert life.job.roll_back is not None
    assert (life.job.roll_back.count, life.job.roll_back.at_most, life.job.roll_back.older) == (1, 198, 0)


def test_a_loss_that_is_not_finite_rolls_back_where_the_ranks_give_up() -> None:
    life = Life(steps=900)
    life.come_up()
    life.complete(1, 2, 3, 4)
    for rank in (0, 1):
        life.said(rank, RankException(type="NonFiniteError", message="step 5: loss nan", traceback="", step=5,
                                      phase="step", time=life.now))  # fmt: skip
    for rank in (0, 1):
        life.exit(rank, code=1)
    assert life.job.roll_back is not None
    assert (life.job.roll_back.at_most, life.job.roll_back.beyond) == (3, 5)
    (decided,) = life.told(Action.SEVERITY_DECIDED)
    assert (decided["cause"], decided["severity"]) == ("nan_loss", "SEV2")
    assert life.told(Action.ROLLED_BACK)


def test_only_told_where_the_job_says_so() -> None:
    life = Life(health={"on_loss_spike": "tell"})
    life.come_up()
    life.complete(1)
    life.happen(Spiked(Spike(1, 3, "loss")))
    assert life.job.stage == "running"
    assert life.told(Action.LOSS_SPIKE)


def publish(folder: Path, step: int, consumed: int, incarnation: int) -> None:
    path = folder / manifest.step_dir_name(step)
    path.mkdir()
    (path / "data").write_text("x")
    manifest.publish(path, job="j", step=step, consumed_samples=consumed, incarnation=incarnation, created=0.0)


def test_the_checkpoint_the_position_and_what_becomes_void(tmp_path: Path) -> None:
    for step in (5, 10, 15, 20):
        publish(tmp_path, step, 4 * step, 1)
    published.move_latest(tmp_path, manifest.step_dir_name(20))
    back = RollBack(incarnation=2, at_most=18, beyond=22)
    chosen = published.newest_sound(tmp_path, back)
    assert chosen is not None
    assert chosen.name == manifest.step_dir_name(15)
    assert published.from_before(str(chosen), back)
    assert published.end_of_stretch(tmp_path, back, 4) == 88
    assert [step for step, _ in published.drop_void(tmp_path, 15, 2)] == [20]
    assert [step for step, _ in published.published(tmp_path)] == [5, 10, 15]
    latest = published.read_latest(tmp_path)
    assert latest is not None
    assert latest.name == manifest.step_dir_name(15)
    # the second run went on at position 88 with step 16, published step 20, and spikes up to step 30
    publish(tmp_path, 20, 88 + 4 * 5, 2)
    again = RollBack(incarnation=3, at_most=18, older=1, beyond=30, anchor=(15, 88))
    assert published.end_of_stretch(tmp_path, again, 4) == 88 + 4 * 15
    chosen = published.newest_sound(tmp_path, again)
    assert chosen is not None
    assert chosen.name == manifest.step_dir_name(10)
    publish(tmp_path, 25, 500, 3)
    newest = published.newest_sound(tmp_path, again)
    assert newest is not None
    assert newest.name == manifest.step_dir_name(25), "later incarnations go on from their own"
    assert published.newest_sound(tmp_path / "none", back) is None
