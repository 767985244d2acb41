"""Time of an exchange between two ranks over sockets, shared memory and MPI.

    mpirun -np 2 python tests/benchmarks/transports.py

Prints the time of one exchange (µs) and its ratio to sockets, medians of rounds in which the transports
take turns. Both ranks send and receive at the same time.
"""

import dataclasses
import json
import statistics
import time

import numpy as np
from ctl.collectives.engine import Engine
from ctl.collectives.settings import Settings
from ctl.collectives.transports import mpi
from ctl.distribute import mpi_cluster, rank_variables
from ctl.io.rendezvous import listening_socket

TRANSPORTS = ("tcp", "memory", "mpi")
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
ROUNDS = 15


def measure(engines, size):
    """Returns the median time of an exchange by transport (µs)."""
    times = {name: [] for name in engines}
    num_calls = max(4, min(200, (32 << 20) // size))
    array, target = np.ones(size, np.uint8), np.empty(size, np.uint8)
    for round_number in range(-1, ROUNDS):
        for name, engine in engines.items():
            mesh, other = engine._mesh, 1 - engine.ranks.rank
            engine.sum("start", np.zeros(1))
            start_secs = time.perf_counter()
            for _ in range(num_calls):
                mesh.exchange(other, [array], other, size, target)
            if round_number >= 0:  # the first round fills caches
                times[name].append(1e6 * (time.perf_counter() - start_secs) / num_calls)
    return {name: statistics.median(values) for name, values in times.items()}


def create_engine(name, own_ranks):
    """Returns an engine with this transport. Engines of one process listen at different ports."""
    host = own_ranks.addresses[own_ranks.rank].rpartition(":")[0]
    with listening_socket(host, 0) as server:
        own = f"{host}:{server.getsockname()[1]}"
        addresses = tuple(mpi.join_world().allgather(own))
        ranks = dataclasses.replace(own_ranks, addresses=addresses)
        return Engine(ranks, Settings(transport=name), server=server)


def main():
    mpi_cluster.join_cluster()
    ranks = rank_variables.read_ranks()
    engines = {name: create_engine(name, ranks) for name in TRANSPORTS}
    for size in SIZES:
        medians = measure(engines, size)
        if ranks.rank == 0:
            ratios = {name: round(medians[name] / medians["tcp"], 2) for name in TRANSPORTS}
            rounded = {name: round(value, 1) for name, value in medians.items()}
            print(json.dumps({"bytes": size, "us": rounded, "ratio": ratios}), flush=True)
    for engine in engines.values():
        engine.close(linger=True)


if __name__ == "__main__":
    main()
