"""The algorithms that ctl selects for all-reduces, compared with the fastest simulated ones."""

import functools

import pytest
from ctl.collectives.allreduce import select_algorithm
from ctl.collectives.reduce_scatter import select_reduce_scatter
from ctl.collectives.transfer_costs import ONE_MACHINE, NetworkCosts
from exchange_records import ALGORITHMS, record_schedule
from measured_costs import MEMORY_COSTS, network_costs
from virtual_clock import Costs, simulate

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]  # bytes
MAX_RATIO = 1.3


def network(gigabits, latency_secs=25e-6, dtype="float32"):
    """Returns the costs of machines in one data centre."""
    wire = {"latency_secs": latency_secs, "wire_byte_secs": 8e-9 / gigabits}
    return Costs(**network_costs(dtype), **wire)


@functools.cache
def seconds(algorithm, count, num_bytes, costs, collective="allreduce", dtype="float32"):
    return simulate(record_schedule(collective, algorithm, count, num_bytes, dtype), costs).seconds


def slower_choices(count, costs, network_costs=ONE_MACHINE, dtype="float32"):
    """Returns the ratios to the fastest algorithm that are larger than `MAX_RATIO`, by size."""
    ratios = {}
    for size in SIZES:
        selected = select_algorithm(count, size, network_costs, is_wide=dtype == "bfloat16")
        by_algorithm = {
            name: seconds(name, count, size, costs, dtype=dtype) for name in ALGORITHMS["allreduce"]
        }
        ratios[size] = by_algorithm[selected] / min(by_algorithm.values())
    return {size: round(ratio, 2) for size, ratio in ratios.items() if ratio > MAX_RATIO}


@pytest.mark.parametrize("count", [3, 4, 6, 8, 16, 32])
def test_the_selected_algorithm_is_fast_on_one_machine(count):
    assert not slower_choices(count, Costs(**MEMORY_COSTS))


@pytest.mark.parametrize("count", [4, 6, 16, 48, 256])
@pytest.mark.parametrize("gigabits", [10, 100])
def test_the_selected_algorithm_is_fast_in_a_data_centre(count, gigabits):
    assert not slower_choices(count, network(gigabits))


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, 1000, 1024])
@pytest.mark.parametrize("gigabits", [10, 100])
def test_the_selected_algorithm_is_fast_for_a_thousand_ranks(count, gigabits):
    assert not slower_choices(count, network(gigabits))


@pytest.mark.parametrize("count", [3, 6, 16, 48])
@pytest.mark.parametrize(("gigabits", "latency_secs"), [(1, 25e-6), (10, 1e-3), (1, 1e-3), (0.1, 1e-2)])
def test_the_costs_of_a_slow_network_select_a_fast_algorithm(count, gigabits, latency_secs):
    costs = NetworkCosts(latency_secs, 8e-9 / gigabits).rounded()
    assert not slower_choices(count, network(gigabits, latency_secs), costs)


@pytest.mark.parametrize("count", [3, 16, 48])
@pytest.mark.parametrize("gigabits", [1, 10])
def test_the_selected_algorithm_is_fast_for_bfloat16(count, gigabits):
    costs = NetworkCosts(25e-6, 8e-9 / gigabits).rounded()
    assert not slower_choices(count, network(gigabits, dtype="bfloat16"), costs, "bfloat16")


@pytest.mark.parametrize("count", [3, 6, 16, 48])
@pytest.mark.parametrize("gigabits", [1, 10])
def test_the_selected_reduce_scatter_is_fast(count, gigabits):
    costs = NetworkCosts(25e-6, 8e-9 / gigabits).rounded()
    for size in SIZES:
        by_algorithm = {
            name: seconds(name, count, size, network(gigabits), "reducescatter")
            for name in ALGORITHMS["reducescatter"]
        }
        selected = select_reduce_scatter(count, size, costs)
        assert by_algorithm[selected] <= MAX_RATIO * min(by_algorithm.values())


def test_the_costs_of_one_machine_select_slower_ones():
    assert 64 << 10 in slower_choices(16, network(1))
    assert 256 << 10 in slower_choices(16, network(10, latency_secs=1e-3))
