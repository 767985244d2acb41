"""CPU time of the launcher when a worker of an elastic job is lost, by the number of workers.

    python tests/benchmarks/regroup.py --workers=100,1000 --rounds=3

The launcher and its messages are the real ones. The workers are threads of a second process: they connect,
request a rank and wait for it. Prints medians of the rounds: time from the loss until the last worker has
its rank (s), CPU time of the launcher (ms), and that divided by the number of workers (µs).
"""

import multiprocessing
import statistics
import sys
import threading
import time
import types

from absl import app, flags
from ctl.distribute.topology import Topology
from ctl.io import authenticated_channel
from ctl.io.json_lines import JsonLines
from ctl.launch import worker_channels
from ctl.launch.discovery import FixedHosts
from ctl.launch.elastic import ElasticJob
from ctl.launch.host_health import HostHealth
from ctl.launch.hosts import LOOPBACK, Host
from ctl.launch.membership import Limits
from ctl.launch.process import ProcessExit

_WORKERS = flags.DEFINE_list("workers", ["100", "1000"], "Numbers of workers.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Number of rounds.")
_SECRET = "secret of the benchmark"


class _Job(ElasticJob):
    """A job without processes. The next poll reports the end of those in `lost`."""

    def __init__(self, count: int):
        job = types.SimpleNamespace(
            private={"CTL_HVD_SECRET": _SECRET}, is_verbose=False, create_heartbeat_monitor=lambda: self
        )
        hosts = [Host(f"10.0.{i // 256}.{i % 256}", 1) for i in range(count)]
        super().__init__(
            job, Limits(initial=count, minimum=1, maximum=count), HostHealth((1e6, 1e6)),
            FixedHosts(hosts), listens_at=LOOPBACK, report=lambda text: None,
        )  # fmt: skip
        self.lost: list[int] = []
        self._group = self

    def find_hang(self, group) -> None:
        """Finds no hung process."""

    def release(self, task: Topology) -> None:
        """Has no heartbeat to release."""

    def poll(self) -> list[ProcessExit]:
        """Returns the ends of the lost processes."""
        lost, self.lost = self.lost, []
        return [ProcessExit(Topology({}, "worker", number), -9, 1.0) for number in lost]

    def run_until(self, is_done) -> None:
        """Polls like `run`."""
        while not is_done.is_set():
            self._poll()
            time.sleep(0.05)

    def _start_worker(self, slot) -> None:
        self._membership.add_worker(slot)


def run_worker(port: int, number: int, count_ranks, is_open) -> None:
    """Requests a rank at the start and after the loss of a peer, until the job ends."""
    endpoint = authenticated_channel.Endpoint(
        _SECRET.encode(), worker_channels.PURPOSE, worker_channels.IDENTITY
    )
    channel = JsonLines(authenticated_channel.connect((LOOPBACK, port), endpoint, {"worker": number}))
    group = 0
    channel.send({"join": 40000 + number % 20000, "group": group})
    while (message := channel.receive()) is not None:
        if "place" in message:
            group = message["place"]["generation"]
            channel.send({"synced": True})
            count_ranks()
        elif "lost" in message and message["group"] == group:
            channel.send({"join": 40000 + number % 20000, "group": group})


def run_workers(port: int, count: int, are_placed) -> None:
    """Runs all workers as threads. Sets `are_placed[i]` when all living workers have their i-th rank."""
    lock, placed = threading.Lock(), [0]
    thresholds = [count, count + count - 1]

    def count_ranks() -> None:
        with lock:
            placed[0] += 1
            if placed[0] in thresholds:
                are_placed[thresholds.index(placed[0])].set()

    threading.stack_size(256 * 1024)
    threads = [
        threading.Thread(target=run_worker, args=(port, number, count_ranks, None), daemon=True)
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    are_placed[2].wait()


def measure(count: int) -> tuple[float, float]:
    """Returns the time (s) and the CPU time of the launcher (s) of one change."""
    context = multiprocessing.get_context("fork")
    job, events = _Job(count), [context.Event() for _ in range(3)]
    workers = context.Process(target=run_workers, args=(job._channels.port, count, events))
    workers.start()
    job.run_until(events[0])
    time.sleep(1.0)
    job._poll()  # the messages about the common state
    job.lost.append(count // 2)
    start_secs, start_cpu_secs = time.monotonic(), time.process_time()
    job.run_until(events[1])
    figures = time.monotonic() - start_secs, time.process_time() - start_cpu_secs
    events[2].set()
    workers.join()
    job._channels.close()
    return figures


def main(_: list[str]) -> None:
    counts = [int(count) for count in _WORKERS.value]
    if min(counts) < 2:
        sys.exit(f"--workers is {_WORKERS.value}; expected numbers from 2.")
    figures = {count: [] for count in counts}
    for _round in range(_ROUNDS.value):
        for count in counts:
            figures[count].append(measure(count))
    print(f"{'workers':>7} {'seconds':>8} {'CPU, ms':>8} {'µs each':>8}")
    for count in counts:
        secs, cpu_secs = map(statistics.median, zip(*figures[count], strict=True))
        print(f"{count:7} {secs:8.2f} {1e3 * cpu_secs:8.1f} {1e6 * cpu_secs / count:8.1f}", flush=True)


if __name__ == "__main__":
    app.run(main)
