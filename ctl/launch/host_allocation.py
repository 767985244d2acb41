"""Host allocation: number of processes per role, their hosts and their addresses.

    allocation = LocalAllocation(RoleCounts(workers=2), host="127.0.0.1")
    allocation = HostAllocation([Host("host1", 2), Host("host2", 2)], port=2222)
    allocation = DiscoveredAllocation("./hosts.sh", least=1, most=4, port=2222)
    allocation.places()       -> Places(tasks, remote={"host2:2222": "host2", ...})
    allocate_ranks([Host("host1", 2), Host("host2", 2)], 3)      # ctlrun: host1, host1, host2

Hosts receive workers in order. Each host is filled before the next. `places(shift=1)` is for a second
attempt after another program took a port.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.launch.discovery import run_discovery
from ctl.launch.hosts import LOOPBACK, Host, addresses_of, first_slots, format_hosts, reachable
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
class Places:
    """The processes of one attempt, the chief's first.

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

    def places(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Places:
        """Returns places on new free ports."""
        return Places(tasks_of(self.roles, self.host))


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
        own = own_address or (LOOPBACK if self._is_alone else None)
        self._addresses = addresses_of(hosts, own, ", or add --host=ADDRESS")
        self._bind = own if own and self._is_alone else "0.0.0.0"
        most = max(h.slots for h in hosts)
        if port + most + PORT_OFFSET > 65536:
            raise UsageError(
                f"--port={port} leaves no room for {most} workers and other ports; expected "
                f"{65536 - most - PORT_OFFSET} at most"
            )

    def places(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Places:
        """Returns places on the same hosts, with other ports after a port clash (`shift`)."""
        port = self._port + PORT_OFFSET * min(shift, 1)
        return _places_on(self._hosts, self._addresses, self._bind, port)


@dataclass(frozen=True)
class DiscoveredAllocation:
    """An allocation on the hosts that a script discovers: one worker per slot, from `least` to `most`."""

    script: str
    least: int = 1
    most: int | None = None
    port: int = 2222
    own_address: str | None = None

    def places(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Places | str:
        """Runs the script until it ends or `interrupted()`. Returns a message if slots are missing."""
        found = run_discovery(self.script, interrupted=interrupted)
        if found.problem:
            return found.problem
        if found.slots < self.least:
            slots = f"{found.slots} slot{'s' if found.slots > 1 else ''}"
            return f"{slots} on {format_hosts(found.hosts)}, fewer than --min_workers={self.least}"
        try:
            chosen = first_slots(found.hosts, self.most)
            allocation = HostAllocation(chosen, port=self.port, own_address=self.own_address)
        except UsageError as e:
            return str(e)
        return allocation.places(shift=shift)


Allocation = LocalAllocation | HostAllocation | DiscoveredAllocation


def tasks_of(roles: RoleCounts, host: str) -> list[Topology]:
    """Returns the tasks of a cluster, the chief's first, on free ports of `host`."""
    counts = {
        "chief": int(roles.chief),
        "worker": roles.workers,
        "ps": roles.ps,
        "evaluator": int(roles.evaluator),
    }
    addresses = iter([f"{host}:{port}" for port in free_ports(roles.count, host)])
    tasks = {kind: tuple(next(addresses) for _ in range(n)) for kind, n in counts.items() if n}
    return [Topology(tasks, kind, i) for kind, places in tasks.items() for i in range(len(places))]


def allocate_ranks(hosts: Sequence[Host] | None, count: int | None, nics: str | None = None) -> Places:
    """Returns places for `count` ranks of `ctlrun`, by default for every slot.

    Args:
      hosts: Hosts, or None for this machine without a limit.
      count: Number of ranks.
      nics: Network interfaces, separated by commas.
    """
    if hosts is None:
        if count is None:
            raise UsageError("-np is missing: expected the number of processes, as in -np 2")
        hosts = [Host("localhost", count)]
    slots = sum(host.slots for host in hosts)
    count = slots if count is None else count
    if count > slots:
        raise UsageError(
            f"-np {count} is more than the {slots} slot{'s' if slots > 1 else ''} of "
            f"{format_hosts(hosts)}; ask for {slots} processes at most, or name more slots"
        )
    hosts = first_slots(hosts, count)
    bind = LOOPBACK if all(h.is_local for h in hosts) else "0.0.0.0"
    return _places_on(hosts, reachable(hosts, nics), bind, random.randint(*_REMOTE_PORTS))


def _places_on(hosts: Sequence[Host], addresses: Sequence[str], bind: str, remote_port: int) -> Places:
    """Returns a worker per slot: on free ports of `bind` here, elsewhere on `remote_port` and following."""
    free = iter(free_ports(sum(h.slots for h in hosts if h.is_local), bind))
    listed, names, remote = [], [], {}
    for host, address in zip(hosts, addresses, strict=True):
        for slot in range(host.slots):
            listed.append(f"{address}:{next(free) if host.is_local else remote_port + slot}")
            names.append(host.target)
            if not host.is_local:
                remote[listed[-1]] = host.target
    cluster = {"worker": tuple(listed)}
    return Places([Topology(cluster, "worker", i) for i in range(len(listed))], remote, names)
