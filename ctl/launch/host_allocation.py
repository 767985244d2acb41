"""Host allocation: number of processes per role, their hosts and their addresses.

    allocation = LocalAllocation(RoleCounts(workers=2), host="127.0.0.1")
    allocation = HostAllocation([Host("host1", 2), Host("host2", 2)], port=2222)
    allocation = DiscoveredAllocation("./hosts.sh", min_workers=1, max_workers=4, port=2222)
    allocation.place_processes()       -> Placement(tasks, remote={"host2:2222": "host2", ...})
    allocate_ranks([Host("host1", 2), Host("host2", 2)], 3)      # ctlrun: host1, host1, host2

Hosts receive workers in order. Each host is filled before the next. `shift=1` is for a second
attempt after another program took a port.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.launch.discovery import run_discovery
from ctl.launch.hosts import LOOPBACK, Host, format_hosts, peer_addresses, resolve_addresses, select_slots
from ctl.launch.ports import free_ports

PORT_OFFSET = 100  # for the second attempt, after another program took a port
_REMOTE_PORTS = (20000, 30000)  # of ctlrun, below the ephemeral ports of kernels


@dataclass(frozen=True, kw_only=True)
class RoleCounts:
    """Number of processes per role. Without a chief, worker 0 is the chief."""

    workers: int
    chief: bool = False
    ps: int = 0
    evaluator: bool = False

    @property
    def count(self) -> int:
        """The total number of processes."""
        return self.workers + self.chief + self.ps + self.evaluator


@dataclass(frozen=True)
class Placement:
    """Placement of the processes of one attempt on hosts. The chief is first.

    Attributes:
      tasks: Tasks of the processes.
      remote: Address in the cluster -> target of ssh, for processes on other machines.
      hosts: Target of the host of each worker, or None if no hosts were given.
    """

    tasks: Sequence[Topology]
    remote: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[str] | None = None

    def remote_host(self, task: Topology) -> str | None:
        """Returns the target of ssh for a process, or None for this machine."""
        return self.remote.get(task.address or "")


@dataclass(frozen=True)
class LocalAllocation:
    """An allocation of all processes on this machine, with the same number in each attempt."""

    roles: RoleCounts
    host: str = LOOPBACK

    def place_processes(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Placement:
        """Returns a placement on new free ports. The arguments have no effect."""
        return Placement(build_tasks(self.roles, self.host))


class HostAllocation:
    """An allocation of one worker per slot of the hosts. Worker 0 is on the first host."""

    def __init__(self, hosts: Sequence[Host], *, port: int = 2222, own_address: str | None = None):
        """Determines the addresses. Raises UsageError if other machines cannot connect to this one.

        Args:
          hosts: Hosts with their slots.
          port: Port of the first worker of another machine; later workers use the following ports. This
            machine uses free ports.
          own_address: Address of this machine for other machines.
        """
        self._hosts = hosts
        self._port = port
        self._is_alone = all(h.is_local for h in hosts)
        known_address = own_address or (LOOPBACK if self._is_alone else None)
        self._addresses = peer_addresses(hosts, known_address, ", or add --host=ADDRESS")
        self._bind = known_address if known_address and self._is_alone else "0.0.0.0"
        max_slots = max(h.slots for h in hosts)
        if port + max_slots + PORT_OFFSET > 65536:
            raise UsageError(
                f"--port={port} is too high for {max_slots} workers per host; expected at most "
                f"{65536 - max_slots - PORT_OFFSET}"
            )

    def place_processes(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Placement:
        """Returns a placement on the same hosts, with other ports after a port clash (`shift`)."""
        port = self._port + PORT_OFFSET * min(shift, 1)
        return _place_on_hosts(self._hosts, self._addresses, self._bind, port)


@dataclass(frozen=True)
class DiscoveredAllocation:
    """An allocation on the hosts that a script discovers: one worker per slot, within limits."""

    script: str
    min_workers: int = 1
    max_workers: int | None = None
    port: int = 2222
    own_address: str | None = None

    def place_processes(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Placement | str:
        """Runs the script until it ends or `interrupted()`. Returns a message if slots are missing."""
        discovery = run_discovery(self.script, interrupted=interrupted)
        if discovery.problem:
            return discovery.problem
        if discovery.slots < self.min_workers:
            slots = f"{discovery.slots} slot{'s' if discovery.slots > 1 else ''}"
            return (
                f"{slots} on {format_hosts(discovery.hosts)}, fewer than --min_workers={self.min_workers}"
            )
        try:
            chosen = select_slots(discovery.hosts, self.max_workers)
            allocation = HostAllocation(chosen, port=self.port, own_address=self.own_address)
        except UsageError as e:
            return str(e)
        return allocation.place_processes(shift=shift)


Allocation = LocalAllocation | HostAllocation | DiscoveredAllocation


def build_tasks(roles: RoleCounts, host: str) -> list[Topology]:
    """Returns the tasks of a cluster, the chief's first, on free ports of `host`."""
    counts = {
        "chief": int(roles.chief),
        "worker": roles.workers,
        "ps": roles.ps,
        "evaluator": int(roles.evaluator),
    }
    addresses = iter([f"{host}:{port}" for port in free_ports(roles.count, host)])
    tasks = {
        task_type: tuple(next(addresses) for _ in range(count))
        for task_type, count in counts.items()
        if count
    }
    return [Topology(tasks, task_type, i) for task_type in tasks for i in range(counts[task_type])]


def allocate_ranks(hosts: Sequence[Host] | None, count: int | None, nics: str | None = None) -> Placement:
    """Returns the placement of `count` ranks of `ctlrun`, by default one per slot.

    Args:
      hosts: Hosts, or None for this machine without a limit.
      count: Number of ranks.
      nics: Network interfaces, separated by commas.
    """
    if hosts is None:
        if count is None:
            raise UsageError("-np is missing; expected the number of processes, such as -np 2")
        hosts = [Host("localhost", count)]
    slots = sum(host.slots for host in hosts)
    count = slots if count is None else count
    if count > slots:
        raise UsageError(
            f"-np {count} is greater than the {slots} slot{'s' if slots > 1 else ''} of "
            f"{format_hosts(hosts)}; specify -np {slots} or less, or hosts with more slots"
        )
    hosts = select_slots(hosts, count)
    bind_address = LOOPBACK if all(h.is_local for h in hosts) else "0.0.0.0"
    return _place_on_hosts(
        hosts, resolve_addresses(hosts, nics), bind_address, random.randint(*_REMOTE_PORTS)
    )


def _place_on_hosts(
    hosts: Sequence[Host], addresses: Sequence[str], bind_address: str, remote_port: int
) -> Placement:
    """Returns a placement of one worker per slot.

    Workers of this machine use free ports of `bind_address`, others `remote_port` and the following ports.
    """
    ports = iter(free_ports(sum(h.slots for h in hosts if h.is_local), bind_address))
    worker_addresses, targets, remote = [], [], {}
    for host, address in zip(hosts, addresses, strict=True):
        for slot in range(host.slots):
            worker_addresses.append(f"{address}:{next(ports) if host.is_local else remote_port + slot}")
            targets.append(host.target)
            if not host.is_local:
                remote[worker_addresses[-1]] = host.target
    cluster = {"worker": tuple(worker_addresses)}
    return Placement(
        [Topology(cluster, "worker", i) for i in range(len(worker_addresses))], remote, targets
    )
