"""Simulated time of all-reduces over a network with delay and limited rate, compared with the engine.

    python tests/benchmarks/delayed_network.py --ranks=4 --delay_ms=10 --mbits=100

Requires root and Linux. Each rank is a process in its network namespace. Another process connects the
namespaces: it reads packets from their TUN devices and writes each one to its destination after the delay,
in the order and at the rate of the sender. Prints median and minimum of the elapsed time of a call (ms),
the mean of the ranks. Other work on the machine delays packets, so the error is that of the minimum. The
simulated time contains the request to rank 0 and its response, so calls are not repeated without rank 0.
"""

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from absl import app, flags
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings
from forked_ranks import run_forked

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulation"))

from exchange_records import ALGORITHMS, record_schedule
from measured_costs import network_costs
from virtual_clock import Costs, simulate

_RANKS = flags.DEFINE_integer("ranks", 4, "Number of ranks.")
_DELAY_MS = flags.DEFINE_float("delay_ms", 10.0, "Time of a packet from one rank to another (ms).")
_MBITS = flags.DEFINE_float("mbits", 100.0, "Rate at which each rank sends (Mbit/s).")
_BYTES = flags.DEFINE_list("bytes", ["65536", "1048576"], "Sizes of the array of each rank (bytes).")
_MTU = flags.DEFINE_integer("mtu", 60000, "Largest packet (bytes). Small ones take CPU time.")
_CALLS = flags.DEFINE_integer("calls", 20, "Calls of each algorithm.")
_NEW_NETWORK, _SET_DEVICE, _TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001
_PORT, _WARM_CALLS = 7000, 5  # TCP widens its window in the first calls


def enter_namespace(name: str) -> None:
    """Moves this thread into a network namespace."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def address_of(rank: int) -> str:
    """Returns the address of a rank in its namespace."""
    return f"10.98.0.{rank + 1}"


@contextlib.contextmanager
def namespaces(count: int, delay_secs: float, byte_secs: float):
    """Creates connected network namespaces. Yields their names."""
    names = [f"ctl{os.getpid()}n{rank}" for rank in range(count)]
    wire = None
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        reader, writer = os.pipe()
        wire = os.fork()
        if not wire:
            try:
                carry_packets([open_device(name, rank) for rank, name in enumerate(names)],
                              writer, delay_secs, byte_secs)  # fmt: skip
            finally:
                os._exit(1)
        os.close(writer)
        if not os.read(reader, 1):
            raise SystemExit("the network could not be created")
        os.close(reader)
        yield names
    finally:
        if wire:
            os.kill(wire, signal.SIGKILL)
            os.waitpid(wire, 0)
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def open_device(namespace: str, rank: int) -> int:
    """Creates the TUN device of a rank. Returns its file descriptor."""
    enter_namespace(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH", b"tun0", _TUN_WITHOUT_HEADER))
    for arguments in (
        ["address", "add", f"{address_of(rank)}/24", "dev", "tun0"],
        ["link", "set", "lo", "up"],
        ["link", "set", "tun0", "mtu", str(_MTU.value), "txqueuelen", "9000", "up"],
    ):
        subprocess.run(["ip", *arguments], check=True)
    return device


def carry_packets(devices: list[int], notified: int, delay_secs: float, byte_secs: float) -> None:
    """Moves packets between the devices until the process is killed."""
    os.write(notified, b"r")
    os.close(notified)
    poller, sender_by_device = select.poll(), {device: i for i, device in enumerate(devices)}
    for device in devices:
        poller.register(device, select.POLLIN)
    in_flight: list[tuple[float, int, int, bytes]] = []  # arrival, number, destination, packet
    free_at, number = [0.0] * len(devices), 0
    while True:
        wait_secs = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else 1.0
        for device, _ in poller.poll(1000 * wait_secs):
            sender = sender_by_device[device]
            for _ in range(100):
                try:
                    packet = os.read(device, 65536)
                except BlockingIOError:
                    break
                destination = packet[19] - 1  # the last byte of the IPv4 address
                if packet[0] >> 4 == 4 and destination in range(len(devices)):
                    free_at[sender] = max(time.monotonic(), free_at[sender]) + len(packet) * byte_secs
                    number += 1
                    heapq.heappush(
                        in_flight, (free_at[sender] + delay_secs, number, devices[destination], packet)
                    )
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(in_flight)
            with contextlib.suppress(BlockingIOError):
                os.write(device, packet)


def measure(rank: int, algorithm: str, size: int) -> tuple[float, float]:
    """Returns median and minimum of the elapsed time of a call on this rank (seconds)."""
    addresses = [f"{address_of(i)}:{_PORT}" for i in range(_RANKS.value)]
    settings = Settings(algorithm=algorithm, agrees_once=False, transport="tcp")
    engine = Engine(build_ranks(addresses, rank), settings)
    array, times = np.ones(size // 4, np.float32), []
    for _ in range(_WARM_CALLS + _CALLS.value):
        start_secs = time.monotonic()
        engine.wait(engine.submit("allreduce", "large", [array], op=SUM))
        times.append(time.monotonic() - start_secs)
    engine.close(linger=True)
    return statistics.median(times[_WARM_CALLS:]), min(times[_WARM_CALLS:])


def measure_all(names: list[str], algorithm: str, size: int) -> list[float]:
    """Returns the means of `measure` over the ranks (seconds)."""

    def run_rank(rank: int) -> tuple[float, float]:
        enter_namespace(names[rank])
        return measure(rank, algorithm, size)

    results = run_forked(len(names), run_rank)
    return [statistics.mean(values) for values in zip(*results, strict=True)]


def main(_: list[str]) -> None:
    delay_secs, byte_secs = _DELAY_MS.value / 1e3, 8e-6 / _MBITS.value
    wire = {"latency_secs": delay_secs, "wire_byte_secs": byte_secs}
    print(f"{'bytes':>9} {'algorithm':>9} {'median':>9} {'minimum':>9} {'simulated':>9} {'error':>6}  (ms)")
    for size in map(int, _BYTES.value):
        for algorithm in ALGORITHMS["allreduce"]:
            with namespaces(_RANKS.value, delay_secs, byte_secs) as names:
                median_secs, min_secs = measure_all(names, algorithm, size)
            schedule = record_schedule("allreduce", algorithm, _RANKS.value, size)
            simulated = simulate(schedule, Costs(**network_costs(), **wire))
            simulated_secs = simulated.seconds + 2 * delay_secs
            milliseconds = [1e3 * secs for secs in (median_secs, min_secs, simulated_secs)]
            error = 100 * (simulated_secs / min_secs - 1)
            print(f"{size:9,} {algorithm:>9}", *(f"{ms:9.1f}" for ms in milliseconds), f"{error:+5.0f}%")


if __name__ == "__main__":
    app.run(main)
