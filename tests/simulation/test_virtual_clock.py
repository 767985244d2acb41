"""Virtual time of collectives: closed forms, slow ranks, jitter, thousands of ranks."""

import math
import time

import numpy as np
import pytest
from exchange_records import ALGORITHMS, Exchange, build_schedule, record_schedule
from virtual_clock import Costs, simulate

MEGABYTE = 1 << 20
COUNTS = [2, 4, 16, 256]
FIXED = Costs(exchange_secs=60e-6, latency_secs=25e-6)


def seconds(algorithm, count, num_bytes, costs, collective="allreduce", **options):
    return simulate(record_schedule(collective, algorithm, count, num_bytes), costs, **options).seconds


@pytest.mark.parametrize("count", COUNTS)
def test_without_bytes_the_time_is_the_number_of_exchanges(count):
    each, log = FIXED.exchange_secs + FIXED.latency_secs, int(math.log2(count))
    num_exchanges = {"ring": 2 * (count - 1), "doubling": log, "halving": 2 * log}
    for algorithm, exchanges in num_exchanges.items():
        if (algorithm, count) != ("ring", 2):
            assert seconds(algorithm, count, count << 10, FIXED) == pytest.approx(exchanges * each)
    assert seconds("ring", 2, MEGABYTE, FIXED) == pytest.approx(each)  # exchanges the whole vectors
    assert seconds("tree", count, 64, FIXED, "allgather") == pytest.approx(log * each)
    assert seconds("tree", count, 64 * count, FIXED, "alltoall") == pytest.approx(log * each)


@pytest.mark.parametrize("count", COUNTS)
def test_a_slow_network_determines_the_time_of_large_vectors(count):
    num_bytes, wire = 16 * MEGABYTE, Costs(wire_byte_secs=1e-9)
    vectors = {
        "ring": 2 * (count - 1) / count, "halving": 2 * (count - 1) / count, "doubling": math.log2(count)
    }  # fmt: skip
    for algorithm, factor in vectors.items():
        expected = factor * num_bytes * wire.wire_byte_secs
        assert seconds(algorithm, count, num_bytes, wire) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("count", COUNTS)
def test_cpu_time_is_the_sum_of_exchanges_and_bytes(count):
    costs = Costs(
        exchange_secs=60e-6, sent_byte_secs=1e-10, reduced_byte_secs=3e-10, stored_byte_secs=2e-10,
        copied_byte_secs=4e-10, call_secs=1e-3, latency_secs=1.0,
    )  # fmt: skip
    num_bytes = 16 * MEGABYTE
    cpu_secs = simulate(record_schedule("allreduce", "halving", count, num_bytes), costs).cpu_secs
    part_bytes = num_bytes * (count - 1) / count
    expected = 1e-3 + 2 * math.log2(count) * 60e-6 + num_bytes * 4e-10 + part_bytes * (2 + 3 + 2) * 1e-10
    np.testing.assert_allclose(cpu_secs, expected, rtol=1e-3)


def test_cpu_time_of_bytes_overlaps_with_the_transfer_except_for_the_last_chunk():
    num_bytes = 8 * MEGABYTE
    schedule = record_schedule("allreduce", "doubling", 2, num_bytes)
    slow_wire = Costs(wire_byte_secs=1e-8, reduced_byte_secs=1e-9)
    chunk_secs = (MEGABYTE // 2) * 1e-9
    assert simulate(schedule, slow_wire).seconds == pytest.approx(num_bytes * 1e-8 + chunk_secs)
    fast_wire = Costs(wire_byte_secs=1e-10, reduced_byte_secs=1e-9)
    assert simulate(schedule, fast_wire).seconds == pytest.approx(num_bytes * 1e-9)


def test_a_chain_forwards_pieces_as_a_pipeline():
    costs, count, num_pieces = Costs(wire_byte_secs=1e-9), 40, 100
    expected = (count - 2 + num_pieces) * MEGABYTE * 1e-9
    chain_secs = seconds("ring", count, num_pieces * MEGABYTE, costs, "broadcast")
    assert chain_secs == pytest.approx(expected, rel=0.01)


def test_messages_of_one_rank_follow_one_another_on_its_network():
    sends = [Exchange(offset, 1000, offset, 0, False) for offset in (1, 2)]
    receives = [[Exchange(2, 0, 2, 1000, False)], [Exchange(1, 0, 1, 1000, False)]]
    schedule = build_schedule(3, [sends, *receives])
    finished_at = simulate(schedule, Costs(wire_byte_secs=1e-3, latency_secs=0.5)).finished_at
    np.testing.assert_allclose(finished_at, [0.0, 1.5, 2.5])


def test_messages_to_one_rank_share_its_network():
    sends = [[Exchange(2, 1000, 2, 0, False)], [Exchange(1, 1000, 1, 0, False)]]
    receives = [Exchange(offset, 0, offset, 1000, False) for offset in (1, 2)]
    schedule = build_schedule(3, [receives, *sends])
    assert simulate(schedule, Costs(wire_byte_secs=1e-3)).seconds == pytest.approx(2.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS["allreduce"])
@pytest.mark.parametrize("rank", [0, 5])
def test_all_ranks_wait_for_a_slow_rank(algorithm, rank):
    schedule = record_schedule("allreduce", algorithm, 16, 16 << 10)
    costs = Costs(exchange_secs=60e-6)
    even, slow = simulate(schedule, costs), simulate(schedule, costs, slowdowns={rank: 5.0})
    assert slow.finished_at.min() > even.finished_at.max()
    assert slow.seconds == pytest.approx(5 * even.seconds, rel=0.2)
    cpu_ratios = slow.cpu_secs / even.cpu_secs
    assert cpu_ratios[rank] == pytest.approx(5) and np.delete(cpu_ratios, rank) == pytest.approx(1)


def test_jitter_depends_on_the_seed_only_and_hurts_the_ring_most():
    even, uneven = Costs(exchange_secs=60e-6), Costs(exchange_secs=60e-6, jitter=0.5)

    def added_secs(algorithm):
        return seconds(algorithm, 64, 64 << 10, uneven) - seconds(algorithm, 64, 64 << 10, even)

    first_secs, equal_secs, unequal_secs = [
        seconds("ring", 64, 64 << 10, uneven, seed=seed) for seed in (1, 1, 2)
    ]
    assert first_secs == equal_secs != unequal_secs
    assert added_secs("ring") > added_secs("halving") > added_secs("doubling") > 0


def test_a_cycle_of_waiting_ranks_is_an_error():
    receive_first = [Exchange(1, 0, 1, 8, False), Exchange(1, 8, 1, 0, False)]
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] wait for each other"):
        simulate(build_schedule(2, [receive_first, receive_first]), FIXED)


@pytest.mark.slow
@pytest.mark.parametrize("collective, algorithm", [(c, a) for c in ALGORITHMS for a in ALGORITHMS[c]])
def test_4096_ranks_take_less_than_a_minute(collective, algorithm):
    start_secs = time.process_time()
    schedule = record_schedule(collective, algorithm, 4096, 4 * MEGABYTE)
    simulated = simulate(schedule, FIXED)
    each = FIXED.exchange_secs + FIXED.latency_secs
    if algorithm == "ring" and collective != "broadcast":
        assert simulated.seconds == pytest.approx(schedule.num_steps[0] * each)
    assert simulated.seconds > 11.9 * each and simulated.finished_at.shape == (4096,)
    assert time.process_time() - start_secs < 60
