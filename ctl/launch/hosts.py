"""Hosts and their slots, as people write them: "host1:2,host2:2", or a line each.

    read("host1:2,user@10.0.0.7")     -> [Host("host1", 2), Host("user@10.0.0.7", 1)]

A name can reach a command line and a TF_CONFIG, so only letters, digits, dots and hyphens are one.
"""

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ctl.errors import UsageError
from ctl.io.console import quoted

MOST_WORKERS = 1024
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_EXAMPLE = "host1:2,host2:2"


@dataclass(frozen=True)
class Host:
    """A machine and how many workers it takes.

    Attributes:
      target: what ssh is given, "host" or "user@host".
      slots: workers at most.
    """

    target: str
    slots: int = 1

    @property
    def address(self) -> str:
        """The name or IPv4 address without the user."""
        return self.target.rpartition("@")[2]

    @property
    def is_local(self) -> bool:
        """True for this machine, by a name or an address of it; with a user it is ssh's."""
        if "@" in self.target:
            return False
        own = socket.gethostname().lower()
        return (
            self.is_loopback
            or self.target.lower() in (own, own.partition(".")[0])
            or _is_ours(self.target)
        )

    @property
    def is_loopback(self) -> bool:
        """True for a name that means another machine on another machine."""
        return self.target.lower() == "localhost" or self.target.startswith("127.")


def read(text: str) -> list[Host]:
    """Reads the value of -H; raises UsageError that names the part."""
    return check([read_one(part.strip()) for part in text.split(",")])


def read_lines(lines: Iterable[str], slots: int = 1) -> list[Host]:
    """Reads what a discovery script printed; empty lines and those that begin with # say nothing.

    Args:
      slots: of a host without a number.
    """
    said = (line.strip() for line in lines)
    return check([read_one(line, slots) for line in said if line and not line.startswith("#")])


def read_one(text: str, slots: int = 1) -> Host:
    """Reads "host:slots", or "host" for `slots`."""
    target, colon, count = text.partition(":")
    user, at, name = target.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise UsageError(
            f"{quoted(text)} names the user {quoted(user)}; expected letters, digits, dots, hyphens "
            "and underscores, as in me@host1:2"
        )
    if not _NAME.fullmatch(name) or len(name) > 253 or not _is_address(name):
        raise UsageError(
            f"{quoted(name)} is no host; expected a name of letters, digits, dots and hyphens or an IPv4 "
            f"address, as in {_EXAMPLE}"
        )
    if colon and not (re.fullmatch("[0-9]{1,4}", count) and 1 <= int(count) <= MOST_WORKERS):
        raise UsageError(
            f"{quoted(text)} gives {quoted(count)} slots; expected a whole number from 1 to "
            f"{MOST_WORKERS}, as in host1:2"
        )
    return Host(target, int(count) if colon else slots)


def check(hosts: Sequence[Host]) -> list[Host]:
    """The same, if no host comes twice and there are not too many slots."""
    seen: dict[str, Host] = {}
    for host in hosts:
        key = host.address.lower()
        if key in seen:
            raise UsageError(
                f"the host {host.address!r} came twice; write it once, with all its slots: "
                f"{host.target}:{seen[key].slots + host.slots}"
            )
        seen[key] = host
    count = sum(h.slots for h in hosts)
    if count > MOST_WORKERS:
        raise UsageError(f"{count} slots came, expected {MOST_WORKERS} at most over all hosts")
    return list(hosts)


def tell(hosts: Sequence[Host]) -> str:
    """As it is written: host1:2,host2:2."""
    return ",".join(f"{h.target}:{h.slots}" for h in hosts)


def _is_address(name: str) -> bool:
    """False for four numbers that are no IPv4 address, and for numbers that look like one."""
    parts = name.split(".")
    if not parts[-1].isdigit():
        return True
    return len(parts) == 4 and all(re.fullmatch("[0-9]{1,3}", p) and int(p) < 256 for p in parts)


def _is_ours(name: str) -> bool:
    if not name.replace(".", "").isdigit():
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        try:
            bound.bind((name, 0))
        except OSError:
            return False
    return True
