"""What both sides of the meeting say to each other, and how they name each other. Pure data."""

import json

from ctl.distribute.topology import Topology
from ctl.io.rendezvous import split_address

PURPOSE, IDENTITY = "startup", "chief"
NAME_SECS = 3.0  # before those that are missing are named; then ever more rarely
CALL_AGAIN_SECS = 0.2
LEAVE_SECS = 5.0  # for the chief's last word to arrive
MOST_LINE_BYTES = 1 << 20


def name_of(cluster: Topology, rank: int) -> str:
    """A worker by its name in TF_CONFIG and its address: "worker 1 (10.0.0.3:2222)"."""
    places = [
        (f"{kind} {i}", address)
        for kind in ("chief", "worker")
        for i, address in enumerate(cluster.tasks.get(kind, ()))
    ]
    called, address = places[rank]
    return f"{called} ({address})"


def address_of(cluster: Topology, rank: int) -> tuple[str, int]:
    """Where a worker listens."""
    addresses = [a for kind in ("chief", "worker") for a in cluster.tasks.get(kind, ())]
    return split_address(addresses[rank])


def line(message: dict) -> bytes:
    """A message as it travels."""
    return json.dumps(message).encode() + b"\n"


def too_long(timeout_secs: float, whom: str) -> str:
    """A sentence on who did not come."""
    return (
        f"Waited {timeout_secs:g} s (--startup_timeout_secs) for {whom}; it did not come. Is the process "
        "running, does the address in TF_CONFIG lead to it, and does no firewall stand between?"
    )
