"""The Celery application: ``celery -A evalsched.app worker`` joins a cluster, ``planaria worker`` does the same.

Celery carries work, never the record: late acknowledgement, no prefetch, no result backend, JSON only. Attempts
are counted by the scheduler under its own ids; a message that is delivered twice is refused by its dispatch.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from celery import Celery, signals

from evalsched.messages import METRIC_QUEUE, METRIC_WORK, RUN_SHARD, WARM

VISIBILITY_TIMEOUT = 12 * 3600
"""Seconds until Redis' transport delivers an unacknowledged message again; longer than any shard. The scheduler
does not wait for it: it notices a dead worker itself."""


def broker_url() -> str | None:
    """The cluster's Redis: ``PLANARIA_URL``, else that of the state directory or of the last ``planaria up``."""
    if url := os.environ.get("PLANARIA_URL"):
        return url
    from pathlib import Path

    from planner.cluster import find_cluster
    from planner.errors import PlanariaError

    folder = os.environ.get("PLANARIA_STATE_DIR")
    try:
        return find_cluster(None, Path(folder) if folder else None).url
    except PlanariaError:
        return None


def make_app(url: str | None) -> Celery:
    """A Celery application on the cluster's Redis."""
    app = Celery("planaria", broker=url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        # The three places where the Redis transport looks for it.
        broker_transport_options={
            "visibility_timeout": VISIBILITY_TIMEOUT,
            "global_keyprefix": "planaria:celery:",
            "socket_keepalive": True,
            "retry_on_timeout": True,
            "health_check_interval": 25,
        },
        result_backend_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT},
        visibility_timeout=VISIBILITY_TIMEOUT,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_send_task_events=True,
        task_send_sent_event=True,
        task_default_queue=METRIC_QUEUE,
        worker_hijack_root_logger=False,
        worker_pool="threads",  # one thread: the engine is used by the thread that made it, and control answers
        worker_concurrency=1,
        enable_utc=True,
    )
    app.task(name=RUN_SHARD, bind=True)(_run_shard)
    app.task(name=WARM, bind=True)(_warm)
    app.task(name=METRIC_WORK, bind=True)(_metric)
    return app


def _run_shard(task: Any, message: Any) -> None:
    task.app.planaria_worker.run_shard(message, _delivery(task))


def _warm(task: Any, message: Any) -> None:
    task.app.planaria_worker.warm(message)


def _metric(task: Any, message: Any) -> None:
    task.app.planaria_worker.metric(message, _delivery(task))


def _delivery(task: Any) -> str:
    """Which delivery of the message this is: a redelivery has another tag."""
    return str((task.request.delivery_info or {}).get("delivery_tag") or uuid.uuid4().hex)


app = make_app(broker_url())


def _join(sender: str | None = None, instance: Any = None, **_: Any) -> None:
    """``celery -A evalsched.app worker``: become a worker of the cluster before the consumer starts."""
    if instance is None or getattr(instance.app, "planaria_worker", None) is not None:
        return
    from evalsched.worker import join_by_hand

    join_by_hand(instance.app, str(sender))


signals.celeryd_init.connect(_join, weak=False)
