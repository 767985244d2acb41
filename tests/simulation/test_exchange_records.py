"""Recorded exchanges: equal to those of an execution with real data, and short for many ranks."""

import numpy as np
import pytest
from ctl.collectives import arithmetic
from exchange_records import (
    ALGORITHMS,
    DTYPES,
    Exchange,
    RecordingMesh,
    build_schedule,
    record_exchanges,
    record_schedule,
    run_collective,
)
from rank_threads import connected, run_on_ranks

CASES = [(collective, name) for collective, names in ALGORITHMS.items() for name in names]
SYMMETRIC = [case for case in CASES if case[0] != "broadcast" and case[1] not in ("doubling", "halving")]


@pytest.mark.parametrize("collective, algorithm", CASES)
@pytest.mark.parametrize(
    "count, num_bytes", [(2, 72), (2, 3 << 19), (3, 3 << 19), (5, 3 << 18), (8, 72)]
)
def test_recorded_exchanges_are_those_of_an_execution_with_real_data(
    collective, algorithm, count, num_bytes
):
    group = connected(count)
    for dtype in DTYPES if collective in ("allreduce", "reducescatter") else ["float32"]:

        def run(me, dtype=dtype):
            mesh = RecordingMesh(me, count, group[me])
            result = run_collective(collective, algorithm, mesh, count, me, num_bytes, dtype)
            return mesh.exchanges, result

        for me, (exchanges, result) in enumerate(run_on_ranks(count, run)):
            assert exchanges == record_exchanges(collective, algorithm, count, me, num_bytes, dtype)
            if collective == "allreduce":
                assert (result[0] == count).all()


@pytest.mark.parametrize("collective, algorithm", SYMMETRIC)
@pytest.mark.parametrize("count", [3, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_of_a_symmetric_algorithm_have_the_exchanges_of_rank_0(
    collective, algorithm, count, dtype
):
    first_record, *records = [
        record_exchanges(collective, algorithm, count, me, 64 * count, dtype) for me in range(count)
    ]
    assert len(first_record) > 1 and all(record == first_record for record in records)


@pytest.mark.parametrize("collective, algorithm", CASES)
@pytest.mark.parametrize("count", [6, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_proportional_sizes_are_those_of_a_complete_record(
    monkeypatch, collective, algorithm, count, dtype
):
    num_bytes = 48 << 15  # a multiple of the sizes of all parts
    complete = record_schedule(collective, algorithm, count, num_bytes, dtype)
    monkeypatch.setattr("exchange_records._MAX_COMPLETE_RANKS", 2)
    proportional = record_schedule(collective, algorithm, count, num_bytes, dtype)
    for name in ("num_steps", "destinations", "sent", "sources", "received", "is_reduced", "matches"):
        expected, values = getattr(complete, name), getattr(proportional, name)
        np.testing.assert_array_equal(np.broadcast_to(values, expected.shape), expected)
    assert proportional.copied_bytes == complete.copied_bytes


@pytest.mark.parametrize(
    "collective, algorithm, count",
    [("allreduce", "ring", 4), ("allreduce", "halving", 4), ("allreduce", "doubling", 8),
     ("reducescatter", "ring", 4), ("reducescatter", "halving", 4)],
)  # fmt: skip
def test_conversions_of_bfloat16_are_those_of_the_engine(monkeypatch, collective, algorithm, count):
    num_bytes, converted = 64 << 10, []
    expected = record_schedule(collective, algorithm, count, num_bytes, "bfloat16").copied_bytes
    for name in ("widen_into", "round_into"):
        monkeypatch.setattr(arithmetic, name, lambda values, out: converted.append(values.size))
    record_exchanges(collective, algorithm, count, 0, num_bytes, "bfloat16")
    assert sum(converted) * DTYPES["bfloat16"].itemsize == expected > 0


@pytest.mark.parametrize("count", [2, 4, 6, 16, 31])
def test_the_number_of_exchanges_is_that_of_the_algorithm(count):
    steps, folds = count.bit_length() - 1, 0 if count & (count - 1) == 0 else 2
    expected = {"ring": 2 * (count - 1), "doubling": steps + folds, "halving": 2 * steps + folds}
    for algorithm in ALGORITHMS["allreduce"]:
        schedule = record_schedule("allreduce", algorithm, count, 4 << 20)
        assert schedule.num_steps.max() == expected[algorithm]
        if algorithm != "doubling" and not folds:
            sent = schedule.sent.sum(axis=1) / (4 << 20)
            np.testing.assert_allclose(sent, 2 * (count - 1) / count, rtol=1e-3)


def test_messages_without_a_counterpart_are_refused():
    def exchange(destination, sent_bytes, source, received_bytes):
        return [Exchange(destination, sent_bytes, source, received_bytes, False)]

    with pytest.raises(ValueError, match="rank 1, exchange 0: rank 0 sends no such message"):
        build_schedule(2, [[], exchange(1, 0, 1, 8)])
    with pytest.raises(ValueError, match="rank 0 sends a message that is not received"):
        build_schedule(2, [exchange(1, 8, 1, 0), []])
    with pytest.raises(ValueError, match="rank 1, exchange 0: 4 bytes of 8"):
        build_schedule(2, [exchange(1, 4, 1, 0), exchange(1, 0, 1, 8)])
