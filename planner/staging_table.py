"""Who holds a staged model and who loads it from where, in Redis: what :mod:`planner.distribution` decides on.

Keys, below ``planaria:``: ``staged:<digest>`` (hash node → URL of its server) and ``staging:<digest>`` (hash node →
JSON: from whom, until when). A load is a claim that its loader renews; one that is not renewed is void, so a loader
that dies holds nobody up for longer than :data:`CLAIM_SECONDS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from redis.exceptions import WatchError

from planner.distribution import Source, choose_source

CLAIM_SECONDS = 10.0
KEPT_SECONDS = 24 * 3600
"""How long Redis remembers the holders of a digest after the last change."""


class StagingTable:
    """Holders and loads of staged models.

    Args:
        call: runs ``function(client)`` with retries (``planner.redis_link.RedisLink.call``).
    """

    def __init__(self, call: Callable[[Callable[[Any], Any]], Any]) -> None:
        self._call = call

    def claim(self, digest: str, node: str) -> tuple[Source, str | None]:
        """Decide where ``node`` loads from and remember it; with the holder's URL where it is a peer."""
        found: tuple[Source, str | None] = self._call(lambda client: self._claim(client, digest, node))
        return found

    def _claim(self, client: Any, digest: str, node: str) -> tuple[Source, str | None]:
        staged, staging = f"planaria:staged:{digest}", f"planaria:staging:{digest}"
        while True:
            with client.pipeline() as pipe:
                try:
                    pipe.watch(staged, staging)
                    holders = pipe.hgetall(staged)
                    loads = {name: json.loads(text) for name, text in pipe.hgetall(staging).items()}
                    now = _now(pipe)
                    live = {name: one for name, one in loads.items() if one["until"] > now and name != node}
                    source = _decide(node, holders, live)
                    pipe.multi()
                    for name in loads.keys() - live.keys():
                        pipe.hdel(staging, name)
                    if source.kind != "wait":
                        record = {"from": source.peer, "until": now + CLAIM_SECONDS}
                        pipe.hset(staging, node, json.dumps(record))
                        pipe.expire(staging, KEPT_SECONDS)
                    if source.kind == "storage":
                        pipe.hincrby("planaria:staging_reads", digest, 1)
                    pipe.execute()
                    return source, holders.get(source.peer) if source.peer else None
                except WatchError:
                    continue  # somebody was quicker: decide again on what is true now

    def renew(self, digest: str, node: str, source: Source) -> None:
        """The load goes on; at least every few seconds."""

        def do(client: Any) -> None:
            record = {"from": source.peer, "until": _now(client) + CLAIM_SECONDS}
            client.hset(f"planaria:staging:{digest}", node, json.dumps(record))

        self._call(do)

    def done(self, digest: str, node: str, url: str | None) -> None:
        """The load is over; with a URL, the node serves the model from now on."""

        def do(client: Any) -> None:
            with client.pipeline() as pipe:
                pipe.hdel(f"planaria:staging:{digest}", node)
                if url is not None:
                    pipe.hset(f"planaria:staged:{digest}", node, url)
                    pipe.expire(f"planaria:staged:{digest}", KEPT_SECONDS)
                pipe.execute()

        self._call(do)

    def forget(self, digest: str, node: str, url: str | None = None) -> None:
        """A node serves a model no more; with a URL, only if it is still the one that it serves at."""

        def do(client: Any) -> None:
            key = f"planaria:staged:{digest}"
            if url is None or client.hget(key, node) == url:
                client.hdel(key, node)

        self._call(do)

    def reads(self, digest: str) -> int:
        """How often the model was begun to be read from storage."""
        return int(self._call(lambda client: client.hget("planaria:staging_reads", digest)) or 0)


def _decide(node: str, holders: Mapping[str, str], live: Mapping[str, Mapping[str, Any]]) -> Source:
    serving = dict.fromkeys(holders, 0)
    for load in live.values():
        if load["from"] in serving:
            serving[load["from"]] += 1
    return choose_source(node, serving, sum(load["from"] is None for load in live.values()))


def _now(client: Any) -> float:
    seconds, micros = client.time()
    return float(seconds) + float(micros) / 1e6
