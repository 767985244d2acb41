"""Costs of the network: their measurement, the agreement on them, and the algorithms that they select."""

import time

import numpy as np
import pytest
from ctl.collectives import trees
from ctl.collectives.allreduce import select_algorithm
from ctl.collectives.network_measurement import measure_network
from ctl.collectives.ranks import build_ranks
from ctl.collectives.transfer_costs import ONE_MACHINE, NetworkCosts
from exchange_records import RecordingMesh
from rank_threads import connected, run_on_ranks

WAN = NetworkCosts(latency_secs=5e-3, byte_secs=1e-9)


class SlowMesh:
    """Mesh with a longer duration of each exchange, depending on the distance of the destination."""

    def __init__(self, mesh, rank, count, costs_by_distance):
        self._mesh, self._rank, self._count, self._costs = mesh, rank, count, costs_by_distance

    def exchange(self, destination, arrays, source, size, target=None):
        costs = self._costs.get((destination - self._rank) % self._count, ONE_MACHINE)
        time.sleep(costs.latency_secs + size * costs.byte_secs)
        self._mesh.exchange(destination, arrays, source, size, target)


def ranks_on(hosts, rank):
    return build_ranks([f"{host}:1" for host in hosts], rank)


@pytest.mark.parametrize("slow_distance", [1, 2, 4])
def test_each_rank_measures_its_slowest_connection(slow_distance):
    costs = NetworkCosts(latency_secs=0.4, byte_secs=4e-7)  # 0.1 s for 256 KB
    count = 5
    group = connected(count)

    def measure(rank):
        mesh = SlowMesh(group[rank], rank, count, {slow_distance: costs})
        return measure_network(mesh, ranks_on(["a", "a", "b", "b", "c"], rank))

    for measured in run_on_ranks(count, measure):
        assert 0.39 < measured.latency_secs < 2.0
        assert 3e-7 < measured.byte_secs < 1.2e-6


def test_ranks_on_one_machine_have_constants_and_exchange_nothing():
    mesh = RecordingMesh(0, 3)
    assert measure_network(mesh, ranks_on(["a", "a", "a"], 0)) == ONE_MACHINE
    assert mesh.exchanges == []


def test_small_differences_between_measurements_vanish():
    for costs in (NetworkCosts(1.1e-3, 0.9e-8), NetworkCosts(0.9e-3, 0.8e-8)):
        assert costs.rounded() == (2**-10, 2**-27)
    assert ONE_MACHINE.rounded() == ONE_MACHINE
    assert NetworkCosts(-1e-9, 1e-12).rounded() == (0, 2**-40)


def test_messages_have_the_costs_unless_all_ranks_are_on_one_machine():
    assert ONE_MACHINE.header() == {} and NetworkCosts.of_header({}) == ONE_MACHINE
    assert NetworkCosts.of_header(WAN.header()) == WAN


def test_latency_selects_fewer_exchanges_and_slow_bytes_select_fewer_bytes():
    assert select_algorithm(100, 16 << 20) == "ring"
    assert select_algorithm(100, 16 << 20, NetworkCosts(latency_secs=1e-3)) == "halving"
    assert select_algorithm(16, 1 << 20, NetworkCosts(latency_secs=0.1)) == "doubling"
    assert select_algorithm(16, 64 << 10) == "doubling"
    assert select_algorithm(16, 64 << 10, NetworkCosts(byte_secs=8e-9)) == "halving"


@pytest.mark.parametrize(
    ("collective", "num_bytes", "exchanges"),
    [("broadcast", 16 << 20, (17, 2)), ("allgather", 1 << 20, (7, 3)), ("alltoall", 8 << 20, (7, 3))],
)
def test_latency_selects_the_tree_of_other_collectives(collective, num_bytes, exchanges):
    counts = []
    for network in (ONE_MACHINE, NetworkCosts(latency_secs=0.05)):
        mesh = RecordingMesh(2, 8)
        run_tree(collective, mesh, num_bytes, network)
        counts.append(len([e for e in mesh.exchanges if e.sent_bytes or e.received_bytes]))
    assert tuple(counts) == exchanges


def run_tree(collective, mesh, num_bytes, network):
    array, ranks = np.zeros(num_bytes, np.uint8), range(8)
    if collective == "broadcast":
        trees.broadcast_bytes(mesh, ranks, 2, array, 0, network=network)
    elif collective == "allgather":
        trees.allgather_bytes(mesh, ranks, 2, array, [num_bytes] * 8, network=network)
    else:
        trees.alltoall_bytes(mesh, ranks, 2, array, [[num_bytes // 8] * 8] * 8, network=network)


@pytest.mark.workers
def test_all_ranks_use_the_costs_of_rank_0_and_later_those_of_a_checkpoint(run_program):
    """Three ranks on two loopback addresses, which count as two machines."""
    (result,) = run_program(1, ["tests/programs/network_costs.py"])
    outcomes = result.json["ranks"]
    measured, recorded = ([outcome[key] for outcome in outcomes] for key in ("measured", "recorded"))
    assert len({tuple(costs) for costs in measured}) == 1 and sum(measured[0]) > 0
    assert recorded == [[0.25, 0.0]] * 3
    for outcome in outcomes:
        assert outcome["correct"]
    # a ring reduces 4 MB in 4 exchanges; with a latency of 0.25 s the ranks fold, exchange once, and unfold
    assert [outcome["exchanges"]["recorded"] for outcome in outcomes] == [2, 3, 1]
    assert [outcome["exchanges"]["one_machine"] for outcome in outcomes] == [4, 4, 4]
    # repeated all-reduces keep the algorithm of their agreement
    assert [outcome["exchanges"]["repeated"] for outcome in outcomes] == [2, 3, 1]
    assert all(outcome["repeats"] for outcome in outcomes)
