"""Hosts and their slots: "host1:2,host2:2", hostfiles, and the network addresses of hosts.

    parse_hosts("host1:2,user@10.0.0.7")     -> [Host("host1", 2), Host("user@10.0.0.7", 1)]

Names are used in command lines and TF_CONFIG, so only letters, digits, dots and hyphens are allowed.
"""

import contextlib
import fcntl
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ctl.errors import UsageError
from ctl.io.console import quoted

LOOPBACK = "127.0.0.1"
MAX_WORKERS = 1024
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_HOSTFILE_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\S+)(?:\s.*)?")
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_HOST_LIST = "host1:2,host2:2"


@dataclass(frozen=True)
class Host:
    """A machine and its number of workers.

    Attributes:
      target: Target of ssh, "host" or "user@host".
      slots: Maximum number of workers.
    """

    target: str
    slots: int = 1

    @property
    def address(self) -> str:
        """The name or IPv4 address without the user."""
        return self.target.rpartition("@")[2]

    @property
    def is_local(self) -> bool:
        """True for a name or an address of this machine. With a user it counts as another machine."""
        if "@" in self.target:
            return False
        hostname = socket.gethostname().lower()
        return (
            self.is_loopback
            or self.target.lower() in (hostname, hostname.partition(".")[0])
            or _is_own_address(self.target)
        )

    @property
    def is_loopback(self) -> bool:
        """True for a loopback name or address, such as "localhost"."""
        return self.target.lower() == "localhost" or self.target.startswith("127.")


def parse_hosts(text: str) -> list[Host]:
    """Parses the value of -H. Raises UsageError that names the invalid part."""
    return check_hosts([parse_host(part.strip()) for part in text.split(",")])


def parse_host_lines(lines: Iterable[str], slots: int = 1) -> list[Host]:
    """Parses one host per line. Empty lines and lines that begin with # are skipped.

    Args:
      lines: Lines such as "host:2".
      slots: Slots of a host without a number.
    """
    stripped = (line.strip() for line in lines)
    return check_hosts([parse_host(line, slots) for line in stripped if line and not line.startswith("#")])


def read_hostfile(path: str) -> list[Host]:
    """Reads a file with lines such as `host slots=2`, `host:2` or `host`."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--hostfile {path} cannot be read ({e})") from None
    matches = [_HOSTFILE_LINE.fullmatch(line) for line in lines]
    hosts = parse_host_lines(
        f"{m[1]}:{m[2]}" if m else line for m, line in zip(matches, lines, strict=True)
    )
    if not hosts:
        raise UsageError(f"--hostfile {path} lists no host; expected lines such as `host1 slots=2`")
    return hosts


def parse_host(text: str, slots: int = 1) -> Host:
    """Parses "host:slots", or "host" for `slots`."""
    target, colon, count = text.partition(":")
    user, at, name = target.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(
            f"{quoted(text)} has the user {quoted(user)}; expected letters, digits, dots, hyphens "
            "and underscores, as in me@host1:2"
        )
    if not _NAME.fullmatch(name) or len(name) > 253 or not _is_address(name):
        raise UsageError(
            f"{quoted(name)} is not a host; expected a name of letters, digits, dots and hyphens or an "
            "IPv4 "
            f"address, as in {_HOST_LIST}"
        )
    if colon and not (re.fullmatch("[0-9]{1,4}", count) and 1 <= int(count) <= MAX_WORKERS):
        raise UsageError(
            f"{quoted(text)} has {quoted(count)} slots; expected a whole number from 1 to "
            f"{MAX_WORKERS}, as in host1:2"
        )
    return Host(target, int(count) if colon else slots)


def check_hosts(hosts: Sequence[Host]) -> list[Host]:
    """Returns the hosts. Raises UsageError for a duplicate host or too many slots."""
    host_by_name: dict[str, Host] = {}
    for host in hosts:
        key = host.address.lower()
        if key in host_by_name:
            raise UsageError(
                f"the host {host.address!r} is listed twice; list it once with all its slots: "
                f"{host.target}:{host_by_name[key].slots + host.slots}"
            )
        host_by_name[key] = host
    count = sum(h.slots for h in hosts)
    if count > MAX_WORKERS:
        raise UsageError(f"{count} slots were requested; expected at most {MAX_WORKERS} over all hosts")
    return list(hosts)


def format_hosts(hosts: Sequence[Host]) -> str:
    """Returns the format that `parse_hosts` reads: host1:2,host2:2."""
    return ",".join(f"{h.target}:{h.slots}" for h in hosts)


def select_slots(hosts: Sequence[Host], max_slots: int | None) -> list[Host]:
    """Returns the first hosts with `max_slots` slots in total. The last host may be used in part."""
    selected, remaining_slots = [], MAX_WORKERS if max_slots is None else max_slots
    for host in hosts:
        if remaining_slots:
            selected.append(Host(host.target, min(host.slots, remaining_slots)))
            remaining_slots -= selected[-1].slots
    return selected


def peer_addresses(hosts: Sequence[Host], own_address: str | None, option: str) -> list[str]:
    """Returns the address of each host for its peers. Raises UsageError for an unreachable host.

    Args:
      hosts: Hosts of the job.
      own_address: Address of this machine, if known.
      option: End of the error message, which names an option.
    """
    is_alone = all(host.is_local for host in hosts)
    return [_address(host, own_address, is_alone, option) for host in hosts]


def resolve_addresses(
    hosts: Sequence[Host],
    nics: str | None = None,
    own_address: str | None = None,
    option: str = " in -H, or add --network-interfaces NAME",
) -> list[str]:
    """Returns addresses as `peer_addresses`, with this machine's address on the first of `nics` or a route.

    Also raises UsageError if this machine's address is required and no name of another host resolves.

    Args:
      hosts: Hosts of the job.
      nics: Names of network interfaces, separated by commas.
      own_address: Address of this machine, if known.
      option: End of the error message, which names an option.
    """
    remote_addresses = [host.address for host in hosts if not host.is_local]
    own_address = interface_address(nics.split(",")[0]) if nics else own_address
    if remote_addresses and own_address is None:
        own_address = next(filter(None, map(_address_towards, remote_addresses)), None)
        if own_address is None and any(host.is_loopback for host in hosts):
            _check_resolves(remote_addresses[0])
    return peer_addresses(hosts, own_address, option)


def interface_address(name: str) -> str:
    """Returns the IPv4 address of a network interface of this machine. Raises UsageError without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(packed[20:24])
        except OSError:
            interface_names = ", ".join(interface_name for _, interface_name in socket.if_nameindex())
            raise UsageError(
                f"the network interface {name!r} has no IPv4 address on this machine; expected one of "
                f"{interface_names}, as in --network-interfaces {interface_names.split(', ')[-1]}"
            ) from None


def _address(host: Host, own_address: str | None, is_alone: bool, option: str) -> str:
    if not host.is_local:
        return host.address
    if own_address:
        return own_address
    if is_alone:
        return host.address if host.address[0].isdigit() else LOOPBACK
    if host.is_loopback:
        raise UsageError(
            f"other machines cannot connect to this machine as {host.target!r}; specify its name or "
            f"address in the network{option}"
        )
    return host.address


def _address_towards(remote_address: str) -> str | None:
    """Returns the source address for connections to another host. Sends no packet."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote_address, 9))
        return probe.getsockname()[0]
    return None


def _check_resolves(name: str) -> None:
    """Raises UsageError for a name without an address."""
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as e:
        raise UsageError(
            f"the host name {name!r} cannot be resolved ({getattr(e, 'strerror', None) or e}); expected "
            "a name in the DNS or in /etc/hosts of every machine, or an IPv4 address"
        ) from None


def _is_address(name: str) -> bool:
    """Returns False for numbers with dots that are not an IPv4 address, True for other names."""
    parts = name.split(".")
    if not parts[-1].isdigit():
        return True
    return len(parts) == 4 and all(re.fullmatch("[0-9]{1,3}", p) and int(p) < 256 for p in parts)


def _is_own_address(name: str) -> bool:
    if not name.replace(".", "").isdigit():
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))
        except OSError:
            return False
    return True
