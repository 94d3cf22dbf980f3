"""Which workers are taken for dead: silent ones, and those that say they are idle and take nothing."""

from __future__ import annotations

from typing import Any, cast

from evalsched.roster import DEAF_SECONDS, SILENT_SECONDS, Missing, Roster
from planner.worker_table import WorkerRecord, WorkerTable


class Table:
    """What workers say, as the test has it."""

    def __init__(self) -> None:
        self.time = 100.0
        self.records: dict[str, WorkerRecord] = {}

    def say(self, worker: str, **facts: Any) -> None:
        self.records[worker] = WorkerRecord(worker=worker, seen=self.time, facts={"kind": "infer", **facts})

    def workers(self) -> dict[str, WorkerRecord]:
        return dict(self.records)

    def now(self) -> float:
        return self.time

    def forget(self, worker: str) -> None:
        self.records.pop(worker, None)


def roster() -> tuple[Roster, Table]:
    table = Table()
    return Roster(cast(WorkerTable, table)), table


def test_an_idle_worker_that_takes_nothing_is_deaf_after_a_while() -> None:
    mine, table = roster()
    sent = {"w": 100.0}
    for second in range(int(DEAF_SECONDS) + 1):
        table.time = 100.0 + second
        table.say("w", state="ready")
        assert mine.refresh(sent) == []
        assert mine.deaf(sent, table.time) == []
    table.time = 100.0 + DEAF_SECONDS + 1
    table.say("w", state="ready")
    mine.refresh(sent)
    assert mine.deaf(sent, table.time) == [Missing("w", "it took nothing of what was sent to it for 16 s")]


def test_one_that_works_loads_or_was_sent_nothing_is_not() -> None:
    mine, table = roster()
    for second in range(0, 60, 5):
        table.time = 100.0 + second
        table.say("busy", state="busy", dispatch="d")
        table.say("loading", state="loading")
        table.say("between", state="ready" if second % 10 else "busy", dispatch=None if second % 10 else "e")
        table.say("unasked", state="ready")
        mine.refresh(())
        assert mine.deaf({"busy": 100.0, "loading": 100.0, "between": 100.0}, table.time) == []


def test_a_message_that_was_sent_just_now_is_waited_for() -> None:
    mine, table = roster()
    for second in range(60):
        table.time = 100.0 + second
        table.say("w", state="ready")
        mine.refresh(())
        assert mine.deaf({"w": table.time - 1.0}, table.time) == [], "it was idle for long, with nothing to do"


def test_a_silent_worker_is_missing_and_then_not_listened_to() -> None:
    mine, table = roster()
    table.say("w", state="ready")
    table.time += SILENT_SECONDS + 1
    (missing,) = mine.refresh(["w", "never seen"])[:1]
    assert missing.worker == "w"
    assert mine.give_up("w")
    assert not mine.give_up("w")
    table.say("w", state="ready")
    mine.refresh(())
    assert mine.live() == []
    assert "w" not in table.records
