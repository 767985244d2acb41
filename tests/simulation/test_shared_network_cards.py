"""All-reduces of ranks that share the network cards of their machines: bytes, and simulated durations."""

import dataclasses
import functools

import numpy as np
import pytest
from ctl.collectives import trees
from ctl.collectives.machines import find_machines, select_on_machines
from ctl.collectives.transfer_costs import NetworkCosts
from exchange_records import Exchange, RecordingMesh, build_schedule, record_on_machines
from measured_costs import network_costs
from virtual_clock import Costs, simulate

ALGORITHMS = "ring", "doubling", "halving", "machines"
SIZES = [16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]  # bytes
LAYOUTS = {
    "2 machines of 8": np.repeat(range(2), 8), "4 of 4": np.repeat(range(4), 4),
    "8 of 8": np.repeat(range(8), 8), "3 of 4": np.repeat(range(3), 4),
    "1, 3 and 7 ranks": np.repeat(range(3), [1, 3, 7]), "alternating": np.arange(16) % 4,
}  # fmt: skip
MAX_RATIO = 1.5


def network(gigabits):
    """Returns the simulated costs, and the costs if one rank of each machine sends."""
    wire = {"latency_secs": 25e-6, "wire_byte_secs": 8e-9 / gigabits}
    return Costs(**network_costs(), **wire), NetworkCosts(25e-6, 8e-9 / gigabits)


@functools.cache
def schedule_of(algorithm, layout, num_bytes):
    return record_on_machines(algorithm, LAYOUTS[layout].tolist(), num_bytes, network(10)[1])


def sent_by_machine(schedule):
    """Returns the bytes that each machine sends to others."""
    machines = np.array(schedule.machine_by_rank)
    ranks = np.arange(schedule.count)[:, None]
    destinations = machines[(ranks + schedule.destinations) % schedule.count]
    sent = np.where(destinations == machines[:, None], 0, schedule.sent).sum(axis=1)
    return np.bincount(machines, sent)


def test_leaders_send_an_eighth_of_the_bytes_of_eight_ranks():
    num_bytes = 1 << 13  # the leaders use doubling
    vectors = {
        name: sent_by_machine(schedule_of(name, "8 of 8", num_bytes)) / num_bytes for name in ALGORITHMS
    }
    assert (vectors["doubling"] == 24).all() and (vectors["machines"] == 3).all()
    assert (vectors["halving"] == 14).all()
    np.testing.assert_allclose(vectors["ring"], 2 * 63 / 64)
    exchanges = {name: schedule_of(name, "8 of 8", num_bytes).num_steps.max() for name in ALGORITHMS}
    assert exchanges == {"ring": 126, "doubling": 6, "halving": 12, "machines": 9}
    large = schedule_of("machines", "8 of 8", 1 << 20)
    assert (sent_by_machine(large) == 2 * 7 / 8 * (1 << 20)).all() and large.num_steps.max() == 12


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_broadcast_enters_each_other_machine_once(algorithm):
    records = []
    for me in range(64):
        mesh = RecordingMesh(me, 64)
        trees.broadcast_bytes(mesh, range(64), me, np.zeros(1 << 10, np.uint8), 0, algorithm)
        records.append(mesh.exchanges)
    schedule = dataclasses.replace(build_schedule(64, records), machine_by_rank=tuple(LAYOUTS["8 of 8"]))
    assert sent_by_machine(schedule).sum() == 7 << 10


def test_ranks_of_a_machine_send_one_after_the_other():
    costs = Costs(latency_secs=0.5, wire_byte_secs=1.0)
    sends, receives = Exchange(2, 4.0, 2, 0.0, False), Exchange(2, 0.0, 2, 4.0, False)
    shared = build_schedule(4, [[sends], [sends], [receives], [receives]])
    assert simulate(shared, costs).finished_at.tolist() == [0, 0, 4.5, 4.5]
    by_machine = functools.partial(_with_machines, shared)
    assert simulate(by_machine(0, 0, 1, 2), costs).finished_at.tolist() == [0, 0, 4.5, 8.5]
    assert simulate(by_machine(0, 1, 2, 2), costs).finished_at.tolist() == [0, 0, 4.5, 8.5]
    assert simulate(by_machine(0, 0, 0, 0), costs).seconds == 0


def _with_machines(schedule, *machine_by_rank):
    return dataclasses.replace(schedule, machine_by_rank=machine_by_rank)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gigabits", [1, 10, 100])
def test_the_selected_algorithm_is_fast_for_any_layout(layout, gigabits):
    costs, network_of_one = network(gigabits)
    layout_machines = tuple(LAYOUTS[layout].tolist())
    machines, ratios = find_machines(layout_machines, tuple(range(len(layout_machines)))), {}
    for size in SIZES:
        secs = {name: simulate(schedule_of(name, layout, size), costs).seconds for name in ALGORITHMS}
        selected = select_on_machines(machines, size, network_of_one, is_wide=False)
        ratios[size] = round(secs[selected] / min(secs.values()), 2)
    assert max(ratios.values()) <= MAX_RATIO, ratios
