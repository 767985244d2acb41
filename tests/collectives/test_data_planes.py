"""Transfer of large tensors between ranks through sockets and shared memory. The ranks are threads."""

import os
import socket
import threading

import ml_dtypes
import numpy as np
import pytest
from ctl.collectives import arithmetic, memory, rings
from ctl.collectives.frames import Lost
from ctl.collectives.memory import Pool
from ctl.collectives.transports import shared_memory
from ctl.collectives.transports.link import CHUNK
from ctl.collectives.transports.shared_memory import MemoryLink, SharedMemory, open_memory
from ctl.collectives.transports.sockets import SocketLink
from rank_threads import meshes, run_on_ranks


@pytest.fixture(params=["memory", "tcp"])
def plane(request):
    return {"transport": request.param}


@pytest.mark.parametrize("count", [2, 3])
def test_arrays_of_any_size_are_summed_without_changes_of_the_inputs(plane, count):
    group = meshes(count, **plane)
    path_types = {frozenset(mesh.paths.values()) for mesh in group}
    assert path_types == {frozenset([plane["transport"]])}
    sizes = [1, 0, 15, 17, CHUNK // 4 + 3, 3 * CHUNK // 4, 16]
    arrays_by_rank = [
        [np.random.default_rng([seed, i]).normal(size=n).astype(np.float32) for i, n in enumerate(sizes)]
        for seed in range(count)
    ]
    copies_by_rank = [[a.copy() for a in own_arrays] for own_arrays in arrays_by_rank]
    for _ in range(2):  # slots and streams stay synchronous
        totals = run_on_ranks(
            count,
            lambda rank: rings.ring_allreduce(
                group[rank], range(count), rank, arrays_by_rank[rank], arithmetic.SUM
            ),
        )
        for i in range(len(sizes)):
            expected = sum(own_arrays[i].astype(np.float64) for own_arrays in arrays_by_rank)
            np.testing.assert_allclose(totals[0][i], expected, rtol=1e-5, atol=1e-5)
            for other in totals[1:]:
                assert other[i].tobytes() == totals[0][i].tobytes()
    for own_arrays, before in zip(arrays_by_rank, copies_by_rank, strict=True):
        assert all((a == b).all() for a, b in zip(own_arrays, before, strict=True)), "inputs are unchanged"
    assert all(a.ctypes.data % memory.ALIGNMENT == 0 for a in totals[0])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.float16])
@pytest.mark.parametrize("size", [3, CHUNK // 4 + 5])
def test_a_ring_divides_means_of_32_and_64_bit_floats_only(count, dtype, size):
    group = meshes(count)
    arrays = [np.random.default_rng(seed).integers(0, 9, size).astype(dtype) for seed in range(count)]

    def reduced(op):
        return run_on_ranks(
            count, lambda rank: rings.ring_allreduce(group[rank], range(count), rank, [arrays[rank]], op)
        )

    divides = dtype in (np.float32, np.float64)
    for (total,), (mean,) in zip(reduced(arithmetic.SUM), reduced(arithmetic.AVERAGE), strict=True):
        assert (total == sum(arrays)).all()
        assert mean.tobytes() == (total / total.dtype.type(count) if divides else total).tobytes()


@pytest.mark.parametrize("size", [100, rings.MAX_PAIR_BYTES // 4, 5 + rings.MAX_PAIR_BYTES // 4])
@pytest.mark.parametrize("op", [arithmetic.SUM, arithmetic.MIN, arithmetic.MAX])
def test_two_ranks_have_equal_bits_for_results_that_depend_on_the_order(op, size, plane):
    group = meshes(2, **plane)
    arrays = [np.full(size, -0.0, np.float32), np.zeros(size, np.float32)]
    for array, payload in zip(arrays, (0x7FC00001, 0x7FC00002), strict=True):
        array.view(np.uint32)[:7] = payload  # not numbers, but different ones
    results = run_on_ranks(
        2, lambda rank: rings.ring_allreduce(group[rank], range(2), rank, [arrays[rank]], op)
    )
    assert results[0][0].tobytes() == results[1][0].tobytes()
    assert np.isnan(results[0][0][:7]).all() and (results[0][0][7:] == 0).all()


def test_large_messages_of_all_kinds(plane):
    count, rows = 3, CHUNK // 2 + 5
    group = meshes(count, **plane)
    random = np.random.default_rng(0)
    arrays = [random.integers(0, 255, rows * count).astype(np.uint8) for _ in range(count)]
    sizes = [[rows] * count] * count

    def run_all_operations(rank):
        mesh, ranks = group[rank], range(count)
        buffer = arrays[rank].copy()
        rings.ring_broadcast(mesh, ranks, rank, buffer, 1)
        return (
            rings.ring_allgather(
                mesh, ranks, rank, arrays[rank][: rows + rank], [rows, rows + 1, rows + 2]
            ),
            rings.ring_alltoall(mesh, ranks, rank, arrays[rank], sizes),
            rings.ring_reducescatter(
                mesh, ranks, rank, arrays[rank].astype(np.int64), [rows] * 3, arithmetic.SUM
            ),
            buffer,
        )

    for rank, (gathered, exchanged, part, sent) in enumerate(run_on_ranks(count, run_all_operations)):
        assert (gathered == np.concatenate([arrays[r][: rows + r] for r in range(count)])).all()
        own_rows = slice(rank * rows, (rank + 1) * rows)
        assert (exchanged == np.concatenate([arrays[r][own_rows] for r in range(count)])).all()
        assert (part == sum(m.astype(np.int64) for m in arrays)[own_rows]).all()
        assert (sent == arrays[1]).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_floats_of_many_ranks_are_summed_in_float32(dtype):
    count, size = 4, 5000
    group = meshes(count)
    arrays = [np.random.default_rng(seed).normal(size=size).astype(dtype) for seed in range(count)]
    totals = run_on_ranks(
        count,
        lambda rank: rings.ring_allreduce(group[rank], range(count), rank, [arrays[rank]], arithmetic.SUM),
    )
    exact = sum(m.astype(np.float64) for m in arrays)
    nearest = exact.astype(np.float32).astype(dtype).astype(np.float64)
    is_inexact = np.abs(totals[0][0].astype(np.float64) - nearest) > 0
    assert is_inexact.mean() < 0.001, "each sum is rounded once"
    assert all(t[0].tobytes() == totals[0][0].tobytes() for t in totals)


def test_a_rank_that_leaves_during_an_exchange_is_named(plane):
    group = meshes(2, **plane)
    closing_timer = threading.Timer(0.2, group[1].close)
    closing_timer.start()
    with pytest.raises(Lost) as lost:
        group[0].exchange(1, [np.zeros(64 * CHUNK, np.uint8)], 1, 1, np.zeros(1, np.uint8))
    assert lost.value.args[1] == 1
    closing_timer.join()


def test_memory_is_only_opened_with_its_token_and_on_the_same_machine():
    shared = SharedMemory()
    offer = shared.offer()
    assert open_memory(offer) is not None
    assert open_memory({}) is None
    assert open_memory({**offer, "token": "00" * 32}) is None
    assert open_memory({**offer, "boot": "another machine"}) is None
    with open(os.devnull) as other:
        assert open_memory({**offer, "file": other.fileno()}) is None
    shared.release()
    assert open_memory(offer) is None


def test_memory_is_reused_only_without_references():
    pool, size = Pool(3 << 20), 1 << 20
    first = pool.take(size)
    address, part = first.ctypes.data, first[10:20].view(np.int8)
    del first
    assert pool.take(size).ctypes.data != address, "a part of it is in use"
    del part
    assert address in {pool.take(size).ctypes.data, pool.take(size).ctypes.data}
    allocations = [pool.take(size) for _ in range(5)]
    assert len({a.ctypes.data for a in allocations}) == 5
    del allocations
    pool.take(2 * size)
    assert sum(len(owners) * n for n, owners in pool._owners_by_size.items()) <= 3 << 20


def test_emptied_slots_are_reported_together():
    left_socket, right_socket = socket.socketpair()
    shared = SharedMemory()
    first = MemoryLink(left_socket, 1, shared.memory, is_first=True)
    second = MemoryLink(right_socket, 0, open_memory(shared.offer()), is_first=False)
    data, received = np.arange(10, dtype=np.uint8), np.zeros(10, np.uint8)
    control_bytes = []
    for sender, receiver in ((first, second), (second, first), (first, second), (first, second)):
        receiver.receive(data.size, received, None)
        sender.send([data])
        control_bytes.append(receiver.socket.recv(9, socket.MSG_PEEK))
        receiver.read()
        assert receiver.is_received and (received == data).all()
        if len(control_bytes) == 1:
            with pytest.raises(BlockingIOError):  # a separate byte would wake the sender
                sender.socket.recv(9, socket.MSG_PEEK)
    assert control_bytes == [b"F", b"EF", b"EF", b"F"]
    assert first.socket.recv(9) == b"EE", "half of the slots are free again, and no other byte is sent"


def test_links_deliver_bytes_that_are_sent_before_the_receive(plane):
    left_socket, right_socket = socket.socketpair()
    if plane["transport"] == "memory":
        shared = SharedMemory()
        ends = [MemoryLink(left_socket, 1, shared.memory, is_first=True)]
        ends.append(MemoryLink(right_socket, 0, open_memory(shared.offer()), is_first=False))
    else:
        ends = [SocketLink(left_socket, 1), SocketLink(right_socket, 0)]
    data = np.arange(CHUNK + 100, dtype=np.uint8)
    received = np.zeros(data.size, np.uint8)
    ends[0].send([data[:7], data[7:]])  # before the other end receives
    ends[1].receive(data.size, received, None)
    while not ends[1].is_received:
        ends[1].read()
        if not ends[0].is_sent:
            ends[0].write()
    assert (received == data).all()
    assert shared_memory.memory_size() % CHUNK == 0
