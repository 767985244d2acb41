"""Time of an all-reduce between two machines, by the number of sockets that join them.

    python tests/benchmarks/sockets.py --rounds=3

As root: the machines are network namespaces, joined by one wire, or by several links of which a
connection uses one, as switches and clouds do it. Each round runs every number, one after the other;
printed are medians over rounds of the median call, and their ratio to one socket.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from communication import namespaces

ROOT = Path(__file__).resolve().parents[2]
SIZE_MB, CALLS = 64, 12
LINKS = 4  # of 1 Gbit/s, joined


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sockets", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--only", action="store_true", help="one rank, in this process")
    flags = parser.parse_args()
    if flags.only:
        print(json.dumps(timed()))
        return
    for name, shape in NETWORKS.items():
        rounds = {count: [] for count in flags.sockets}
        with namespaces(shape) as inside:
            for _ in range(flags.rounds):
                for count, found in rounds.items():
                    found.append(run(count, inside))
        medians = {count: statistics.median(found) for count, found in rounds.items()}
        one = medians[flags.sockets[0]]
        row = ", ".join(f"{count}: {1000 * m:.0f} ms ({m / one:.2f})" for count, m in medians.items())
        print(f"{name}, {SIZE_MB} MB: {row}", flush=True)


def one_wire(rate):
    """For `namespaces`: all connections share it."""
    shape = ["root", "tbf", "rate", rate, "burst", "1m", "latency", "50ms"]
    return lambda device, side: [["qdisc", "add", "dev", device, *shape]]


def joined_links(device, side):
    """For `namespaces`: which of the links carries a connection is decided by its port."""
    port = "sport" if side else "dport"  # of the second machine, which calls the first one
    shape = [["qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1"]]
    for i in range(LINKS):
        link = ["classid", f"1:{i + 1}", "htb", "rate", "1gbit", "quantum", "60000"]
        match = ["u32", "match", "ip", port, str(2 * i), "0x0006", "flowid", f"1:{i + 1}"]
        shape += [["class", "add", "dev", device, "parent", "1:", *link]]
        shape += [["filter", "add", "dev", device, "parent", "1:", "protocol", "ip", *match]]
    return shape


NETWORKS = {
    "1 Gbit/s": one_wire("1gbit"),
    "10 Gbit/s": one_wire("10gbit"),
    f"{LINKS} links of 1 Gbit/s, one for each connection": joined_links,
}


def run(count, inside):
    places = {"cluster": {"worker": ["10.99.0.1:2222", "10.99.0.2:2222"]}}
    started = []
    with tempfile.TemporaryFile() as out:
        for rank, before in enumerate(inside):
            environ = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "TF_CONFIG": json.dumps({**places, "task": {"type": "worker", "index": rank}}),
                "HOROVOD_RANK": str(rank),
                "HOROVOD_SIZE": "2",
                "CTL_COLLECTIVES": "tcp",
                "CTL_SOCKETS_PER_PEER": str(count),
            }
            command = [*before, sys.executable, __file__, "--only"]
            stdout = subprocess.DEVNULL if rank else out
            started.append(subprocess.Popen(command, env=environ, stdout=stdout))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        out.seek(0)
        return json.loads(out.read().splitlines()[-1])


def timed():
    import ctl.hvd as hvd
    import tensorflow as tf

    hvd.init()
    x = tf.random.normal([SIZE_MB << 18])
    seconds = []
    for _ in range(CALLS):
        hvd.barrier()
        start = time.perf_counter()
        hvd.allreduce(x, op=hvd.Sum, name="x")
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


if __name__ == "__main__":
    main()
