"""Coordinates of ranks, padding of the vocabulary, counts of parameters, and interfaces."""

from __future__ import annotations

import itertools
import socket

import pytest

from planner.errors import BadInputError, MissingServiceError
from pretrain import device
from pretrain.parallel import interface_of, join, layout

device.prepare()

from pretrain.model import count_parameters, flop_per_token, padded_vocabulary  # noqa: E402
from tests.support.ranks import tiny  # noqa: E402


@pytest.mark.parametrize(("tensor", "pipeline", "data"), itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 5)))
def test_every_coordinate_is_held_once(tensor: int, pipeline: int, data: int) -> None:
    world = tensor * pipeline * data
    places = [layout(rank, world, tensor, pipeline) for rank in range(world)]
    coordinates = {(place.tensor_rank, place.pipeline_rank, place.data_rank) for place in places}
    assert coordinates == set(itertools.product(range(tensor), range(pipeline), range(data)))
    readers = [place.data_rank for place in places if place.reads_data]
    assert sorted(readers) == list(range(data)), "one rank per replica speaks for its samples"
    assert sum(place.last_stage for place in places) == tensor * data


@pytest.mark.parametrize(("world", "tensor", "pipeline"), [(3, 2, 1), (1, 2, 1), (6, 2, 2), (0, 1, 1)])
def test_a_world_that_does_not_divide_is_bad_input(world: int, tensor: int, pipeline: int) -> None:
    with pytest.raises(BadInputError, match=rf"parallel.tensor {tensor} × parallel.pipeline {pipeline}"):
        layout(0, world, tensor, pipeline)


def test_the_loopback_has_an_interface() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9")
    assert interface_of("127.0.0.1") is not None
    assert interface_of("203.0.113.77") is None


def test_a_store_that_does_not_answer_is_a_missing_service() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(MissingServiceError, match=rf"rendezvous store 127\.0\.0\.1:{port} does not answer"):
            join(layout(0, 1, 1, 1), store_host="127.0.0.1", store_port=port, prefix="job/1", store_seconds=1.0)


@pytest.mark.parametrize("size", [1, 64, 258, 50257])
def test_padding_is_the_same_for_usual_tensor_sizes(size: int) -> None:
    padded = {padded_vocabulary(size, tensor) for tensor in (1, 2, 4, 8)}
    assert len(padded) == 1
    assert size <= padded.pop() < size + 64
    assert padded_vocabulary(size, 3) % 3 == 0


def test_parameters_are_counted_as_in_a_llama() -> None:
    config = tiny()
    # embeddings 2·320·64, per layer: q 64·64, k and v 32·64, out 64·64, three of 64·96, two norms; last norm
    expected = 2 * 320 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    assert count_parameters(config, 320) == expected
    assert flop_per_token(config, 320) == 6 * (expected - 320 * 64) + 12 * 2 * 64 * 32
