"""Which rank runs where: the hosts that were asked for, in their order, each filled before the next.

seats(hosts.read("host1:2,host2:2"), 3)      -> ranks 0 and 1 on host1, rank 2 on host2
"""

import contextlib
import fcntl
import random
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ctl.collectives import placement
from ctl.collectives.placement import Placement
from ctl.distribute.cluster import Cluster
from ctl.errors import UsageError
from ctl.launch import hosts as host_lists
from ctl.launch.horovodrun.options import Asked
from ctl.launch.hosts import Host
from ctl.launch.layout import LOOPBACK, first_slots
from ctl.launch.ports import free_ports

_FAR_PORTS = (20000, 30000)  # below those that kernels give to connections
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of <linux/sockios.h>
_SLOTS = re.compile(r"(\S+)\s+slots\s*=\s*(\S+)(?:\s.*)?")


@dataclass(frozen=True)
class Seat:
    """One rank's place.

    Attributes:
      task: its place in TF_CONFIG; host: as it was written; far: what ssh is given, None for here.
    """

    place: Placement
    task: Cluster
    host: str
    far: str | None = None


def hosts_of(asked: Asked) -> list[Host] | None:
    """The hosts of -H or --hostfile, None without either."""
    if asked["hosts"] and asked["hostfile"]:
        raise UsageError("-H came with --hostfile; both name the hosts, so leave one out")
    if asked["hosts"]:
        return host_lists.read(asked["hosts"])
    return read_file(asked["hostfile"]) if asked["hostfile"] else None


def read_file(path: str) -> list[Host]:
    """The hosts of a file with a line `host slots=2` for each; `host:2` and `host` will do as well."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--hostfile {path} cannot be read ({e})") from None
    found = [_SLOTS.fullmatch(line) for line in lines]
    said = [f"{m[1]}:{m[2]}" if m else line for m, line in zip(found, lines, strict=True)]
    hosts = host_lists.read_lines(said)
    if not hosts:
        raise UsageError(f"--hostfile {path} names no host; expected lines such as `host1 slots=2`")
    return hosts


def seats(hosts: Sequence[Host] | None, count: int | None, nics: str | None = None) -> list[Seat]:
    """A seat for each of `count` ranks, by default for every slot.

    Args:
      hosts: None for this machine, which takes any number; nics: interfaces, names with commas.
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
            f"{host_lists.tell(hosts)}; ask for {slots} processes at most, or name more slots"
        )
    hosts = first_slots(hosts, count)
    addresses = reachable(hosts, nics)
    bind = LOOPBACK if all(h.is_local for h in hosts) else "0.0.0.0"
    free = iter(free_ports(sum(h.slots for h in hosts if h.is_local), bind))
    first = random.randint(*_FAR_PORTS)
    listed, names, fars, numbers = [], [], [], []
    for number, (host, address) in enumerate(zip(hosts, addresses, strict=True)):
        for slot in range(host.slots):
            listed.append(f"{address}:{next(free) if host.is_local else first + slot}")
            names.append(host.address)
            fars.append(None if host.is_local else host.target)
            numbers.append(f"{number}:")  # two names of one machine are two hosts
    return [
        Seat(
            replace(placement.among(numbers, rank), addresses=tuple(listed)),
            Cluster({"worker": tuple(listed)}, "worker", rank), names[rank], fars[rank],
        )
        for rank in range(count)
    ]  # fmt: skip


def refuse_far(names: Iterable[str]) -> None:
    """Raises UsageError if there is any: files in a directory of this machine are not over there."""
    for name in names:
        raise UsageError(
            f"{name} is another machine; a function runs on this one only. Write a script, and start it "
            "with `ctlrun -np 2 -H ... python script.py`"
        )


def reachable(hosts: Sequence[Host], nics: str | None = None) -> list[str]:
    """The address of each host, as the others can reach it."""
    far = next((h for h in hosts if not h.is_local), None)
    own = of_interface(nics.split(",")[0]) if nics else None
    if far is not None and own is None:
        own = _towards(far.address)
    return [_address(host, own, is_alone=far is None) for host in hosts]


def of_interface(name: str) -> str:
    """The IPv4 address of a network interface of this machine; UsageError when there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            packed = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(packed[20:24])
        except OSError:
            known = ", ".join(found for _, found in socket.if_nameindex())
            raise UsageError(
                f"the network interface {name!r} has no IPv4 address on this machine; expected one of "
                f"{known}, as in --network-interfaces {known.split(', ')[-1]}"
            ) from None


def _address(host: Host, own: str | None, *, is_alone: bool) -> str:
    if not host.is_local:
        return host.address
    if is_alone:
        return own or (host.address if host.address[0].isdigit() else LOOPBACK)
    if own and host.is_loopback:
        return own
    if host.is_loopback:
        raise UsageError(
            f"other machines cannot reach this one as {host.target!r}; write the name or address that "
            "they know it by in -H, or add --network-interfaces NAME"
        )
    return own or host.address


def _towards(far: str) -> str | None:
    """Our address as a far host sees it; nothing is sent."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking,
    ):
        asking.connect((far, 9))
        return asking.getsockname()[0]
    return None
