"""Reduce-scatter by every algorithm, for process sets of 1 to 9 ranks, against NumPy. Ranks are threads."""

import functools

import ml_dtypes
import numpy as np
import pytest
from ctl.collectives import arithmetic, settings
from ctl.collectives.reduce_scatter import reduce_scatter
from ctl.collectives.transfer_costs import NetworkCosts
from ctl.collectives.transports.link import CHUNK
from exchange_records import RecordingMesh
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import PROCESS_SETS, connected, run_on_ranks

DTYPES = [np.float32, np.float64, np.int32, np.uint8, np.float16, ml_dtypes.bfloat16]
REDUCTIONS = {
    arithmetic.SUM: np.add, arithmetic.AVERAGE: np.add, arithmetic.MIN: np.minimum,
    arithmetic.MAX: np.maximum, arithmetic.PRODUCT: np.multiply,
}  # fmt: skip
ALGORITHMS = pytest.mark.parametrize("algorithm", settings.COLLECTIVE_ALGORITHMS)


def scattered(arrays, sizes, op, algorithm, ranks=None):
    """Returns the parts by index. `ranks` of a larger group: a process set."""
    ranks = ranks or range(len(arrays))
    group = connected(1 + max(ranks))

    def run(me):
        return reduce_scatter(group[ranks[me]], ranks, me, arrays[me], sizes, op, algorithm)

    return run_on_ranks(len(ranks), run)


@ALGORITHMS
@given(
    ranks=PROCESS_SETS,
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(sorted(REDUCTIONS)),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_each_rank_has_its_part_of_the_reduced_array(algorithm, ranks, dtype, op, seed, data):
    sizes = [data.draw(st.sampled_from([0, 1, 15, 64, 1000])) for _ in ranks]
    random = np.random.default_rng(seed)
    low = 1 if op == arithmetic.PRODUCT else 0
    arrays = [random.integers(low, 3, sum(sizes)).astype(dtype) for _ in sizes]
    copies = [array.copy() for array in arrays]
    parts = scattered(arrays, sizes, op, algorithm, ranks)
    assert [part.size for part in parts] == sizes and {part.dtype for part in parts} == {np.dtype(dtype)}
    wide = dtype if np.dtype(dtype).kind in "iu" else np.float64  # integers overflow
    expected = functools.reduce(REDUCTIONS[op], [array.astype(wide) for array in arrays])
    np.testing.assert_array_equal(np.concatenate(parts).astype(wide), expected)
    np.testing.assert_equal(arrays, copies)


@pytest.mark.parametrize("count", [3, 4, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_large_sums_of_16_bit_floats_are_rounded_once(count, dtype):
    sizes = [CHUNK // 2 + 5] * count
    arrays = [np.random.default_rng(rank).normal(size=sum(sizes)).astype(dtype) for rank in range(count)]
    total = np.concatenate(scattered(arrays, sizes, arithmetic.SUM, "halving"))
    exact = sum(array.astype(np.float64) for array in arrays)
    if dtype == np.float32:
        np.testing.assert_allclose(total, exact, atol=1e-5)
    else:
        assert (total != exact.astype(np.float32).astype(dtype)).mean() < 0.001


@pytest.mark.parametrize(
    ("count", "num_bytes", "dtype", "latency_secs", "num_exchanges"),
    [
        (8, 1 << 20, np.float32, 0, 3), (8, 1 << 24, np.float32, 0, 7),
        (8, 1 << 20, ml_dtypes.bfloat16, 0, 7),
        (8, 1 << 24, np.float32, 0.01, 3), (5, 1 << 18, np.float32, 0, 4), (7, 1 << 16, np.float32, 0, 4),
        (2, 1 << 20, np.float32, 0, 1),
    ],
)  # fmt: skip
def test_size_dtype_and_latency_select_the_algorithm(count, num_bytes, dtype, latency_secs, num_exchanges):
    array, mesh = np.zeros(num_bytes // np.dtype(dtype).itemsize, dtype), RecordingMesh(1, count)
    sizes = arithmetic.split_rows(array.size, count)
    network = NetworkCosts(latency_secs)
    reduce_scatter(mesh, range(count), 1, array, sizes, arithmetic.SUM, network=network)
    assert len(mesh.exchanges) == num_exchanges
