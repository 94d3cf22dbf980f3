"""Which published checkpoints may be deleted. Pure: the caller counts after publication and does the deleting."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping


def deletable(
    steps: Iterable[int],
    *,
    keep: int,
    keep_every: int | None,
    newest_verified: int | None,
    protected: Collection[int] = (),
) -> list[int]:
    """The steps that retention may delete, oldest first.

    Kept are the ``keep`` newest, every multiple of ``keep_every``, whatever is ``protected`` (being read or
    exported now), and always the newest that is *known to verify*: if the ones above it are broken, it is what a
    recovery will need. Where none is known to verify, nothing may be deleted at all.

    Args:
        steps: steps of all published checkpoints.
        keep: newest ones to keep, at least 1.
        keep_every: steps that are a multiple of this stay for good; None for no such rule.
        newest_verified: newest step whose bytes were checked against its manifest.
        protected: steps that somebody needs now.

    Raises:
        ValueError: ``keep`` or ``keep_every`` is below 1.
    """
    if keep < 1:
        raise ValueError(f"keep {keep}: at least 1 checkpoint must be kept")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every {keep_every}: a positive number of steps is needed")
    ordered = sorted(set(steps))
    if newest_verified is None:
        return []
    kept = set(ordered[-keep:]) | {newest_verified} | set(protected)
    if keep_every is not None:
        kept |= {step for step in ordered if step % keep_every == 0}
    return [step for step in ordered if step not in kept and step < newest_verified]


def deletable_exports(
    exported: Mapping[int, bool], *, published: Collection[int], evaluated: Callable[[int], bool]
) -> list[int]:
    """The steps whose export may be deleted, oldest first: the checkpoint is gone, and no trial needs it any more.

    Args:
        exported: step → whether its evaluation was asked for, of all exports that are there.
        published: steps whose checkpoint is still there.
        evaluated: whether the results of a step are there. One whose trial failed has none, and stays: a person may
            want to retry it.
    """
    return [
        step
        for step, wanted in sorted(exported.items())
        if step not in published and not (wanted and not evaluated(step))
    ]
