"""Collectives of the engine over MPI against NumPy, below `mpirun`. Rank 0 prints a line of JSON."""

import json
import os
import signal
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
from ctl.collectives import arithmetic
from ctl.collectives.arithmetic import MAX, SUM
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.settings import Settings
from ctl.collectives.transports.link import CHUNK
from ctl.distribute import mpi_cluster, rank_variables

SIZES = [1, 40_000, CHUNK + 3]  # elements
DTYPES = [np.float32, np.float64, np.int32, np.uint8, ml_dtypes.bfloat16]


def create_array(rank, size, dtype):
    return np.random.default_rng([rank, size]).integers(0, 5, size).astype(dtype)


def check_collectives(engine):
    """Returns the number of compared arrays. All values are small integers, so that sums are exact."""
    rank, count, num_compared = engine.ranks.rank, engine.ranks.size, 0
    for size in SIZES:
        for dtype in DTYPES:
            arrays = [create_array(r, size, dtype) for r in range(count)]
            rows = np.array_split(np.arange(size), count)
            splits = tuple(len(part) for part in rows)
            expected = {
                ("allreduce", ("op", SUM)): sum(a.astype(np.float64) for a in arrays),
                ("allreduce", ("op", MAX)): np.max([a.astype(np.float64) for a in arrays], axis=0),
                ("broadcast", ("root", count - 1)): arrays[-1],
                ("allgather",): np.concatenate(arrays),
                ("alltoall", ("splits", splits)): np.concatenate([a[rows[rank]] for a in arrays]),
                ("reducescatter", ("op", SUM)): sum(a.astype(np.float64) for a in arrays)[rows[rank]],
            }
            for (kind, *fields), values in expected.items():
                if arithmetic.is_half(np.dtype(dtype)) and fields and fields[0][0] == "op":
                    continue  # imports TensorFlow
                pending = engine.submit(kind, f"{kind} {size} {dtype}", [arrays[rank]], **dict(fields))
                result = engine.wait(pending)[0]
                assert result.dtype == np.dtype(dtype), (kind, size, dtype)
                assert (result.astype(np.float64) == values.astype(np.float64)).all(), (kind, size, dtype)
                num_compared += 1
    return num_compared


def lose_rank(engine, signal_name):
    """Sends a signal to rank 1 while other ranks wait for its data. Returns the error of this rank."""
    engine.sum("start", np.zeros(1))
    if engine.ranks.rank == 1:
        mesh = engine._mesh
        mesh.exchange = lambda *_, **__: os.kill(os.getpid(), getattr(signal, signal_name))
    try:
        engine.sum("large", np.ones(4 * CHUNK))
    except HorovodInternalError as e:
        return str(e)
    return ""


def main():
    mpi_cluster.join_cluster()
    ranks = rank_variables.read_ranks()
    loses_rank = bool(sys.argv[1:])
    silence_secs = 3.0 if loses_rank else 120.0
    engine = Engine(ranks, Settings(transport="mpi", heartbeat_timeout=silence_secs))
    if loses_rank:
        error = lose_rank(engine, sys.argv[1])
        # a file, because mpirun may lose the output of the ranks that it kills
        Path(sys.argv[2], f"rank{ranks.rank}").write_text(error)
        sys.exit(3)
    results = {
        "compared": check_collectives(engine), "paths": sorted(set(engine._mesh.paths.values())),
        "tensorflow": "tensorflow" in sys.modules, "size": ranks.size, "local_size": ranks.local_size,
    }  # fmt: skip
    engine.close(linger=True)
    if ranks.rank == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
