"""Every algorithm of all-reduce, for process sets of 1 to 9 ranks, against NumPy. The ranks are threads."""

import functools

import ml_dtypes
import numpy as np
import pytest
from ctl.collectives import arithmetic, settings
from ctl.collectives.allreduce import select_algorithm
from ctl.collectives.machine_allreduce import allreduce_on_machines
from ctl.collectives.transports.link import CHUNK
from ctl.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import PROCESS_SETS, connected, run_on_ranks

DTYPES = [np.float32, np.float64, np.int32, np.uint8, np.float16, ml_dtypes.bfloat16]
REDUCTIONS = {
    arithmetic.SUM: np.add, arithmetic.AVERAGE: np.add, arithmetic.MIN: np.minimum,
    arithmetic.MAX: np.maximum, arithmetic.PRODUCT: np.multiply,
}  # fmt: skip


def reduced(arrays_by_rank, op, algorithm, ranks=None):
    """Returns the results by index. `ranks` of a larger group: a process set."""
    ranks = ranks or range(len(arrays_by_rank))
    group = connected(1 + max(ranks))

    def run(me):
        return allreduce_on_machines(group[ranks[me]], ranks, me, arrays_by_rank[me], op, algorithm)

    return run_on_ranks(len(ranks), run)


@pytest.mark.parametrize("algorithm", settings.COLLECTIVE_ALGORITHMS)
@given(
    ranks=PROCESS_SETS,
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(sorted(REDUCTIONS)),
    sizes=st.lists(st.sampled_from([0, 1, 15, 64, 1000]), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_results_are_those_of_numpy_and_equal_bitwise(algorithm, ranks, dtype, op, sizes, seed):
    random = np.random.default_rng(seed)
    low = 1 if op == arithmetic.PRODUCT else 0
    arrays = [[random.integers(low, 3, n).astype(dtype) for n in sizes] for _ in ranks]
    copies = [[a.copy() for a in own] for own in arrays]
    results = reduced(arrays, op, algorithm, ranks)
    for i, size in enumerate(sizes):
        wide = dtype if np.dtype(dtype).kind in "iu" else np.float64  # integers overflow
        expected = functools.reduce(REDUCTIONS[op], [of_rank[i].astype(wide) for of_rank in arrays])
        if op == arithmetic.AVERAGE and dtype in (np.float32, np.float64):
            expected = (expected.astype(dtype) / dtype(len(ranks))).astype(np.float64)
        assert results[0][i].shape == (size,) and results[0][i].dtype == dtype
        np.testing.assert_array_equal(results[0][i].astype(wide), expected)
        assert {r[i].tobytes() for r in results} == {results[0][i].tobytes()}
    np.testing.assert_equal(arrays, copies)


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "halving"])
@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_large_sums_are_bitwise_equal_and_rounded_once(algorithm, count, dtype):
    size = 3 * CHUNK // 2 + 5
    arrays = [[np.random.default_rng(rank).normal(size=size).astype(dtype)] for rank in range(count)]
    results = reduced(arrays, arithmetic.SUM, algorithm)
    assert {r[0].tobytes() for r in results} == {results[0][0].tobytes()}
    exact = sum(array.astype(np.float64) for (array,) in arrays)
    if dtype == np.float32:
        np.testing.assert_allclose(results[0][0], exact, atol=1e-5)
    else:  # the sum in float32 is rounded once
        is_inexact = results[0][0] != exact.astype(np.float32).astype(dtype)
        assert is_inexact.mean() < 0.001


@pytest.mark.parametrize("op", [arithmetic.SUM, arithmetic.MIN, arithmetic.MAX])
@pytest.mark.parametrize("algorithm", ["doubling", "halving"])
@pytest.mark.parametrize("count", [4, 5])
def test_nan_and_signed_zero_have_equal_bits_on_all_ranks(op, algorithm, count):
    arrays = [[np.full(200, -0.0 if rank % 2 else 0.0, np.float32)] for rank in range(count)]
    for rank, (array,) in enumerate(arrays):
        array.view(np.uint32)[:7] = 0x7FC00001 + rank
    results = reduced(arrays, op, algorithm)
    assert {r[0].tobytes() for r in results} == {results[0][0].tobytes()}
    assert np.isnan(results[0][0][:7]).all() and (results[0][0][7:] == 0).all()


@pytest.mark.parametrize("algorithm", ["ring", "doubling", "halving"])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_sum_of_negative_zeros_is_negative_zero(algorithm, dtype):
    results = reduced([[np.full(200, -0.0, dtype)]] * 3, arithmetic.SUM, algorithm)
    assert all(np.signbit(total.astype(np.float32)).all() for (total,) in results)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_16_bit_floats_of_each_bit_pattern_are_widened(dtype):
    halves = np.tile(np.arange(2**16, dtype=np.uint16), 2)[7:].view(dtype)  # more than one block
    wide = np.empty(halves.size, np.float32)
    arithmetic.widen_into(halves, wide)
    np.testing.assert_array_equal(wide, halves.astype(np.float32))


def test_the_size_and_the_number_of_ranks_select_the_algorithm():
    assert [select_algorithm(16, n) for n in (1 << 14, 1 << 20, 1 << 26)] == ["doubling", "halving", "ring"]
    assert [select_algorithm(6, n) for n in (1 << 14, 1 << 24)] == ["doubling", "ring"]
    assert {select_algorithm(2, n) for n in (1, 1 << 28)} == {"ring"}


def test_16_bit_sums_select_the_ring_earlier_because_only_a_ring_sends_16_bits():
    """For each algorithm, the smallest size (bytes) for which it is selected."""

    def first_sizes(count, is_wide):
        sizes = [1 << i for i in range(10, 27)]
        algorithms = [select_algorithm(count, size, is_wide=is_wide) for size in sizes]
        return {name: sizes[algorithms.index(name)] for name in dict.fromkeys(algorithms)}

    assert first_sizes(16, is_wide=False) == {"doubling": 1 << 10, "halving": 1 << 18, "ring": 1 << 23}
    assert first_sizes(16, is_wide=True) == {"doubling": 1 << 10, "halving": 1 << 17, "ring": 1 << 22}
    assert first_sizes(6, is_wide=False) == {"doubling": 1 << 10, "halving": 1 << 17, "ring": 1 << 19}
    assert first_sizes(6, is_wide=True) == {"doubling": 1 << 10, "halving": 1 << 16, "ring": 1 << 18}


def test_an_unknown_algorithm_is_refused():
    message = "CTL_COLLECTIVE_ALGORITHM is 'tree'; expected one of auto, ring, doubling, halving, machines"
    with pytest.raises(UsageError, match=message):
        settings.read_settings({"CTL_COLLECTIVE_ALGORITHM": "tree"})
    assert settings.read_settings({"CTL_COLLECTIVE_ALGORITHM": "halving"}).algorithm == "halving"
