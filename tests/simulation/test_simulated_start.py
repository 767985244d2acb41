"""Start of up to 1,024 ranks in virtual time: duration, limits of handshakes, late and slow ranks."""

import dataclasses
import math
import random
import time

import pytest
import simulated_start
from conftest import TIMEOUT_SECS, free_ports, some_of
from ctl.collectives import bootstrap
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings
from ctl.io.authenticated_channel import MAX_PENDING_CALLERS
from measured_costs import START_COSTS, START_SECS
from rank_threads import run_on_ranks
from simulated_start import Job, StartCosts, simulate_start

MAX_SECS = 5.0
CLUSTER = Job(1024, ranks_per_machine=8, cores=8, latency_secs=100e-6)
SEPARATE = dataclasses.replace(CLUSTER, ranks_per_machine=1, cores=1)
SMALL = dataclasses.replace(CLUSTER, count=256)
STAR = dataclasses.replace(SMALL, fanout=SMALL.count)  # all ranks call rank 0
MAX_CALLS_PER_SEC = 2000  # of rank 0 while it does not listen
MIN_QUEUE = 128  # of a listening socket in older kernels


@pytest.mark.parametrize(("count", "fanout"), [(2, 32), (5, 32), (9, 2), (12, 3)])
def test_simulated_ranks_have_the_connections_of_real_ranks(count, fanout):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
    settings = Settings(secret=b"secret", start_timeout=TIMEOUT_SECS, fanout=fanout)

    def connect(rank):
        connections = bootstrap.connect_ranks(build_ranks(addresses, rank), settings)
        connections.close()
        return {("peer", peer) for peer in connections.peers if peer > rank} | {
            ("control", caller) for caller in connections.accepted if caller
        }

    simulated = simulate_start(dataclasses.replace(CLUSTER, count=count, fanout=fanout), START_COSTS)
    assert simulated.accepted == run_on_ranks(count, connect)


def test_the_time_of_two_ranks_is_the_sum_of_the_costs():
    costs = StartCosts(
        fork_secs=1.0, rank_secs=10.0, call_secs=0.5, refused_secs=0.2, accept_secs=0.04, proof_secs=0.06,
        link_secs=0.008,
    )  # fmt: skip
    job = Job(2, ranks_per_machine=2, cores=2, latency_secs=1e-5)
    simulated = simulate_start(job, costs)
    # rank 1 starts after two forks, and calls rank 0 twice: call, nonce, proof, verdict
    connected_at = 2 + 10 + 2 * (0.5 + 0.1 + 4e-5)
    assert simulated.connected_at == pytest.approx([connected_at - 1e-5, connected_at])
    assert simulated.cpu_secs == pytest.approx([10 + 2 * 0.1 + 0.008, 10 + 2 * 0.5 + 0.008])
    assert simulated.num_calls == [0, 2] and simulated.max_handshakes == [1, 0]


@pytest.mark.parametrize("count", START_SECS)
def test_the_simulated_time_is_that_of_processes_of_the_test_machine(count):
    job = Job(count, ranks_per_machine=count, cores=2, is_listening_early=True)
    assert max(simulate_start(job, START_COSTS).ready_at) == pytest.approx(START_SECS[count], rel=0.15)


@pytest.mark.parametrize("fanout", some_of([32, 1024], 32))
@pytest.mark.parametrize("job", [SEPARATE, CLUSTER])
def test_1024_ranks_are_connected_within_the_time_limit(job, fanout):
    job = dataclasses.replace(job, fanout=fanout)
    costs = StartCosts(**{name: 3 * secs for name, secs in dataclasses.asdict(START_COSTS).items()})
    simulated = simulate_start(job, costs)
    assert simulated.seconds < MAX_SECS
    assert max(simulated.max_handshakes) <= MAX_PENDING_CALLERS
    assert max(simulated.max_queued) < MIN_QUEUE
    assert sum(simulated.num_disconnected) == 0


@pytest.mark.parametrize("slow_rank", [0, 77])
def test_a_slow_rank_delays_the_others_by_its_own_work_only(slow_rank):
    simulated = simulate_start(dataclasses.replace(CLUSTER, slowdowns={slow_rank: 10.0}), START_COSTS)
    assert simulated.seconds < MAX_SECS
    assert max(simulated.max_handshakes) <= MAX_PENDING_CALLERS
    assert sum(simulated.num_disconnected) == 0


def test_ranks_that_start_at_different_times_are_connected_shortly_after_the_last_one():
    source = random.Random(1)
    delays = {rank: source.uniform(0, 3) for rank in range(SMALL.count)}
    simulated = simulate_start(dataclasses.replace(SMALL, delays=delays), START_COSTS)
    assert simulated.seconds - max(delays.values()) < 0.5


def test_calls_of_a_rank_0_that_starts_late_are_limited_and_soon_accepted():
    delay_secs = 10.0
    simulated = simulate_start(dataclasses.replace(STAR, delays={0: delay_secs}), START_COSTS)
    num_repeated = sum(simulated.num_calls) - sum(map(len, simulated.accepted))
    assert 0 < num_repeated < 1.6 * MAX_CALLS_PER_SEC * delay_secs
    assert simulated.seconds - delay_secs < 0.5


@pytest.mark.parametrize("count", some_of([256, 1024], 256))
def test_ranks_that_call_at_the_same_moment_fill_the_queue_of_an_older_kernel(count, monkeypatch):
    """The kernel repeats the calls that are not queued, after a second or more."""
    job = dataclasses.replace(SEPARATE, count=count, max_queued=MIN_QUEUE, fanout=count)
    assert simulate_start(job, START_COSTS).seconds < 1.0
    monkeypatch.setattr(simulated_start, "max_delay_secs", lambda count: 0.0)
    simulated = simulate_start(job, START_COSTS)
    assert max(simulated.max_queued) == MIN_QUEUE and simulated.seconds > 1.0


def test_a_rank_that_does_not_start_stops_its_partners_and_their_later_calls():
    job = dataclasses.replace(CLUSTER, count=16, delays={5: 1000.0})
    simulated = simulate_start(job, START_COSTS, timeout_secs=5.0)
    partners = simulated_start.partners_of(16)
    unconnected = {rank for rank, secs in enumerate(simulated.connected_at) if math.isinf(secs)}
    blocked_callers = {rank for rank in partners[5] if rank > 5}  # they call rank 5 first
    uncalled = {peer for rank in blocked_callers for peer in partners[rank] if 5 < peer < rank}
    assert unconnected == {0, 5, *partners[5], *uncalled}


def test_further_callers_wait_while_the_handshakes_are_limited(monkeypatch):
    """The machine of the callers is slow, so their proofs arrive late."""
    monkeypatch.setattr(simulated_start, "max_delay_secs", lambda count: 0.0)
    slow_callers = dict.fromkeys(range(1, SMALL.count), 100.0)
    job = dataclasses.replace(STAR, slowdowns=slow_callers, is_listening_early=True)
    monkeypatch.setattr(simulated_start, "MAX_PENDING_CALLERS", 20)
    limited = simulate_start(job, START_COSTS)
    monkeypatch.setattr(simulated_start, "MAX_PENDING_CALLERS", 1 << 20)
    unlimited = simulate_start(job, START_COSTS)
    assert max(limited.max_handshakes) == 20 < max(unlimited.max_handshakes)
    assert math.isfinite(limited.seconds) and sum(limited.num_disconnected) == 0


def test_a_simulation_depends_on_its_seed_only():
    job = dataclasses.replace(CLUSTER, count=64, delays={0: 1.0})
    first, equal, other = (simulate_start(job, START_COSTS, seed=seed) for seed in (1, 1, 2))
    assert first == equal != other


@pytest.mark.slow
def test_4096_ranks_take_less_than_a_minute_of_cpu_time():
    start_secs = time.process_time()
    simulated = simulate_start(dataclasses.replace(CLUSTER, count=4096), START_COSTS)
    assert math.isfinite(simulated.seconds) and time.process_time() - start_secs < 60
