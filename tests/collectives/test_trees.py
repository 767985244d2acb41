"""Broadcast, all-gather and all-to-all by every algorithm, for 1 to 9 ranks. The ranks are threads."""

import functools
import itertools
import re

import numpy as np
import pytest
from ctl.collectives import trees
from ctl.collectives.mesh import Mesh
from ctl.collectives.settings import COLLECTIVE_ALGORITHMS
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import connected, run_on_ranks

ALGORITHMS = pytest.mark.parametrize(
    "algorithm", [a for a in COLLECTIVE_ALGORITHMS if a not in ("halving", "machines")]
)
SIZES = st.sampled_from([0, 1, 7, 64, 1000, 300_000])


def on_ranks(ranks, call):
    """Returns the results of `call(mesh, ranks, me)` by index."""
    group = connected(1 + max(ranks))
    return run_on_ranks(len(ranks), lambda me: call(group[ranks[me]], ranks, me))


@functools.cache
def random_bytes(seed, size):
    values = np.random.default_rng([seed, size]).integers(0, 256, size, np.uint8)
    values.setflags(write=False)
    return values


@ALGORITHMS
@given(count=st.integers(1, 9), size=st.one_of(SIZES, st.just(3 << 20)), data=st.data())
def test_a_broadcast_copies_the_bytes_of_any_root(algorithm, count, size, data):
    root = data.draw(st.integers(0, count - 1))

    def broadcast(mesh, ranks, me):
        buffer = random_bytes(me, size).copy()
        trees.broadcast_bytes(mesh, ranks, me, buffer, root, algorithm)
        return buffer

    for buffer in on_ranks(range(count), broadcast):
        np.testing.assert_array_equal(buffer, random_bytes(root, size))


@ALGORITHMS
@given(sizes=st.lists(SIZES, min_size=1, max_size=9))
def test_an_all_gather_concatenates_the_bytes_of_all_ranks(algorithm, sizes):
    values = [random_bytes(rank, size) for rank, size in enumerate(sizes)]

    def allgather(mesh, ranks, me):
        return trees.allgather_bytes(mesh, ranks, me, values[me], sizes, algorithm)

    for gathered in on_ranks(range(len(sizes)), allgather):
        np.testing.assert_array_equal(gathered, np.concatenate(values))


@ALGORITHMS
@given(count=st.integers(1, 9), data=st.data())
def test_an_all_to_all_sends_any_number_of_bytes_to_each_rank(algorithm, count, data):
    row = st.lists(st.sampled_from([0, 1, 7, 1000, 70_000]), min_size=count, max_size=count)
    sizes = data.draw(st.lists(row, min_size=count, max_size=count))
    blocks = [[random_bytes(10 * i + j, sizes[i][j]) for j in range(count)] for i in range(count)]

    def alltoall(mesh, ranks, me):
        return trees.alltoall_bytes(mesh, ranks, me, np.concatenate(blocks[me]), sizes, algorithm)

    for me, received in enumerate(on_ranks(range(count), alltoall)):
        np.testing.assert_array_equal(received, np.concatenate([blocks[i][me] for i in range(count)]))


@ALGORITHMS
def test_a_process_set_exchanges_among_its_ranks(algorithm):
    ranks, sizes = (1, 3, 4, 7, 8), [3, 0, 5, 2, 4]
    values = [random_bytes(rank, size) for rank, size in zip(ranks, sizes, strict=True)]
    row = [1, 0, 0, 1, 1]  # each rank sends these numbers of the same three bytes

    def allgather(mesh, ranks, me):
        return trees.allgather_bytes(mesh, ranks, me, values[me], sizes, algorithm)

    def alltoall(mesh, ranks, me):
        return trees.alltoall_bytes(mesh, ranks, me, values[0], [row] * 5, algorithm)

    assert {result.tobytes() for result in on_ranks(ranks, allgather)} == {np.concatenate(values).tobytes()}
    first, second, third = values[0].tolist()
    expected = [[first] * 5, [], [], [second] * 5, [third] * 5]
    assert [result.tolist() for result in on_ranks(ranks, alltoall)] == expected


CALLS = {
    "broadcast": lambda mesh, ranks, me, size: trees.broadcast_bytes(
        mesh, ranks, me, np.zeros(size, np.uint8), 0
    ),
    "allgather": lambda mesh, ranks, me, size: trees.allgather_bytes(
        mesh, ranks, me, np.zeros(size, np.uint8), [size] * len(ranks)
    ),
    "alltoall": lambda mesh, ranks, me, size: trees.alltoall_bytes(
        mesh, ranks, me, np.zeros(size * len(ranks), np.uint8), [[size] * len(ranks)] * len(ranks)
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("collective", "size", "num_exchanges"),
    [
        ("broadcast", 1 << 16, 3), ("broadcast", 64 << 20, 65),
        ("allgather", 1 << 12, 3), ("allgather", 1 << 20, 7),
        ("alltoall", 1 << 12, 3), ("alltoall", 1 << 20, 7),
    ],
)  # fmt: skip
def test_eight_ranks_choose_the_algorithm_by_the_size(collective, size, num_exchanges, monkeypatch):
    counts, original = dict.fromkeys(range(8), 0), Mesh.exchange

    def exchange(mesh, *arguments, **named):
        counts[next(rank for rank, values in enumerate(connected(8)) if values is mesh)] += 1
        return original(mesh, *arguments, **named)

    monkeypatch.setattr(Mesh, "exchange", exchange)
    on_ranks(range(8), functools.partial(CALLS[collective], size=size))
    assert max(counts.values()) == num_exchanges


@pytest.mark.workers
@pytest.mark.parametrize(
    ("collective", "algorithm", "num_exchanges"),
    [
        ("allreduce", "ring", 8), ("allreduce", "doubling", 4), ("allreduce", "halving", 6),
        ("broadcast", "ring", 6), ("broadcast", "doubling", 1),
        ("allgather", "ring", 4), ("allgather", "doubling", 3),
        ("alltoall", "ring", 4), ("alltoall", "doubling", 3),
        ("reducescatter", "ring", 4), ("reducescatter", "halving", 4),
    ],
)  # fmt: skip
def test_a_rank_that_is_lost_before_any_exchange_is_an_error_on_all_others(
    run_program, collective, algorithm, num_exchanges
):
    (result,) = run_program(1, ["tests/programs/lost_in_collective.py", collective, algorithm])
    *errors_by_exchange, complete = result.json["errors"]
    assert len(errors_by_exchange) == num_exchanges and complete == ["none"] * 4
    for error in itertools.chain.from_iterable(errors_by_exchange):
        assert re.search("rank 1 (is gone|died)", error)
