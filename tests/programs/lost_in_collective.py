"""Ends one of five ranks before each exchange of a large collective. Prints the errors of the other ranks.

    lost_in_collective.py KIND ALGORITHM [MACHINES LOST]

MACHINES are the numbers of the machines of the ranks, which listen at 127.0.0.1 plus this number. LOST is
the rank that ends.
"""

import functools
import json
import os
import sys

import forked_ranks
import numpy as np
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.mesh import Mesh
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings

COUNT, NO_ERROR = 5, "none"
ROWS = 5 << 18
# Name -> (fields of the request, sum of the result of any rank)
COLLECTIVES = {
    "allreduce": ({"op": SUM}, COUNT * ROWS),
    "broadcast": ({"root": 0}, ROWS),
    "allgather": ({}, COUNT * ROWS),
    "reducescatter": ({"op": SUM}, ROWS),
    "alltoall": ({"splits": (ROWS // COUNT,) * COUNT}, ROWS),
}


def result_of(rank, addresses, server, *, collective, algorithm, lost, last_exchange):
    """Returns the error of a collective in which rank `lost` ends before an exchange, or NO_ERROR."""
    engine = Engine(build_ranks(addresses, rank), Settings(algorithm=algorithm), server=server)
    engine.sum("start", np.zeros(1))
    original, count = Mesh.exchange, 0

    def exchange(mesh, *arguments, **named):
        nonlocal count
        if rank == lost and count == last_exchange:
            os._exit(0)
        count += 1
        return original(mesh, *arguments, **named)

    Mesh.exchange = exchange
    try:
        fields, expected = COLLECTIVES[collective]
        (result,) = engine.wait(engine.submit(collective, "large", [np.ones(ROWS, np.float32)], **fields))
        engine.sum("end", np.zeros(1))
        return NO_ERROR if result.sum(dtype=np.float64) == expected else "wrong numbers"
    except HorovodInternalError as e:
        return str(e)


def scenario(collective, algorithm, machines="0,0,0,0,0", lost="1", *, last_exchange):
    """Returns the errors of the ranks except `lost`. That of a rank that ended, too, is None."""
    hosts = [f"127.0.0.{int(machine) + 1}" for machine in machines.split(",")]
    function = functools.partial(
        result_of,
        collective=collective, algorithm=algorithm, lost=int(lost), last_exchange=last_exchange,
    )  # fmt: skip
    errors, _ = forked_ranks.run(function, hosts)
    del errors[int(lost)]
    return errors


if __name__ == "__main__":
    errors = []
    while not errors or set(errors[-1]) != {NO_ERROR}:  # until there is no such exchange
        errors.append(scenario(*sys.argv[1:], last_exchange=len(errors)))
    print(json.dumps({"errors": errors}))
