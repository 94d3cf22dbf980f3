"""One connection to Redis with the rules that every user of it shares: timeouts, retries, clear errors, no secrets.

Redis may restart or be away for a minute: each call is tried again with back-off until ``patience`` runs out. A call
that is tried again may have been applied the first time, so what is not idempotent by nature (an append to a stream)
is made so by :data:`APPEND`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from planner.clock import Clock, SystemClock
from planner.errors import BadInputError, MissingServiceError, one_line

SOCKET_TIMEOUT: Final = 6.0
"""Seconds after which an unanswered call counts as failed; every blocking read asks for less."""
MAX_BLOCK: Final = 2.0
"""Longest single blocking read in seconds; longer waits are several of them."""
DAEMON_PATIENCE: Final = 300.0
"""Seconds for which a daemon keeps trying when Redis is away."""
COMMAND_PATIENCE: Final = 3.0
"""Seconds for which a command typed by a person keeps trying."""

APPEND: Final = """
if not redis.call('SET', KEYS[2], '', 'NX', 'EX', 600) then return '' end
if ARGV[2] == '0' then return redis.call('XADD', KEYS[1], '*', 'd', ARGV[1]) end
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'd', ARGV[1])
"""
"""Append to a stream once per id of the call, however often the call is repeated."""

_AWAY = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError, ConnectionError, TimeoutError)


def public_url(url: str) -> str:
    """The URL without its user and password, for messages."""
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    except ValueError:
        return "the Redis URL"
    return f"{parts.scheme}://{host}{parts.path}"


class RedisLink:
    """A pooled, thread-safe connection that survives restarts of the server.

    Args:
        url: ``redis://[:password@]host:port[/db]``, ``rediss://`` or ``unix://``.
        patience: seconds a call keeps trying while the server is away.
        clock: time for the back-off.

    Raises:
        BadInputError: the URL is none.
    """

    def __init__(self, url: str, *, patience: float = DAEMON_PATIENCE, clock: Clock | None = None) -> None:
        self.url = url
        self.patience = patience
        self._clock: Clock = clock or SystemClock()
        self._closed = threading.Event()
        try:
            self.client: Any = redis.Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=SOCKET_TIMEOUT,
                socket_connect_timeout=SOCKET_TIMEOUT,
                socket_keepalive=True,
                health_check_interval=0,
                retry=Retry(NoBackoff(), 0),
            )
        except (ValueError, TypeError) as error:
            raise BadInputError(f"--url {public_url(url)}: not a Redis URL; write redis://host:port") from error

    def call(self, function: Callable[[Any], Any]) -> Any:
        """``function(client)``, tried again with back-off while Redis is away.

        Raises:
            MissingServiceError: away for longer than the patience, or it refuses us.
        """
        deadline = self._clock.monotonic() + self.patience
        delay = 0.02
        while True:
            try:
                return function(self.client)
            except redis.AuthenticationError:
                raise MissingServiceError(
                    f"Redis at {public_url(self.url)} refuses the password; check --url or PLANARIA_URL"
                ) from None
            except _AWAY as error:
                if self._clock.monotonic() >= deadline or self._closed.is_set():
                    raise MissingServiceError(
                        f"Redis at {public_url(self.url)} is not reachable ({_why(error)}); is the cluster up?"
                    ) from None
                self._clock.sleep(delay * (0.5 + random.random()))
                delay = min(delay * 2, 1.0)
            except redis.ResponseError as error:
                text = one_line(error)
                if text.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
                    raise MissingServiceError(
                        f"Redis at {public_url(self.url)} refuses us ({text.split()[0]}); check the password in the URL"
                    ) from None
                if text.startswith("MISCONF"):
                    raise MissingServiceError(
                        f"Redis at {public_url(self.url)} cannot write its data: {text}"
                    ) from None
                raise

    def give_up(self) -> None:
        """From now on no call waits for a Redis that is away; one that answers is still used."""
        self._closed.set()

    def close(self) -> None:
        """Close all connections; calls that wait for Redis give up."""
        self.give_up()
        self.client.close()


def _why(error: BaseException) -> str:
    text = one_line(error)
    return text if text and len(text) < 120 else type(error).__name__
