"""The sample order: every id once, whatever the batch sizes, the number of ranks and the interruptions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planner.microbatches import assign
from pretrain.order import SampleOrder, permuted

sizes = st.integers(1, 400)
seeds = st.integers(0, 2**40)


@given(size=sizes, key=seeds)
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permuted(position, size, key) for position in range(size)) == list(range(size))


@given(samples=sizes, seed=seeds, epochs=st.integers(1, 4))
def test_every_epoch_draws_every_sample_once_and_ids_never_repeat(samples: int, seed: int, epochs: int) -> None:
    order = SampleOrder(samples, seed)
    ids = order.batch(0, samples * epochs)
    assert sorted(ids) == list(range(samples * epochs))
    for epoch in range(epochs):
        part = ids[epoch * samples : (epoch + 1) * samples]
        assert sorted(order.index(sample) for sample in part) == list(range(samples))


@given(samples=st.integers(1, 100), seed=seeds, batches=st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_position_alone_decides_across_changes_of_the_global_batch(samples: int, seed: int, batches: list[int]) -> None:
    order = SampleOrder(samples, seed)
    drawn: list[int] = []
    for size in batches:
        drawn += order.batch(len(drawn), size)
    assert drawn == order.batch(0, sum(batches))


@given(
    samples=st.integers(1, 60),
    seed=seeds,
    micro=st.integers(1, 4),
    count=st.integers(1, 9),
    replicas=st.lists(st.integers(1, 12), min_size=1, max_size=12),
)
def test_samples_of_a_step_do_not_depend_on_the_number_of_replicas(
    samples: int, seed: int, micro: int, count: int, replicas: list[int]
) -> None:
    order = SampleOrder(samples, seed)
    for step, size in enumerate(replicas):
        ids = order.batch(step * micro * count, micro * count)
        shares = assign(count, size)
        run = [sample for share in shares for batch in share for sample in ids[batch * micro : (batch + 1) * micro]]
        assert sorted(run) == sorted(order.batch(step * micro * count, micro * count))


@given(samples=st.integers(50, 400), seed=seeds)
def test_epochs_and_seeds_have_orders_of_their_own(samples: int, seed: int) -> None:
    order = SampleOrder(samples, seed)
    first = [order.index(sample) for sample in order.batch(0, samples)]
    second = [order.index(sample) for sample in order.batch(samples, samples)]
    assert first != second
    assert first != list(range(samples))
    assert SampleOrder(samples, seed + 1).batch(0, samples) != order.batch(0, samples)
