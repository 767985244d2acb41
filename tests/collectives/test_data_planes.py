"""Large tensors between ranks: through sockets and through shared memory, in threads of this process."""

import itertools
import os
import socket
import threading

import ml_dtypes
import numpy as np
import pytest
from ctl.collectives import arithmetic, links, memory, rings
from ctl.collectives.frames import Lost
from ctl.collectives.links import CHUNK, MemoryLink, SharedMemory, SocketLink, open_memory
from ctl.collectives.memory import Pool
from ctl.collectives.mesh import Mesh
from ctl.collectives.settings import Settings


def meshes(count, **settings):
    """One mesh per rank, all connected."""
    pairs = {pair: socket.socketpair() for pair in itertools.combinations(range(count), 2)}
    peers = [
        {b if rank == a else a: ends[rank == b] for (a, b), ends in pairs.items() if rank in (a, b)}
        for rank in range(count)
    ]
    controls = [socket.socketpair()[0] for _ in range(count)]

    def made(rank):
        return Mesh(rank, peers[rank], controls[rank], lambda: True, lambda: None, Settings(**settings))

    return at_once(count, made)


def at_once(count, call):
    """call(rank) for each rank, in threads; the results, or the first error."""
    found, errors = [None] * count, []

    def run(rank):
        try:
            found[rank] = call(rank)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return found


@pytest.fixture(params=["memory", "tcp"])
def plane(request):
    return {"shares_memory": request.param == "memory"}


@pytest.mark.parametrize("count", [2, 3])
def test_arrays_of_any_size_are_summed_where_they_lie(plane, count):
    group = meshes(count, **plane)
    kinds = {frozenset(mesh.paths.values()) for mesh in group}
    assert kinds == {frozenset(["memory" if plane["shares_memory"] else "tcp"])}
    sizes = [1, 0, 15, 17, CHUNK // 4 + 3, 3 * CHUNK // 4, 16]
    mine = [
        [np.random.default_rng([rank, i]).normal(size=n).astype(np.float32) for i, n in enumerate(sizes)]
        for rank in range(count)
    ]
    kept = [[a.copy() for a in arrays] for arrays in mine]
    for _ in range(2):  # slots and streams are in step afterwards
        totals = at_once(
            count, lambda me: rings.ring_allreduce(group[me], range(count), me, mine[me], arithmetic.SUM)
        )
        for i in range(len(sizes)):
            want = sum(arrays[i].astype(np.float64) for arrays in mine)
            np.testing.assert_allclose(totals[0][i], want, rtol=1e-5, atol=1e-5)
            for other in totals[1:]:
                assert other[i].tobytes() == totals[0][i].tobytes()
    for arrays, before in zip(mine, kept, strict=True):
        assert all((a == b).all() for a, b in zip(arrays, before, strict=True)), "inputs stay"
    assert all(a.ctypes.data % memory.ALIGNMENT == 0 for a in totals[0])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.float16])
@pytest.mark.parametrize("size", [3, CHUNK // 4 + 5])
def test_a_ring_divides_means_of_floats_and_leaves_others_to_its_caller(count, dtype, size):
    group = meshes(count)
    mine = [np.random.default_rng(rank).integers(0, 9, size).astype(dtype) for rank in range(count)]

    def reduced(op):
        return at_once(count, lambda me: rings.ring_allreduce(group[me], range(count), me, [mine[me]], op))

    divides = dtype in (np.float32, np.float64)
    for (total,), (mean,) in zip(reduced(arithmetic.SUM), reduced(arithmetic.AVERAGE), strict=True):
        assert (total == sum(mine)).all()
        assert mean.tobytes() == (total / total.dtype.type(count) if divides else total).tobytes()


@pytest.mark.parametrize("size", [100, rings.MAX_PAIR_BYTES // 4, 5 + rings.MAX_PAIR_BYTES // 4])
@pytest.mark.parametrize("op", [arithmetic.SUM, arithmetic.MIN, arithmetic.MAX])
def test_two_ranks_have_the_same_bits_of_what_depends_on_order(op, size, plane):
    group = meshes(2, **plane)
    mine = [np.full(size, -0.0, np.float32), np.zeros(size, np.float32)]
    for array, payload in zip(mine, (0x7FC00001, 0x7FC00002), strict=True):
        array.view(np.uint32)[:7] = payload  # not numbers, but different ones
    found = at_once(2, lambda me: rings.ring_allreduce(group[me], range(2), me, [mine[me]], op))
    assert found[0][0].tobytes() == found[1][0].tobytes()
    assert np.isnan(found[0][0][:7]).all() and (found[0][0][7:] == 0).all()


def test_large_messages_of_all_kinds(plane):
    count, rows = 3, CHUNK // 2 + 5
    group = meshes(count, **plane)
    random = np.random.default_rng(0)
    mine = [random.integers(0, 255, rows * count).astype(np.uint8) for _ in range(count)]
    sizes = [[rows] * count] * count

    def all_of(me):
        mesh, ranks = group[me], range(count)
        buffer = mine[me].copy()
        rings.ring_broadcast(mesh, ranks, me, buffer, 1)
        return (
            rings.ring_allgather(mesh, ranks, me, mine[me][: rows + me], [rows, rows + 1, rows + 2]),
            rings.ring_alltoall(mesh, ranks, me, mine[me], sizes),
            rings.ring_reducescatter(
                mesh, ranks, me, mine[me].astype(np.int64), [rows] * 3, arithmetic.SUM
            ),
            buffer,
        )

    for me, (gathered, exchanged, part, sent) in enumerate(at_once(count, all_of)):
        assert (gathered == np.concatenate([mine[r][: rows + r] for r in range(count)])).all()
        own = slice(me * rows, (me + 1) * rows)
        assert (exchanged == np.concatenate([mine[r][own] for r in range(count)])).all()
        assert (part == sum(m.astype(np.int64) for m in mine)[own]).all()
        assert (sent == mine[1]).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_sixteen_bit_floats_of_many_ranks_are_summed_in_float32(dtype):
    count, size = 4, 5000
    group = meshes(count)
    mine = [np.random.default_rng(rank).normal(size=size).astype(dtype) for rank in range(count)]
    totals = at_once(
        count, lambda me: rings.ring_allreduce(group[me], range(count), me, [mine[me]], arithmetic.SUM)
    )
    exact = sum(m.astype(np.float64) for m in mine)
    nearest = exact.astype(np.float32).astype(dtype).astype(np.float64)
    wrong = np.abs(totals[0][0].astype(np.float64) - nearest) > 0
    assert wrong.mean() < 0.001, "each sum is rounded once"
    assert all(t[0].tobytes() == totals[0][0].tobytes() for t in totals)


def test_a_rank_that_goes_is_named_in_the_middle_of_an_exchange(plane):
    group = meshes(2, **plane)
    leaver = threading.Timer(0.2, group[1].close)
    leaver.start()
    with pytest.raises(Lost) as lost:
        group[0].exchange(1, [np.zeros(64 * CHUNK, np.uint8)], 1, 1, np.zeros(1, np.uint8))
    assert lost.value.args[1] == 1
    leaver.join()


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


def test_memory_is_used_again_only_when_nobody_refers_to_it():
    pool, size = Pool(3 << 20), 1 << 20
    first = pool.take(size)
    place, part = first.ctypes.data, first[10:20].view(np.int8)
    del first
    assert pool.take(size).ctypes.data != place, "a part of it is in use"
    del part
    assert place in {pool.take(size).ctypes.data, pool.take(size).ctypes.data}
    held = [pool.take(size) for _ in range(5)]
    assert len({a.ctypes.data for a in held}) == 5
    del held
    pool.take(2 * size)
    assert sum(len(owners) * n for n, owners in pool._owners_by_size.items()) <= 3 << 20


def test_emptied_slots_are_reported_together():
    left, right = socket.socketpair()
    shared = SharedMemory()
    one = MemoryLink(left, 1, shared.memory, is_first=True)
    other = MemoryLink(right, 0, open_memory(shared.offer()), is_first=False)
    data, got = np.arange(10, dtype=np.uint8), np.zeros(10, np.uint8)
    words = []
    for sender, receiver in ((one, other), (other, one), (one, other), (one, other)):
        receiver.receive(data.size, got, None)
        sender.send([data])
        words.append(receiver.socket.recv(9, socket.MSG_PEEK))
        receiver.read()
        assert receiver.is_received and (got == data).all()
        if len(words) == 1:
            with pytest.raises(BlockingIOError):  # a word alone would wake the sender
                sender.socket.recv(9, socket.MSG_PEEK)
    assert words == [b"F", b"EF", b"EF", b"F"]
    assert one.socket.recv(9) == b"EE", "half of the slots are free again, and nothing else is to be said"


def test_links_pass_bytes_that_come_late(plane):
    left, right = socket.socketpair()
    if plane["shares_memory"]:
        shared = SharedMemory()
        ends = [MemoryLink(left, 1, shared.memory, is_first=True)]
        ends.append(MemoryLink(right, 0, open_memory(shared.offer()), is_first=False))
    else:
        ends = [SocketLink(left, 1), SocketLink(right, 0)]
    data = np.arange(CHUNK + 100, dtype=np.uint8)
    got = np.zeros(data.size, np.uint8)
    ends[0].send([data[:7], data[7:]])  # before the other asks for it
    ends[1].receive(data.size, got, None)
    while not ends[1].is_received:
        ends[1].read()
        if not ends[0].is_sent:
            ends[0].write()
    assert (got == data).all()
    assert links.memory_size() % CHUNK == 0
