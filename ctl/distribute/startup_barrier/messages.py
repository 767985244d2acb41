"""Messages and constants of the startup barrier, and names of workers. Pure data."""

import json

from ctl.distribute.topology import Topology
from ctl.io.rendezvous import split_address

PURPOSE, IDENTITY = "startup", "chief"
FIRST_REMINDER_SECS = 3.0  # first log message about missing workers; later ones with backoff
RETRY_SECS = 0.2
CLOSE_SECS = 5.0  # for the chief's last message to arrive
MAX_LINE_BYTES = 1 << 20


def name_of(topology: Topology, rank: int) -> str:
    """Returns the name of a worker in TF_CONFIG with its address, such as "worker 1 (10.0.0.3:2222)"."""
    workers = [
        (f"{task_type} {i}", address)
        for task_type in ("chief", "worker")
        for i, address in enumerate(topology.tasks.get(task_type, ()))
    ]
    name, address = workers[rank]
    return f"{name} ({address})"


def address_of(topology: Topology, rank: int) -> tuple[str, int]:
    """Returns the (host, port) at which a worker listens."""
    addresses = [a for task_type in ("chief", "worker") for a in topology.tasks.get(task_type, ())]
    return split_address(addresses[rank])


def line(message: dict) -> bytes:
    """Returns an encoded message."""
    return json.dumps(message).encode() + b"\n"


def job_variables(topology: Topology) -> str:
    """Returns the names of the environment variables that describe the job, such as "TF_CONFIG"."""
    return ", ".join(topology.sources) or "TF_CONFIG"


def timeout_message(topology: Topology, timeout_secs: float, missing: str) -> str:
    """Returns the message about workers, named in `missing`, that did not connect in time."""
    return (
        f"Waited {timeout_secs:g} s (--startup_timeout_secs) for {missing}. "
        f"Check that the process runs, that its address in {job_variables(topology)} is right, and that no "
        "firewall blocks the port."
    )
