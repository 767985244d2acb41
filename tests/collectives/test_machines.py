"""All-reduce with one sending rank per machine: bits, messages, selection, processes at two addresses."""

import functools
import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from ctl.collectives import arithmetic
from ctl.collectives.machine_allreduce import allreduce_on_machines
from ctl.collectives.machines import (
    are_tree_connected,
    costs_of_one_sender,
    find_machines,
    select_on_machines,
)
from ctl.collectives.partners import are_connected_at_start
from ctl.collectives.ranks import Ranks, build_ranks
from ctl.collectives.transfer_costs import ONE_MACHINE, NetworkCosts
from ctl.collectives.transports.link import CHUNK
from hypothesis import given
from hypothesis import strategies as st
from queue_mesh import queue_meshes
from rank_threads import run_on_ranks

DTYPES = [np.float32, np.float64, np.int32, np.uint8, np.float16, ml_dtypes.bfloat16]
REDUCTIONS = {
    arithmetic.MIN: np.minimum, arithmetic.MAX: np.maximum, arithmetic.PRODUCT: np.multiply,
}  # fmt: skip
OPS = [arithmetic.SUM, arithmetic.AVERAGE, arithmetic.MIN, arithmetic.MAX, arithmetic.PRODUCT]


def reduced(machine_by_rank, arrays_by_rank, op, algorithm, ranks=None):
    """Returns the results by index, and the meshes of all ranks."""
    ranks = ranks or range(len(machine_by_rank))
    group = queue_meshes(machine_by_rank)

    def run(me):
        mesh = group[ranks[me]]
        mesh.require_links(ranks)
        return allreduce_on_machines(mesh, ranks, me, arrays_by_rank[me], op, algorithm)

    return run_on_ranks(len(ranks), run), group


def random_arrays(rank, dtype, sizes):
    random = np.random.default_rng([rank, np.dtype(dtype).num])
    if np.dtype(dtype).kind in "iu":
        return [random.integers(0, 200, size).astype(dtype) for size in sizes]
    return [(random.normal(size=size) + 0.5).astype(dtype) for size in sizes]


@pytest.mark.parametrize("num_machines", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("num_local", [1, 2, 4, 8])
def test_equal_numbers_of_consecutive_ranks_have_the_bits_of_recursive_doubling(num_machines, num_local):
    count, sizes = num_machines * num_local, [3, 150]
    group = queue_meshes(np.arange(count) // num_local)

    def run(rank):
        results = []
        for dtype, op in itertools.product(DTYPES, OPS):
            arrays = random_arrays(rank, dtype, sizes)
            by_algorithm = [
                allreduce_on_machines(group[rank], range(count), rank, arrays, op, algorithm)
                for algorithm in ("doubling", "machines")
            ]
            results.append([[total.tobytes() for total in totals] for totals in by_algorithm])
        return results

    first, *other_results = run_on_ranks(count, run)
    assert all(doubling == by_machines for doubling, by_machines in first)
    assert all(results == first for results in other_results)


LAYOUTS = st.integers(1, 12).flatmap(
    lambda count: st.lists(st.integers(0, 3), min_size=count, max_size=count)
)


@given(
    machine_by_rank=LAYOUTS,
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    sizes=st.lists(st.sampled_from([0, 1, 15, 64, 1000]), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_layout_has_the_results_of_numpy_with_equal_bits_on_all_ranks(
    machine_by_rank, dtype, op, sizes, data
):
    ranks = data.draw(st.permutations(range(len(machine_by_rank))))
    ranks = tuple(ranks[: data.draw(st.integers(1, len(ranks)))])  # a process set
    random = np.random.default_rng(len(ranks))
    low = 1 if op == arithmetic.PRODUCT else 0
    arrays = [[random.integers(low, 3, size).astype(dtype) for size in sizes] for _ in ranks]
    copies = [[a.copy() for a in rank_arrays] for rank_arrays in arrays]
    results, group = reduced(machine_by_rank, arrays, op, "machines", ranks)
    function = REDUCTIONS.get(op, np.add)
    for i, size in enumerate(sizes):
        wide = dtype if np.dtype(dtype).kind in "iu" else np.float64
        expected = functools.reduce(function, [rank_arrays[i].astype(wide) for rank_arrays in arrays])
        if op == arithmetic.AVERAGE and dtype in (np.float32, np.float64):
            expected = (expected.astype(dtype) / dtype(len(ranks))).astype(np.float64)
        assert results[0][i].shape == (size,) and results[0][i].dtype == dtype
        np.testing.assert_array_equal(results[0][i].astype(wide), expected)
        assert {totals[i].tobytes() for totals in results} == {results[0][i].tobytes()}
    np.testing.assert_equal(arrays, copies)
    machines = find_machines(tuple(machine_by_rank), ranks)
    for mesh in (group[rank] for rank in set(ranks) - set(machines.leaders)):
        assert mesh.sent_to_other_machines() == (0, 0)


@pytest.mark.parametrize("algorithm, num_vectors", [("doubling", 8), ("machines", 2)])
def test_a_machine_sends_the_vectors_of_its_leader_only(algorithm, num_vectors):
    """Four machines of four ranks: two steps of recursive doubling leave a machine."""
    arrays = [[np.ones(64, np.float32)]] * 16
    _, group = reduced(np.arange(16) // 4, arrays, arithmetic.SUM, algorithm)
    sent = [mesh.sent_to_other_machines() for mesh in group]
    for start in range(0, 16, 4):
        assert sum(size for _, size in sent[start : start + 4]) == num_vectors * 256
    has_sent = [bool(num_messages) for num_messages, _ in sent]
    assert has_sent == ([True, False, False, False] * 4 if algorithm == "machines" else [True] * 16)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("machine_by_rank", [[0, 0, 1], [0, 1, 0, 2, 2, 1, 1], [0] * 6 + [1] * 6])
def test_large_sums_of_several_chunks(dtype, machine_by_rank):
    size = 3 * CHUNK // 2 + 5
    arrays = [random_arrays(rank, dtype, [size]) for rank in range(len(machine_by_rank))]
    results, _ = reduced(machine_by_rank, arrays, arithmetic.SUM, "machines")
    assert {totals[0].tobytes() for totals in results} == {results[0][0].tobytes()}
    exact = sum(array.astype(np.float64) for (array,) in arrays)
    if dtype == np.float32:
        np.testing.assert_allclose(results[0][0], exact, atol=1e-5)
    else:  # the sum in float32 is rounded once
        assert (results[0][0] != exact.astype(np.float32).astype(dtype)).mean() < 0.001


def test_machines_are_the_equal_host_names_of_the_addresses():
    addresses = ["a:1", "b:1", "a:2", "[::1]:1", "[::1]:2", "b:2", "[::2]:1"]
    machine_by_rank = build_ranks(addresses, 0).machine_by_rank
    assert machine_by_rank == (0, 1, 0, 2, 2, 1, 3)
    machines = find_machines(machine_by_rank, tuple(range(7)))
    assert machines.groups == ((0, 2), (1, 5), (3, 4), (6,)) and machines.leaders == (0, 1, 3, 6)
    assert find_machines(machine_by_rank, (5, 4, 1)).groups == ((5, 1), (4,))
    assert Ranks().machine_by_rank == () and find_machines((), (0, 3)).groups == ((0, 3),)


def test_consecutive_ranks_need_no_further_connections_within_a_machine():
    for num_local in range(1, 12):
        assert are_tree_connected(3 * num_local, tuple(range(num_local, 2 * num_local)))
    assert not are_tree_connected(9, (0, 3, 6)) and not are_tree_connected(0, (0,))


@pytest.mark.parametrize("num_machines", [2, 4, 16])
@pytest.mark.parametrize("num_local", [2, 3, 8])
def test_leaders_need_no_further_connections_for_powers_of_two(num_machines, num_local):
    leaders = tuple(range(0, num_machines * num_local, num_local))
    connected = are_connected_at_start(num_machines * num_local, leaders, all_pairs=False)
    assert connected is (num_local != 3)


def test_senders_are_counted_for_each_step_of_an_algorithm():
    consecutive = find_machines((0, 0, 0, 0, 1, 1, 1, 1), tuple(range(8)))
    assert (consecutive.ring_senders, consecutive.ring_crossings) == (1, 2)
    assert consecutive.step_senders == (0, 0, 4) and consecutive.most_senders == 4
    alternating = find_machines((0, 1) * 4, tuple(range(8)))
    assert (alternating.ring_senders, alternating.ring_crossings) == (4, 8)
    assert alternating.step_senders == (4, 0, 0)
    folded = find_machines((0, 1, 1, 1, 1, 1), tuple(range(6)))
    assert folded.fold_senders == 1 and folded.step_senders == (0, 0)
    assert not find_machines((0, 1, 2), (0, 1, 2)).are_shared
    assert not find_machines((0, 0, 0), (0, 1, 2)).are_shared and folded.are_shared


DATA_CENTRE = NetworkCosts(latency_secs=25e-6, byte_secs=0.8e-9)  # 10 Gbit/s


def selected(machine_by_rank, num_bytes, network=DATA_CENTRE, *, is_wide=False):
    machines = find_machines(tuple(machine_by_rank), tuple(range(len(machine_by_rank))))
    return select_on_machines(machines, num_bytes, network, is_wide=is_wide)


def test_the_size_and_the_layout_select_one_rank_per_machine():
    eight_of_eight = np.repeat(range(8), 8).tolist()
    sizes = (1 << 10, 1 << 16, 1 << 20, 1 << 28)
    assert [selected(eight_of_eight, n) for n in sizes] == ["doubling", "machines", "machines", "ring"]
    irregular = np.random.default_rng(0).permutation(eight_of_eight).tolist()
    assert selected(irregular, 1 << 28) == "machines"  # most messages of a ring leave the machine
    alternating = list(range(8)) * 8  # only the small parts of halving leave the machine
    assert selected(alternating, 1 << 28) == "halving"
    assert selected(eight_of_eight, 1 << 28, is_wide=True) == "machines"
    assert "machines" not in [selected(eight_of_eight, n, ONE_MACHINE) for n in sizes]  # not measured


def test_a_measurement_of_all_ranks_counts_the_senders_that_share_a_network_card():
    measured = NetworkCosts(latency_secs=1e-3, byte_secs=8e-9)
    assert costs_of_one_sender((0, 0, 0, 0, 1, 1, 1, 1), measured) == (1e-3, 2e-9)
    assert costs_of_one_sender((0, 0, 0, 1), measured) == measured
    assert costs_of_one_sender((0, 1, 2), measured) == measured
    assert costs_of_one_sender((), measured) == measured


@pytest.mark.workers
@pytest.mark.parametrize(
    "layout", ["0,0,1,1", "0,0,0,1", pytest.param("0,1,2,0,2,1,1,0,0,2", marks=pytest.mark.slow)]
)
def test_processes_at_several_addresses_reduce_by_machine(run_program, layout):
    outcomes = {}
    for algorithm in ("doubling", "machines"):
        (result,) = run_program(1, ["tests/programs/machines.py", layout, algorithm])
        outcomes[algorithm] = result.json["ranks"]
        for outcome in outcomes[algorithm]:
            assert outcome["digests"] == outcomes[algorithm][0]["digests"]
            assert outcome["total"] == -(-len(layout.split(",")) // 2)
    machines = list(map(int, layout.split(",")))
    leaders = {machines.index(machine) for machine in machines}
    for rank, outcome in enumerate(outcomes["machines"]):
        assert [count > 0 for count in outcome["messages"][:3]] == [rank in leaders] * 3
    if layout == "0,0,1,1":
        assert outcomes["machines"][0]["digests"] == outcomes["doubling"][0]["digests"]
        assert all(all(outcome["messages"][:3]) for outcome in outcomes["doubling"])


@pytest.mark.workers
@pytest.mark.parametrize(
    ("lost", "num_exchanges"),
    [
        (1, 7),  # reduction to the leader, broadcast of five pieces
        (3, 4),  # a leader: reduction, two exchanges with the other leader, broadcast
    ],
)
def test_a_rank_that_is_lost_in_any_step_is_an_error_on_all_others(run_program, lost, num_exchanges):
    (result,) = run_program(
        1, ["tests/programs/lost_in_collective.py", "allreduce", "machines", "0,0,0,1,1", str(lost)]
    )
    *errors_by_exchange, complete = result.json["errors"]
    assert len(errors_by_exchange) == num_exchanges and complete == ["none"] * 4
    for error in itertools.chain.from_iterable(errors_by_exchange):
        assert re.search(f"rank {lost} (is gone|died)", error)
