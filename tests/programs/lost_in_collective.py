"""Ends one of five ranks before each exchange of a large collective. Prints the errors of the other ranks.

    lost_in_collective.py KIND ALGORITHM
"""

import json
import os
import signal
import socket
import sys

import numpy as np
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.mesh import Mesh
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings

COUNT, LOST, LIMIT_SECS = 5, 1, 60
ROWS = 5 << 18
# Name -> (fields of the request, sum of the result of any rank)
COLLECTIVES = {
    "allreduce": ({"op": SUM}, COUNT * ROWS),
    "broadcast": ({"root": 0}, ROWS),
    "allgather": ({}, COUNT * ROWS),
    "reducescatter": ({"op": SUM}, ROWS),
    "alltoall": ({"splits": (ROWS // COUNT,) * COUNT}, ROWS),
}


def result_of(rank, servers, collective, algorithm, last_exchange):
    """Returns the error of a collective in which rank `LOST` ends before an exchange, or None."""
    signal.alarm(LIMIT_SECS)
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    engine = Engine(build_ranks(addresses, rank), Settings(algorithm=algorithm), server=servers[rank])
    engine.sum("start", np.zeros(1))
    original, count = Mesh.exchange, 0

    def exchange(mesh, *arguments, **named):
        nonlocal count
        if rank == LOST and count == last_exchange:
            os._exit(0)
        count += 1
        return original(mesh, *arguments, **named)

    Mesh.exchange = exchange
    try:
        fields, expected = COLLECTIVES[collective]
        (result,) = engine.wait(engine.submit(collective, "large", [np.ones(ROWS, np.float32)], **fields))
        engine.sum("end", np.zeros(1))
        return None if result.sum(dtype=np.float64) == expected else "wrong numbers"
    except HorovodInternalError as e:
        return str(e)


def scenario(collective, algorithm, last_exchange):
    """Returns the errors of the ranks except `LOST`."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(COUNT)]
    readers, (end_reader, end_writer) = [], os.pipe()
    for rank in range(COUNT):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(end_writer)
            result = result_of(rank, servers, collective, algorithm, last_exchange)
            os.write(writer, json.dumps(result).encode())
            os.read(end_reader, 1)  # a rank that ended here would be lost, too
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    outputs = [os.read(reader, 1 << 16) for reader in readers]
    for end in (end_reader, end_writer, *readers):
        os.close(end)
    for _ in range(COUNT):
        os.wait()
    return [json.loads(text or '"killed"') for rank, text in enumerate(outputs) if rank != LOST]


if __name__ == "__main__":
    errors = []
    while not errors or errors[-1] != [None] * (COUNT - 1):  # until there is no such exchange
        errors.append(scenario(*sys.argv[1:], len(errors)))
    print(json.dumps({"errors": errors}))
