"""``planaria status``, ``nodes``, ``drain``, ``cordon``, ``uncordon``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from planner.cluster import connect
from planner.events import Action, Event
from planner.overview import event_in_words, find_named, overview
from planner.store import ClusterStore

LAST_EVENTS = 8
"""Events that ``status`` shows below its tables."""


def status_command(*, job: str | None, json_output: bool, state_dir: Path | None, url: str | None) -> int:
    """``planaria status [JOB] [--json]``.

    Raises:
        BadInputError: no such job.
        MissingServiceError: no cluster.
    """
    store, _ = connect(url, state_dir)
    try:
        document = overview(store)
        events = store.last_events(200)
    finally:
        store.close()
    if job is not None:
        find_named("job", job, (row["id"] for row in document["jobs"]))
        document["jobs"] = [row for row in document["jobs"] if row["id"] == job]
        events = [event for event in events if event.job == job]
    if json_output:
        print(json.dumps(document))
        return 0
    _print_status(document, events[-LAST_EVENTS:])
    return 0


def nodes_command(*, json_output: bool, state_dir: Path | None, url: str | None) -> int:
    """``planaria nodes [--json]``."""
    store, _ = connect(url, state_dir)
    try:
        rows = overview(store)["nodes"]
    finally:
        store.close()
    if json_output:
        print(json.dumps({"nodes": rows}))
        return 0
    _table(
        "Nodes",
        ["node", "state", "slots", "held", "device", "address", "why", "own checks"],
        [
            [r["name"], _node_state(r), r["slots"], r["held"], r["device"], r["address"], r["reason"], _checks(r)]
            for r in rows
        ],
        empty="no node has joined yet: planaria agent adds one",
    )
    return 0


def drain_command(*, node: str, state_dir: Path | None, url: str | None) -> int:
    """``planaria drain NODE``."""
    return _set_cordon(node, "drain", state_dir, url)


def cordon_command(*, node: str, state_dir: Path | None, url: str | None) -> int:
    """``planaria cordon NODE``."""
    return _set_cordon(node, "cordon", state_dir, url)


def uncordon_command(*, node: str, state_dir: Path | None, url: str | None) -> int:
    """``planaria uncordon NODE``."""
    return _set_cordon(node, None, state_dir, url)


def _set_cordon(node: str, mode: str | None, state_dir: Path | None, url: str | None) -> int:
    """Set or lift the mark, tell it as an event, say it. Asking for what is so already changes nothing."""
    store, _ = connect(url, state_dir)
    try:
        find_named("node", node, (facts.name for facts in store.nodes()))
        old = store.cordoned().get(node)
        if old != mode:
            _change_cordon(store, node, mode)
            action = Action.NODE_CORDONED if mode else Action.NODE_UNCORDONED
            store.tell(action, old=old, new=mode, reason="a person asked for it", node=node)
    finally:
        store.close()
    said = {
        "drain": "takes no new work, and its work moves off",
        "cordon": "takes no new work; what runs there stays",
        None: "takes work",
    }
    print(f"{node} {said[mode]}")
    return 0


def _change_cordon(store: ClusterStore, node: str, mode: str | None) -> None:
    if mode is None:
        store.uncordon(node)
    else:
        store.cordon(node, mode)


# ---------------------------------------------------------------- for people


def _print_status(document: Mapping[str, Any], events: Sequence[Event]) -> None:
    _table(
        "Jobs",
        ["job", "state", "step", "loss", "workers", "incarnation", "faults", "ETTR"],
        [
            [
                r["id"],
                r["state"],
                f"{r['step']}/{r['steps']}",
                _number(r["loss"], ".4f"),
                r["workers"],
                r["incarnation"],
                r["faults"],
                _number(r["ettr"], ".1%"),
            ]
            for r in document["jobs"]
        ],
        empty="no job yet: planaria submit CONFIG",
    )
    _table(
        "Slots",
        ["slot", "holder", "state", "lease"],
        [
            [f"{r['node']}/{r['slot']}", r["holder"] or "–", r["state"], _until(r["lease_expires"])]
            for r in document["slots"]
        ],
        empty="no node has joined yet: planaria agent adds one",
    )
    e = document["evaluation"]
    print(f"Evaluation: {e['queued']} queued, {e['running']} running, {e['done']} done, {e['workers']} workers")
    for name, found in (e.get("calibration") or {}).items():
        if found.get("count"):
            print(
                f"  predicted {name}: off by × {found['error']:.2f} (defaults × {found['default_error']:.2f}), "
                f"{found['covered']:.0%} in the 80% interval, of {found['count']} measured"
            )
    if document["decision"]:
        print(f"Decision: {document['decision']['reason']}")
        for holder, why in document["decision"].get("waiting", {}).items():
            print(f"  {holder} waits: {why}")
    for row in document["jobs"]:
        if row.get("reason"):
            print(f"{row['id']}: {row['reason']}")
    for event in events:
        print(f"  {time.strftime('%H:%M:%S', time.localtime(event.time))}  {event_in_words(event)}")
    if document["coordinator"] is None or not document["coordinator"]["active"]:
        print("No coordinator is active: nothing is decided until one runs (planaria coordinator).")


def _node_state(row: Mapping[str, Any]) -> str:
    mode = {"drain": "drained", "cordon": "cordoned", "check": "cordoned"}.get(row["cordoned"] or "")
    return f"{row['state']}, {mode}" if mode else str(row["state"])


def _checks(row: Mapping[str, Any]) -> str:
    """What a node says of itself: its troubles, or that there is none, with what could not be looked at."""
    said: Mapping[str, Mapping[str, str]] = row["checks"]
    bad = [f"{name}: {check['reason']}" for name, check in said.items() if check["state"] in ("warning", "broken")]
    skipped = [name for name, check in said.items() if check["state"] == "skipped"]
    if bad or not said:
        return "; ".join(bad) or "–"
    return "good" + (f" (skipped: {', '.join(skipped)})" if skipped else "")


def _number(value: Any, form: str) -> str:
    return "–" if value is None else format(float(value), form)


def _until(expires: float | None) -> str:
    return "–" if expires is None else time.strftime("until %H:%M:%S", time.localtime(expires))


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, empty: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not rows:
        console.print(f"{title}: {escape(empty)}")
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row))
    console.print(table)
