"""Where the processes of an attempt go: how many of each kind, at which addresses, on which hosts.

    layout = Fixed(Roles(workers=2), host="127.0.0.1")      # all here
    layout = OnHosts([Host("host1", 2), Host("host2", 2)], port=2222)
    layout = Discovered("./hosts.sh", least=1, most=4, port=2222)
    layout.places()       -> Places(tasks, far={"host2:2222": "host2", ...})

Hosts are asked for anew at each attempt only by `Discovered`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ctl.distribute.cluster import Cluster
from ctl.errors import UsageError
from ctl.launch import hosts as host_lists
from ctl.launch.discovery import Found, ask
from ctl.launch.hosts import Host
from ctl.launch.ports import free_ports

LOOPBACK = "127.0.0.1"
OTHER_PORTS = 100  # so far on when a port was taken


@dataclass(frozen=True, kw_only=True)
class Roles:
    """How many processes of each kind; without a chief worker 0 is the chief."""

    workers: int
    chief: bool = False
    ps: int = 0
    evaluator: bool = False

    @property
    def count(self) -> int:
        """All of them."""
        return self.workers + self.chief + self.ps + self.evaluator


@dataclass(frozen=True)
class Places:
    """The processes of one attempt, the chief's first.

    Attributes:
      far: address in the cluster -> what ssh is given, for those on other machines.
      hosts: the host of each worker, or None where nobody named hosts.
    """

    tasks: Sequence[Cluster]
    far: Mapping[str, str] = field(default_factory=dict)
    hosts: Sequence[str] | None = None


class Layout(Protocol):
    """Where the processes of the next attempt go."""

    def places(self, *, shift: int = 0, interrupted: Callable[[], bool]) -> Places | str:
        """New places, or in words why there are not enough.

        Args:
          shift: how often a port was taken by another program; interrupted: no more waiting.
        """


def plan(roles: Roles, host: str) -> list[Cluster]:
    """The places in the cluster, one per process and the chief's first, on free ports of `host`."""
    counts = {
        "chief": int(roles.chief), "worker": roles.workers, "ps": roles.ps,
        "evaluator": int(roles.evaluator),
    }  # fmt: skip
    addresses = iter([f"{host}:{port}" for port in free_ports(roles.count, host)])
    tasks = {kind: tuple(next(addresses) for _ in range(n)) for kind, n in counts.items() if n}
    return [Cluster(tasks, kind, i) for kind, places in tasks.items() for i in range(len(places))]


class Fixed:
    """All on this machine, the same number each time."""

    def __init__(self, roles: Roles, host: str = LOOPBACK):
        self._roles = roles
        self._host = host

    def places(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Places:
        """On new free ports."""
        return Places(plan(self._roles, self._host))


class OnHosts:
    """As many workers as the hosts have slots; the first host's are the first."""

    def __init__(self, hosts: Sequence[Host], *, port: int = 2222, own_address: str | None = None):
        """Raises UsageError when other machines could not reach this one.

        Args:
          port: of a host's first worker over there, the next ones follow; here they are free ones.
          own_address: of this machine, for the others.
        """
        self._hosts = hosts
        self._port = port
        self._own_address = own_address
        alone = all(h.is_local for h in hosts)
        nameless = next((h for h in hosts if h.is_loopback and h.is_local), None)
        if nameless and not alone and not own_address:
            raise UsageError(
                f"other machines cannot reach this one as {nameless.target!r}; write the name or address "
                "that they know it by, or add --host=ADDRESS"
            )
        most = max(h.slots for h in hosts)
        if port + most + OTHER_PORTS > 65536:
            raise UsageError(
                f"--port={port} leaves no room for {most} workers and other ports; expected "
                f"{65536 - most - OTHER_PORTS} at most"
            )

    def places(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Places:
        """The same hosts; free ports here, the same ones there, or others after a clash."""
        here = [h for h in self._hosts if h.is_local]
        alone = len(here) == len(self._hosts)
        bind = (self._own_address or LOOPBACK) if alone else "0.0.0.0"
        free = iter(free_ports(sum(h.slots for h in here), bind))
        addresses, far, names = [], {}, []
        for host in self._hosts:
            for slot in range(host.slots):
                names.append(host.target)
                if host in here:
                    own = self._own_address or (LOOPBACK if alone else host.address)
                    addresses.append(f"{own}:{next(free)}")
                    continue
                port = self._port + slot + OTHER_PORTS * min(shift, 1)
                addresses.append(f"{host.address}:{port}")
                far[addresses[-1]] = host.target
        tasks = {"worker": tuple(addresses)}
        return Places([Cluster(tasks, "worker", i) for i in range(len(addresses))], far, names)


class Discovered:
    """As many workers as the hosts of the moment have slots, between `least` and `most`."""

    def __init__(
        self, script: str, *, least: int = 1, most: int | None = None, port: int = 2222,
        own_address: str | None = None,
    ):  # fmt: skip
        self._script = script
        self._least = least
        self._most = most
        self._port = port
        self._own_address = own_address

    def places(self, *, shift: int = 0, interrupted: Callable[[], bool] = bool) -> Places | str:
        """Asks the script; words when there are fewer slots than `least`."""
        found: Found = ask(self._script, interrupted=interrupted)
        if found.problem:
            return found.problem
        if found.slots < self._least:
            named = host_lists.tell(found.hosts)
            slots = f"{found.slots} slot{'s' if found.slots > 1 else ''}"
            return f"{slots} on {named}, fewer than --min_workers={self._least}"
        try:
            chosen = first_slots(found.hosts, self._most)
            on_hosts = OnHosts(chosen, port=self._port, own_address=self._own_address)
        except UsageError as e:
            return str(e)
        return on_hosts.places(shift=shift)


def first_slots(hosts: Sequence[Host], most: int | None) -> list[Host]:
    """The first hosts that have `most` slots together, the last of them in part."""
    chosen, left = [], host_lists.MOST_WORKERS if most is None else most
    for host in hosts:
        if left:
            chosen.append(Host(host.target, min(host.slots, left)))
            left -= chosen[-1].slots
    return chosen
