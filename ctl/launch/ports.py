"""Free TCP ports for the workers of this machine.

    free_ports(2)        -> [40213, 38119]

Another program can take a port before the worker binds it. `ctl.launch.supervisor` then restarts.
"""

import contextlib
import socket

from ctl.errors import UsageError


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns `count` different ports that are free at `host` (an IPv4 address or a name).

    All are bound at the same time, so no port is returned twice, and all are free on return.
    Raises UsageError if `host` is not an address of this machine.
    """
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            bound = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            try:
                bound.bind((host, 0))
            except OSError as e:
                raise UsageError(
                    f"cannot bind a port at host {host!r} ({e.strerror or e}); expected an IPv4 "
                    "address of this machine, such as --host=127.0.0.1"
                ) from None
            ports.append(bound.getsockname()[1])
        return ports
