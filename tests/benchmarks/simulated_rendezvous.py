"""Time until thousands of ranks are connected, simulated; and its error for the processes of this machine.

    python tests/benchmarks/simulated_rendezvous.py
    python tests/benchmarks/simulated_rendezvous.py --measure --ranks=16,64,256

Prints a table of simulated jobs (`tests/simulation/simulated_start.py`) with the costs of
`measured_costs.py`. With `--measure` it measures these costs: the CPU time of both sides of a handshake,
of a call that is refused and of a fork, each in a loop; those of a rank and of a link are fitted to the CPU
time of the processes of `rendezvous.py`. It then prints measured and simulated times of these processes.
Times are measured on a machine without other work; CPU times depend little on it.
"""

import dataclasses
import os
import random
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rendezvous
from absl import app, flags
from ctl.collectives.bootstrap import list_calls
from ctl.collectives.partners import partners_of
from ctl.io.authenticated_channel import Endpoint, Listener, connect
from forked_ranks import run_forked

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulation"))

from measured_costs import START_COSTS
from simulated_start import Job, StartCosts, simulate_start

FLAGS = flags.FLAGS
_MEASURE = flags.DEFINE_bool("measure", False, "Whether to measure costs, and processes of this machine.")
_SIMULATED_RANKS = flags.DEFINE_integer("simulated_ranks", 1024, "Number of ranks of the simulated jobs.")
_HANDSHAKES = flags.DEFINE_integer("handshakes", 2000, "Handshakes of a measurement.")
_ENDPOINT = Endpoint(b"secret", "ranks", "rank 0")
_CLAIM = {"role": "peer", "rank": 1, "protocol": 7, "size": 1024, "generation": 0}
_LATENCY_SECS = 100e-6  # between two machines of a data centre, with the kernels of both


def measure_handshakes(count: int) -> tuple[float, float]:
    """Returns the CPU time of the caller and of the listener for one handshake (seconds)."""
    listener = Listener(socket.create_server(("127.0.0.1", 0)), _ENDPOINT)
    listener_secs = []

    def accept() -> None:
        num_accepted = 0
        while num_accepted < count:
            for connection, _ in listener.accept_callers(1.0):
                connection.close()
                num_accepted += 1
        listener_secs.append(time.thread_time())

    thread = threading.Thread(target=accept)
    thread.start()
    start_secs = time.thread_time()
    for _ in range(count):
        connect(listener.address, _ENDPOINT, _CLAIM).close()
    caller_secs = time.thread_time() - start_secs
    thread.join()
    listener.close()
    return caller_secs / count, listener_secs[0] / count


def measure_refused_calls(count: int) -> float:
    """Returns the CPU time of a call to a port without a listener (seconds)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    start_secs = time.thread_time()
    for _ in range(count):
        try:
            connect(address, _ENDPOINT, _CLAIM)
        except ConnectionRefusedError:
            continue
    return (time.thread_time() - start_secs) / count


def measure_forks(count: int) -> float:
    """Returns the CPU time of this process for one fork (seconds)."""
    start_secs = time.process_time()
    run_forked(count, lambda rank: rank)
    return (time.process_time() - start_secs) / count


def median_of_rounds(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(FLAGS.rounds))


def measure_costs(cpu_secs_by_count: dict[int, float]) -> StartCosts:
    """Returns the costs of this machine. `cpu_secs_by_count` has the CPU time per rank."""
    sides = [measure_handshakes(_HANDSHAKES.value) for _ in range(FLAGS.rounds)]
    caller_secs, listener_secs = (statistics.median(secs) for secs in zip(*sides, strict=True))
    rows, values = [], []
    for count, cpu_secs in cpu_secs_by_count.items():
        partners = partners_of(count)
        calls = [list_calls(rank, partners[rank], 0 if rank else None) for rank in range(count)]
        num_handshakes = sum(map(len, calls)) / count
        rows.append([1.0, statistics.mean(map(len, partners))])
        values.append(cpu_secs - num_handshakes * (caller_secs + listener_secs))
    rank_secs, link_secs = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0]
    return StartCosts(
        fork_secs=median_of_rounds(lambda: measure_forks(64)),
        rank_secs=max(0.0, rank_secs),
        call_secs=caller_secs,
        refused_secs=median_of_rounds(lambda: measure_refused_calls(_HANDSHAKES.value)),
        accept_secs=listener_secs / 2,
        proof_secs=listener_secs / 2,
        link_secs=max(0.0, link_secs),
    )


def simulate_processes(count: int, costs: StartCosts) -> tuple[float, float]:
    """Returns time and mean CPU time of the processes of `rendezvous.py` on this machine (seconds)."""
    cores = os.cpu_count() or 1
    job = Job(count, ranks_per_machine=count, cores=cores, is_listening_early=True, max_queued=1024)
    simulated = simulate_start(job, costs)
    return max(simulated.ready_at), statistics.mean(simulated.cpu_secs)


def compare(counts: list[int]) -> None:
    """Prints measured and simulated times."""
    figures = {count: [] for count in counts}
    for _round in range(FLAGS.rounds):
        for count in counts:
            figures[count].append(rendezvous.measure(count))
    medians = {count: [*map(statistics.median, zip(*figures[count], strict=True))] for count in counts}
    costs = measure_costs({count: cpu_ms / 1e3 for count, (_, cpu_ms, _) in medians.items()})
    print({name: f"{secs:.3g}" for name, secs in dataclasses.asdict(costs).items()})
    print(f"{'ranks':>5} {'seconds':>8} {'simulated':>9} {'CPU, ms':>8} {'simulated':>9}")
    for count in counts:
        secs, cpu_ms, _ = medians[count]
        simulated_secs, simulated_cpu_secs = simulate_processes(count, costs)
        print(f"{count:5} {secs:8.2f} {simulated_secs:9.2f} {cpu_ms:8.1f} {1e3 * simulated_cpu_secs:9.1f}")


def build_jobs(count: int) -> dict[str, Job]:
    """Returns description -> job."""
    uniform = random.Random(1).random
    separate = Job(count, ranks_per_machine=1, cores=1, latency_secs=_LATENCY_SECS)
    shared = dataclasses.replace(separate, ranks_per_machine=8, cores=8)
    return {
        "one rank per machine": separate,
        "8 ranks and cores per machine": shared,
        "starts within 2 s": dataclasses.replace(shared, delays={r: 2 * uniform() for r in range(count)}),
        "rank 0 starts 10 s later": dataclasses.replace(shared, delays={0: 10.0}),
        "rank 0 is 10 times slower": dataclasses.replace(shared, slowdowns={0: 10.0}),
        "rank 77 is 10 times slower": dataclasses.replace(shared, slowdowns={77: 10.0}),
        "queue of 128 calls": dataclasses.replace(shared, max_queued=128),
        "one machine with 64 cores": dataclasses.replace(shared, ranks_per_machine=count, cores=64),
    }


def main(_: list[str]) -> None:
    if _MEASURE.value:
        compare([*map(int, FLAGS.ranks)])
        return
    print(f"{'job':30} {'seconds':>8} {'handshakes':>10} {'queued':>7} {'calls':>7} {'ended':>6}")
    for name, job in build_jobs(_SIMULATED_RANKS.value).items():
        simulated = simulate_start(job, START_COSTS)
        maxima = max(simulated.max_handshakes), max(simulated.max_queued)
        sums = sum(simulated.num_calls), sum(simulated.num_disconnected)
        print(f"{name:30} {simulated.seconds:8.2f} {maxima[0]:10} {maxima[1]:7} {sums[0]:7} {sums[1]:6}")


if __name__ == "__main__":
    app.run(main)
