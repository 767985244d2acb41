"""Ranks of the collectives engine, forked from a test program that has not imported TensorFlow.

    outcomes, addresses = forked_ranks.run(function, ["127.0.0.1"] * 3)
"""

import json
import os
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

LIMIT_SECS = 600


def run(
    function: Callable[[int, list[str], socket.socket], Any], hosts: Sequence[str], *, keeps_ports=False
) -> tuple[list[Any], list[str]]:
    """Calls `function(rank, addresses, server)` in one process for each rank.

    The processes end after all of them have a result, because a rank that ends is lost for the others.

    Args:
      function: Returns a result for JSON. `server` listens at the address of the rank.
      hosts: Addresses of the ranks, without ports.
      keeps_ports: If True, another process uses the ports, so that no rank can listen there again.

    Returns:
      The results (None for a rank that ended without one) and the addresses with ports.
    """
    servers = [socket.create_server((host, 0)) for host in hosts]
    addresses = ["{}:{}".format(*server.getsockname()) for server in servers]
    readers, (end_reader, end_writer) = [], os.pipe()
    for rank, server in enumerate(servers):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(end_writer)
            signal.alarm(LIMIT_SECS)
            for other in servers[:rank] + servers[rank + 1 :]:
                other.close()
            os.write(writer, json.dumps(function(rank, addresses, server)).encode())
            os.close(writer)
            os.read(end_reader, 1)
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    if not keeps_ports:
        for server in servers:
            server.close()
    outputs = [read_all(reader) for reader in readers]
    for descriptor in (end_reader, end_writer):
        os.close(descriptor)
    for server in servers:
        server.close()
    for _ in hosts:
        os.wait()
    return [json.loads(text or "null") for text in outputs], addresses


def read_all(reader: int) -> str:
    with open(reader) as stream:
        return stream.read()
