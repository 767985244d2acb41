"""CPU time of a collective by number of ranks: every algorithm, in processes of this machine.

    python tests/benchmarks/collective_scaling.py --kind=allreduce --ranks=2,4,8,16 --bytes=4,65536,1048576

Prints the CPU time per call (ms), medians of the rounds: the mean of the ranks except rank 0, and rank 0,
which also coordinates. CPU time depends little on the number of cores that the ranks share.
"""

import socket
import statistics
import time

import numpy as np
from absl import app, flags
from ctl.collectives.arithmetic import SUM, to_numpy_dtype
from ctl.collectives.control_tree import FANOUT
from ctl.collectives.engine import Engine
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings
from forked_ranks import run_forked

KINDS = ["allreduce", "broadcast", "allgather", "alltoall"]
_KIND = flags.DEFINE_enum("kind", "allreduce", KINDS, "The collective.")
_RANKS = flags.DEFINE_list("ranks", ["2", "4", "8", "16"], "Numbers of ranks.")
_BYTES = flags.DEFINE_list("bytes", ["4", "65536", "1048576"], "Sizes of the array of each rank (bytes).")
_ALGORITHMS = flags.DEFINE_list(
    "algorithms", ["ring", "auto", "repeated"],
    "Algorithms; ratios are to the first one. `repeated`: auto, repeated without rank 0. `star`: auto, all "
    "ranks send their requests to rank 0.",
)  # fmt: skip
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds, in which the algorithms take turns.")
_CALLS = flags.DEFINE_integer("calls", 100, "Calls per round.")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of the elements.")
_SOCKETS = flags.DEFINE_bool("sockets", False, "Whether ranks use sockets instead of shared memory.")


def measure(
    rank: int, servers: dict[str, list[socket.socket]], size: int, calls: int
) -> dict[str, list[float]]:
    """Returns the CPU time per call (ms) of this rank, by algorithm and round."""
    engines = {}
    for algorithm, sockets in servers.items():
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in sockets]
        settings = Settings(
            algorithm="auto" if algorithm in ("repeated", "star") else algorithm,
            agrees_once=algorithm == "repeated",
            fanout=len(sockets) if algorithm == "star" else FANOUT,
            transport="tcp" if _SOCKETS.value else "memory",
        )
        engines[algorithm] = Engine(build_ranks(addresses, rank), settings, server=sockets[rank])
    dtype, count = to_numpy_dtype(_DTYPE.value), len(addresses)
    array = np.ones(size // dtype.itemsize, dtype)
    splits = [array.size // count] * (count - 1)
    fields = {
        "allreduce": {"op": SUM}, "broadcast": {"root": 0}, "allgather": {},
        "alltoall": {"splits": (*splits, array.size - sum(splits))},
    }[_KIND.value]  # fmt: skip
    results = {algorithm: [] for algorithm in engines}
    for round_number in range(-1, _ROUNDS.value):
        for algorithm, engine in engines.items():
            engine.sum("start", np.zeros(1))
            start_secs = time.process_time()
            for _ in range(calls):
                engine.wait(engine.submit(_KIND.value, "large", [array], **fields))
            if round_number >= 0:  # the first round opens files and fills caches
                results[algorithm].append((time.process_time() - start_secs) * 1e3 / calls)
    for engine in engines.values():
        engine.close(linger=True)
    return results


def measure_all(count: int, size: int, calls: int) -> list[dict[str, list[float]]]:
    """Returns the results of `measure` by rank."""
    servers = {a: [socket.create_server(("127.0.0.1", 0)) for _ in range(count)] for a in _ALGORITHMS.value}
    results = run_forked(count, lambda rank: measure(rank, servers, size, calls))
    for sockets in servers.values():
        for server in sockets:
            server.close()
    return results


def main(_: list[str]) -> None:
    print(f"{'ranks':>5} {'bytes':>9} {'algorithm':>9} {'each':>8} {'ratio':>6} {'rank 0':>8} {'ratio':>6}")
    for count in map(int, _RANKS.value):
        for size in map(int, _BYTES.value):
            by_rank = measure_all(count, size, _CALLS.value)
            base = None
            for algorithm in _ALGORITHMS.value:
                medians = [statistics.median(results[algorithm]) for results in by_rank]
                each, zero = statistics.mean(medians[1:]), medians[0]
                base = base or (each, zero)
                print(f"{count:5} {size:9,} {algorithm:>9} {each:8.3f} {each / base[0]:6.2f} {zero:8.3f} "
                      f"{zero / base[1]:6.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    app.run(main)
