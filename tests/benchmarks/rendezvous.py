"""Time until all ranks of a group are connected, by number of processes of this machine.

    python tests/benchmarks/rendezvous.py --ranks=16,64,256 --rounds=3

Prints the time from the first process to the last connected rank (s), the CPU time per rank since its
start (ms) and the largest number of connections of a rank other than 0, medians of the rounds. The ratios
are to the first number of ranks. The processes are forks, so the time does not contain the import of a
library.
"""

import socket
import statistics
import sys
import time

import numpy as np
from absl import app, flags
from ctl.collectives.engine import Engine
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings
from forked_ranks import run_forked

_RANKS = flags.DEFINE_list("ranks", ["16", "64"], "Numbers of ranks.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds, in which the numbers of ranks take turns.")


def connect(rank: int, servers: list[socket.socket], start_secs: float) -> dict[str, float]:
    """Connects one rank and returns its figures."""
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    for index, server in enumerate(servers):
        if index != rank:
            server.close()
    engine = Engine(build_ranks(addresses, rank), Settings(), server=servers[rank])
    figures = {
        "secs": time.monotonic() - start_secs,
        "cpu": time.process_time() * 1e3,
        "connections": len(engine._mesh.paths) if rank else 0,
    }
    engine.sum("all ranks are connected", np.zeros(1))
    engine.close(linger=True)
    return figures


def measure(count: int) -> tuple[float, float, float]:
    """Returns time (s), CPU time per rank (ms) and connections of `count` processes."""
    servers = [socket.create_server(("127.0.0.1", 0), backlog=1024) for _ in range(count)]
    start_secs = time.monotonic()
    figures = run_forked(count, lambda rank: connect(rank, servers, start_secs))
    for server in servers:
        server.close()
    return (
        max(one["secs"] for one in figures),
        statistics.mean(one["cpu"] for one in figures),
        max(one["connections"] for one in figures),
    )


def main(_: list[str]) -> None:
    counts = [int(count) for count in _RANKS.value]
    if min(counts) < 2:
        sys.exit(f"--ranks is {_RANKS.value}; expected numbers from 2.")
    by_count = {count: [] for count in counts}
    for _round in range(_ROUNDS.value):
        for count in counts:
            by_count[count].append(measure(count))
    print(f"{'ranks':>5} {'seconds':>8} {'ratio':>6} {'CPU, ms':>8} {'ratio':>6} {'connections':>11}")
    base = None
    for count in counts:
        columns = zip(*by_count[count], strict=True)
        secs, cpu, connections = map(statistics.median, columns)
        base = base or (secs, cpu)
        print(f"{count:5} {secs:8.2f} {secs / base[0]:6.1f} {cpu:8.1f} {cpu / base[1]:6.1f} "
              f"{connections:11.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    app.run(main)
