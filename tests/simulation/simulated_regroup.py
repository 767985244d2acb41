"""A change of the workers of an elastic job in virtual time: from a loss to the next step.

    simulated = simulate_regroup(Job(count=1000), lost=[5], costs=REGROUP_COSTS)
    simulated.seconds, simulated.launcher_cpu_secs

The launcher follows `ElasticJob._poll`, with the real `Membership`. A worker that learns of the loss leaves
its group and requests a rank. All workers then connect (`simulated_start`), choose the costs of the network
and compare the steps of their snapshots. The machine of the launcher has one core for it, as all of its
threads need Python's lock. The death of a process is noticed at the next poll, that of a connection never:
so the figures are for peers without a connection to the lost worker.
"""

import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import Any

from ctl.collectives.allreduce import select_algorithm
from ctl.collectives.transfer_costs import ONE_MACHINE
from ctl.launch.elastic import LOOP_SECS
from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import Host
from ctl.launch.membership import Group, Limits, Membership
from exchange_records import record_schedule
from simulated_start import Job, StartCosts, simulate_start
from virtual_clock import Costs, simulate
from virtual_processes import Machine, Mailbox, Process, VirtualClock, Wait

_PORT = 40000
_LINK_BYTES, _ROW_BYTES = 64, 24  # `Engine.agree_on_links`; one row of `WorkerGroup.exchange`
_Thread = Generator[Wait, Any, Any]


@dataclasses.dataclass(frozen=True)
class RegroupCosts:
    """CPU time of a change (seconds). `tests/benchmarks/regroup.py` measures that of the launcher.

    Attributes:
      poll_secs: Launcher, each poll, for each worker.
      send_secs: Launcher, a short message.
      read_secs: Launcher, a received message.
      assign_secs: Launcher, the message with a rank, without its addresses.
      address_secs: Launcher, an address in this message.
      parse_secs: Worker, an address in this message.
      leave_secs: Worker, the end of its connections and threads.
      start: The connections.
      sums: Collectives of the new group.
    """

    poll_secs: float = 0.0
    send_secs: float = 0.0
    read_secs: float = 0.0
    assign_secs: float = 0.0
    address_secs: float = 0.0
    parse_secs: float = 0.0
    leave_secs: float = 0.0
    start: StartCosts = StartCosts()
    sums: Costs = Costs()


@dataclasses.dataclass(frozen=True)
class SimulatedRegroup:
    """Result of a simulation.

    Attributes:
      placed_secs: Time from the loss until the last worker has its rank.
      connected_secs: Time until all of them are connected.
      seconds: Time until all have the common state.
      launcher_cpu_secs: CPU time of the launcher.
    """

    placed_secs: float
    connected_secs: float
    seconds: float
    launcher_cpu_secs: float


def simulate_regroup(
    job: Job, costs: RegroupCosts, *, lost: Sequence[int], seed: int = 0
) -> SimulatedRegroup:
    """Simulates the loss of workers at the same time.

    Args:
      job: Workers, machines and network.
      costs: CPU times.
      lost: Ranks of the lost workers.
      seed: Seed of the random pauses.

    Returns:
      The times since the loss.
    """
    clock = VirtualClock()
    workers = [_Worker(clock, job, costs) for _ in range(job.count)]
    launcher = _Launcher(clock, job, costs, workers)
    launcher.lose(lost)
    clock.start(launcher.run())
    for rank, worker in enumerate(workers):
        if rank not in lost:
            clock.start(worker.run(functools.partial(launcher.receive, rank)))
    clock.run(600.0)
    placed = [workers[w.number].placed_at for w in launcher.group.workers]
    remaining = dataclasses.replace(job, count=len(placed), delays=dict(enumerate(placed)))
    start_costs = dataclasses.replace(costs.start, fork_secs=0.0)
    connected_secs = max(simulate_start(remaining, start_costs, seed=seed).ready_at)
    sizes = (_LINK_BYTES, _ROW_BYTES * len(placed))
    agreed_secs = sum(_sum_secs(job, costs, len(placed), num_bytes) for num_bytes in sizes)
    return SimulatedRegroup(
        max(placed), connected_secs, connected_secs + agreed_secs, launcher.process.cpu_secs
    )


def _sum_secs(job: Job, costs: RegroupCosts, count: int, num_bytes: int) -> float:
    """Returns the time of the first all-reduce with a name, which rank 0 schedules."""
    algorithm = select_algorithm(count, num_bytes, ONE_MACHINE)
    sum_costs = dataclasses.replace(costs.sums, latency_secs=job.latency_secs)
    schedule = record_schedule("allreduce", algorithm, count, num_bytes)
    return simulate(schedule, sum_costs, is_negotiated=True).seconds


class _Worker:
    """A worker that waits for messages of the launcher."""

    def __init__(self, clock: VirtualClock, job: Job, costs: RegroupCosts):
        self._job, self._costs = job, costs
        self._clock, self.process = clock, Process(clock, Machine(clock, 1))
        self.messages = Mailbox(clock)
        self.placed_at = float("inf")

    def run(self, send: Any) -> _Thread:
        """Leaves the group at the first message, and requests a rank: `WorkerGroup.join`."""
        yield self.messages.receive(float("inf"))
        yield self.process.compute(self._costs.leave_secs)
        self._clock.call_after(self._job.latency_secs, send)
        count = yield self.messages.receive(float("inf"))
        yield self.process.compute(self._costs.parse_secs * count)
        self.placed_at = self._clock.now_secs


class _Launcher:
    """The launcher with its real `Membership`, in which all workers are members of one group."""

    def __init__(self, clock: VirtualClock, job: Job, costs: RegroupCosts, workers: Sequence[_Worker]):
        self._clock, self._job, self._costs, self._workers = clock, job, costs, workers
        self.process = Process(clock, Machine(clock, 1))
        hosts = HostHealth((1e6, 1e6), clock=lambda: clock.now_secs)
        num_machines = -(-job.count // job.ranks_per_machine)
        names = [f"10.0.{i // 256}.{i % 256}" for i in range(num_machines)]
        hosts.update([Host(name, job.ranks_per_machine) for name in names])
        limits = Limits(initial=job.count, minimum=1, maximum=job.count)
        self._membership, self._hosts = Membership(limits, hosts), hosts
        for slot in self._membership.find_free_slots():
            self._request_rank(self._membership.add_worker(slot))
        first_group = self._membership.form_group()
        assert first_group is not None and len(first_group.workers) == job.count
        self.group: Group = first_group
        for number in self._membership.workers:
            self._membership.record_sync(number)

    def lose(self, lost: Sequence[int]) -> None:
        """Records the end of workers."""
        for number in lost:
            worker = self._membership.remove_worker(number, is_success=False)
            self._hosts.record_failure(worker.slot.host)

    def _request_rank(self, number: int) -> None:
        self._membership.set_waiting(number, _PORT + number)

    def receive(self, number: int) -> None:
        """Reads a request for a rank in a thread."""
        self._clock.start(self._read(number))

    def _read(self, number: int) -> _Thread:
        yield self.process.compute(self._costs.read_secs)
        self._request_rank(number)

    def run(self) -> _Thread:
        """Reports the loss, and assigns ranks when all members have requested them."""
        costs, members = self._costs, self._membership.members
        yield self._clock.sleep(LOOP_SECS)
        for member in members:
            yield self.process.compute(costs.send_secs)
            self._send(member.number, 1)
        while (group := self._membership.form_group()) is None:
            yield self._clock.sleep(LOOP_SECS)
            yield self.process.compute(costs.poll_secs * len(members))
        self.group = group
        for worker in group.workers:
            yield self.process.compute(costs.assign_secs + costs.address_secs * len(group.workers))
            self._send(worker.number, len(group.workers))

    def _send(self, number: int, message: int) -> None:
        self._clock.call_after(self._job.latency_secs, lambda: self._workers[number].messages.put(message))
