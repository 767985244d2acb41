"""All-reduces of ranks at 127.0.0.1, 127.0.0.2 and 127.0.0.3, which count as three machines.

    machines.py LAYOUT ALGORITHM     for example: machines.py 0,0,1,1,2 machines

Prints for each rank the digests of its results, the number of messages to other machines for each size, and
the number of its links before and after the all-reduces.
"""

import functools
import hashlib
import json
import sys

import forked_ranks
import numpy as np
from ctl.collectives.arithmetic import AVERAGE, SUM
from ctl.collectives.engine import Engine
from ctl.collectives.mesh import Mesh
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings

ROWS = 50_000
CASES = {"small": (9_000, np.float32), "large": (ROWS, np.float32), "integers": (ROWS, np.int64)}


def count_messages(engine):
    """Returns a list. Its last element counts the messages of this process to other machines."""
    counts, original, machines = [0], Mesh.exchange, engine.ranks.machine_by_rank

    def exchange(mesh, destination, arrays, *arguments, **named):
        is_other = machines[destination] != machines[engine.ranks.rank]
        counts[-1] += is_other and sum(array.nbytes for array in arrays) > 0
        return original(mesh, destination, arrays, *arguments, **named)

    Mesh.exchange = exchange
    return counts


def results_of(rank, addresses, server, *, algorithm):
    engine = Engine(build_ranks(addresses, rank), Settings(algorithm=algorithm), server=server)
    num_links, counts, digests = [len(engine._mesh.paths)], count_messages(engine), []
    for name, (size, dtype) in CASES.items():
        values = np.random.default_rng(rank).normal(0, 9, size).astype(dtype)
        for repetition in range(5):  # after three of them the ranks execute it without rank 0
            pending = engine.submit("allreduce", name, [values], op=SUM if repetition % 2 else AVERAGE)
            digests.append(hashlib.sha256(engine.wait(pending)[0]).hexdigest())
        counts.append(0)
    members = list(range(0, len(addresses), 2))
    pending = engine.submit("add_process_set", "even ranks", splits=members)
    engine.wait(pending)
    total = len(members)
    if rank in members:
        number = pending.response["number"]
        values = np.ones(ROWS, np.float32)
        (totals,) = engine.wait(engine.submit("allreduce", "even", [values], op=SUM, process_set=number))
        total = totals.tolist()[0] if (totals == totals[0]).all() else "unequal"
    num_links.append(len(engine._mesh.paths))
    engine.sum("end", np.zeros(1))
    outcome = {"digests": digests, "messages": counts, "total": total, "links": num_links}
    engine.close(linger=True)
    return outcome


def main(layout, algorithm):
    hosts = [f"127.0.0.{int(machine) + 1}" for machine in layout.split(",")]
    outcomes, _ = forked_ranks.run(functools.partial(results_of, algorithm=algorithm), hosts)
    print(json.dumps({"ranks": outcomes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
