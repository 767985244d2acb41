"""A change of up to 1,000 workers of an elastic job in virtual time."""

import dataclasses
import functools

import pytest
from measured_costs import REGROUP_COSTS, REGROUP_CPU_SECS
from simulated_regroup import RegroupCosts, simulate_regroup
from simulated_start import Job

CLUSTER = Job(1000, latency_secs=100e-6)
MAX_SECS = 2.0


@functools.cache
def simulate_loss(count):
    """Returns the times if rank 1 of `count` workers is lost."""
    return simulate_regroup(dataclasses.replace(CLUSTER, count=count), REGROUP_COSTS, lost=[1])


@pytest.mark.parametrize("job", [CLUSTER, dataclasses.replace(CLUSTER, ranks_per_machine=8, cores=8)])
@pytest.mark.parametrize("lost", [[0], pytest.param([500], marks=pytest.mark.slow), range(100, 116)])
def test_1000_workers_form_the_next_group_within_two_seconds(job, lost):
    simulated = simulate_regroup(job, REGROUP_COSTS, lost=lost)
    assert simulated.placed_secs < simulated.connected_secs < simulated.seconds < MAX_SECS


def test_the_time_of_the_launcher_grows_in_proportion_to_the_workers():
    assert simulate_loss(1000).launcher_cpu_secs < 6 * simulate_loss(250).launcher_cpu_secs


@pytest.mark.parametrize("count", REGROUP_CPU_SECS)
def test_the_simulated_launcher_takes_the_time_of_the_real_one(count):
    expected = pytest.approx(REGROUP_CPU_SECS[count], rel=0.2)
    assert simulate_loss(count).launcher_cpu_secs == expected


def test_the_time_of_two_workers_is_the_sum_of_the_costs():
    costs = RegroupCosts(
        poll_secs=1.0, send_secs=2.0, read_secs=4.0, assign_secs=8.0, address_secs=16.0, parse_secs=32.0,
        leave_secs=64.0,
    )  # fmt: skip
    simulated = simulate_regroup(Job(2, latency_secs=1.0), costs, lost=[1])
    # the message about the loss, the request, polls until it is read, the rank and its address
    assert simulated.placed_secs == pytest.approx(0.05 + 2 + 1 + 64 + 1 + 4 + 8 + 16 + 1 + 32, abs=2.2)
    num_polls = simulated.launcher_cpu_secs - (2 + 4 + 8 + 16)
    assert num_polls == pytest.approx(round(num_polls)) and num_polls > 60


def test_a_worker_that_leaves_slowly_delays_the_group_by_its_own_time():
    slow = dataclasses.replace(REGROUP_COSTS, leave_secs=REGROUP_COSTS.leave_secs + 3.0)
    delay_secs = simulate_regroup(CLUSTER, slow, lost=[1]).seconds - simulate_loss(1000).seconds
    assert delay_secs == pytest.approx(3.0, abs=0.2)
