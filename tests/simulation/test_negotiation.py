"""Negotiations in virtual time, with a connection of each rank to rank 0 and through a tree."""

import numpy as np
import pytest
from ctl.collectives.control_tree import ControlTree
from exchange_records import build_schedule, record_schedule
from negotiation import NegotiationCosts, negotiate
from virtual_clock import Costs, simulate

COSTS = NegotiationCosts(
    request_secs=0.2, coordinator_secs=2.0, combined_secs=4.0, combined_rank_secs=0.4,
    relay_secs=0.6, relay_rank_secs=0.02,
)  # fmt: skip


def test_rank_0_receives_all_requests_and_sends_its_own_response_last():
    answered_at, cpu_secs = negotiate(ControlTree(4), COSTS, np.ones(4), latency_secs=10.0)
    agreed_at = 0.1 + 10.0 + 3 * 1.0  # the request of rank 0 itself arrives earlier
    expected = [agreed_at + 4 * 1.0 + 0.1, *(agreed_at + sent + 10.0 + 0.1 for sent in (3.0, 2.0, 1.0))]
    np.testing.assert_allclose(answered_at, expected)
    np.testing.assert_allclose(cpu_secs, [0.2 + 4 * 2.0, 0.2, 0.2, 0.2])


def test_a_slow_rank_0_delays_each_response():
    answered_at, _ = negotiate(ControlTree(4), COSTS, np.array([10.0, 1, 1, 1]), latency_secs=10.0)
    assert answered_at.max() == pytest.approx(1.0 + 4 * 10.0 + 4 * 10.0 + 1.0)


def test_relays_combine_the_requests_of_their_subtrees():
    # rank 0 has the children 1 and 4, with the ranks 2 and 3, 5 and 6 below them
    answered_at, cpu_secs = negotiate(ControlTree(7, 2), COSTS, np.ones(7), latency_secs=10.0)
    combined_at = 10.1 + 2 * 0.01 + 0.3  # the relay's own request arrives earlier
    combined_secs = (4.0 + 3 * 0.4) / 2
    agreed_at = combined_at + 10.0 + 2 * combined_secs
    received_at = {4: agreed_at + combined_secs + 10.0, 1: agreed_at + 2 * combined_secs + 10.0}
    for relay, at in received_at.items():
        own, *leaves = answered_at[relay : relay + 3]
        assert own == pytest.approx(at + 0.3 + 0.01 + 0.1)
        assert leaves == pytest.approx([at + 0.3 + n * 0.01 + 10.0 + 0.1 for n in (2, 3)])
    assert answered_at[0] == pytest.approx(agreed_at + 2 * combined_secs + 1.0 + 0.1)
    relay_cpu_secs = 0.2 + 0.6 + 3 * 0.02
    rank_0_cpu_secs = 0.2 + 2.0 + 4 * combined_secs
    assert cpu_secs == pytest.approx([rank_0_cpu_secs, relay_cpu_secs, 0.2, 0.2, relay_cpu_secs, 0.2, 0.2])


def test_the_cpu_time_of_a_relay_grows_with_the_ranks_below_it():
    # rank 1 relays for itself and for the relays 2 and 5, with three ranks each
    _, cpu_secs = negotiate(ControlTree(15, 2), COSTS, np.ones(15), latency_secs=1.0)
    assert cpu_secs[[1, 2, 3]] == pytest.approx([0.2 + 0.6 + 7 * 0.02, 0.2 + 0.6 + 3 * 0.02, 0.2])


def test_a_slow_relay_delays_all_ranks():
    even, _ = negotiate(ControlTree(7, 2), COSTS, np.ones(7), latency_secs=1.0)
    factors = np.ones(7)
    factors[1] = 10.0
    slow, _ = negotiate(ControlTree(7, 2), COSTS, factors, latency_secs=1.0)
    added_secs = slow - even
    assert added_secs[4] > 0 and added_secs[1:4].min() > added_secs[4]  # its subtree waits twice
    assert added_secs[[0, 5, 6]] == pytest.approx(added_secs[4])


def test_a_simulated_collective_begins_after_its_negotiation():
    costs = Costs(request_secs=0.2, coordinator_secs=2.0, latency_secs=10.0)
    schedule = build_schedule(4, [[]] * 4)  # without exchanges
    answered_at, cpu_secs = negotiate(ControlTree(4), costs, np.ones(4), latency_secs=10.0)
    simulated = simulate(schedule, costs, is_negotiated=True)
    np.testing.assert_allclose(simulated.finished_at, answered_at)
    np.testing.assert_allclose(simulated.cpu_secs, cpu_secs)
    assert simulate(schedule, costs).seconds == 0.0  # repeated without rank 0
    slow = simulate(schedule, costs, is_negotiated=True, slowdowns={0: 10.0})
    assert slow.seconds == pytest.approx(1.0 + 4 * 10.0 + 4 * 10.0 + 1.0)


@pytest.mark.parametrize("fanout, messages", [(1024, [64, 1024]), (32, [32 + 2, 32 + 32])])
def test_a_negotiation_grows_with_the_number_of_children(fanout, messages):
    """A repetition grows with the logarithm of the ranks."""
    costs = Costs(
        exchange_secs=60e-6, latency_secs=25e-6, request_secs=40e-6, coordinator_secs=50e-6,
        combined_secs=50e-6, relay_rank_secs=50e-6,
    )  # fmt: skip
    schedules = [record_schedule("allreduce", "doubling", count, 64 << 10) for count in (64, 1024)]
    repeated_secs = [simulate(schedule, costs).seconds for schedule in schedules]
    negotiated_secs = [simulate(s, costs, is_negotiated=True, fanout=fanout).seconds for s in schedules]
    added_secs = np.subtract(negotiated_secs, repeated_secs)
    assert added_secs == pytest.approx([number * 50e-6 for number in messages], rel=0.1)
    assert repeated_secs[1] == pytest.approx(10 / 6 * repeated_secs[0])
