"""Time of one eager all-reduce of two ranks, compared with that of MPI in the same run.

    mpirun -np 2 python tests/benchmarks/latency.py

`engine` is the engine over shared memory, `hvd` is `ctl.hvd.allreduce` of an eager tensor, and `MPI` is
`MPI.Allreduce` of the installed library. They take turns. The table has medians over rounds of the time per
call (ms), and their ratio to `MPI`. With --variants=engine,MPI TensorFlow is not imported.
"""

import statistics
import sys
import time

import numpy as np
from absl import app, flags
from ctl.collectives import arithmetic
from ctl.collectives.engine import Engine
from ctl.collectives.transports import mpi
from ctl.distribute import mpi_cluster, rank_variables
from transports import create_engine

VARIANTS = ("engine", "hvd", "MPI")
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), "Variants to measure.")
_SIZES = flags.DEFINE_list("bytes", ["1024", "65536", "1048576", "16777216"], "Sizes of the tensor.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Rounds.")
_MAX_CALLS, _BYTES_PER_ROUND = 300, 64 << 20


def create_calls(engine: Engine, size: int) -> dict:
    """Returns a function for each variant that reduces `size` bytes and waits for the result."""
    array = np.ones(size // 4, np.float32)
    received = np.empty_like(array)
    communicator = mpi.join_world().mpi.COMM_WORLD

    def reduce_by_engine():
        (total,) = engine.wait(engine.submit("allreduce", f"bytes {size}", [array], op=arithmetic.SUM))
        return total

    def reduce_by_mpi():
        communicator.Allreduce(array, received)
        return received

    calls = {"engine": reduce_by_engine, "MPI": reduce_by_mpi}
    if "hvd" in _VARIANTS.value:
        import ctl.hvd as hvd
        import tensorflow as tf

        tensor, name = tf.constant(array), f"hvd {size}"
        calls["hvd"] = lambda: hvd.allreduce(tensor, op=hvd.Sum, name=name).numpy()
    return {name: calls[name] for name in _VARIANTS.value}


def measure(calls: dict, size: int, synchronize) -> dict[str, float]:
    """Returns the median time of a call by variant (ms)."""
    times = {name: [] for name in calls}
    num_calls = max(4, min(_MAX_CALLS, _BYTES_PER_ROUND // size))
    for round_number in range(-2, _ROUNDS.value):  # the first rounds fill caches and start repetitions
        for name, call in calls.items():
            synchronize()
            start_secs = time.perf_counter()
            for _ in range(num_calls):
                total = call()
            if round_number >= 0:
                times[name].append(1e3 * (time.perf_counter() - start_secs) / num_calls)
            assert (total == 2).all(), name
    return {name: statistics.median(values) for name, values in times.items()}


def main(_):
    mpi_cluster.join_cluster()
    ranks = rank_variables.read_ranks()
    engine = create_engine("memory", ranks)
    assert ranks.size == 2, "start it with mpirun -np 2"
    if "hvd" in _VARIANTS.value:
        import ctl.hvd as hvd

        hvd.init()
    if ranks.rank == 0:
        print(f"{'bytes':>10}" + "".join(f"{name:>10}" for name in _VARIANTS.value) + "   ratios to MPI")
    for size in map(int, _SIZES.value):
        medians = measure(create_calls(engine, size), size, mpi.join_world().mpi.COMM_WORLD.Barrier)
        if ranks.rank == 0:
            ratios = ", ".join(f"{name} {medians[name] / medians['MPI']:.1f}" for name in medians)
            print(f"{size:10}" + "".join(f"{ms:10.3f}" for ms in medians.values()) + f"   {ratios}")
    sys.stdout.flush()
    engine.close(linger=True)


if __name__ == "__main__":
    app.run(main)
