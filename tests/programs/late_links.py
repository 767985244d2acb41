"""Collectives of nine ranks that need further connections. Prints one result per rank.

    late_links.py all                 results, and numbers of links and open ports before and after
    late_links.py lost before_port    rank 4 ends before it sends its port; the errors of the others
    late_links.py lost after_port     rank 4 ends before it connects
"""

import contextlib
import functools
import json
import os
import socket
import stat
import sys
import time

import forked_ranks
import ml_dtypes
import numpy as np
from ctl.collectives import bootstrap
from ctl.collectives.arithmetic import SUM
from ctl.collectives.engine import Engine
from ctl.collectives.errors import HorovodInternalError
from ctl.collectives.late_links import LateLinks
from ctl.collectives.ranks import build_ranks
from ctl.collectives.settings import Settings

COUNT, LOST, ROWS = 9, 4, 9 << 13
PAUSE_SECS = 1.0  # the ranks that do not connect to the lost one wait for those that do
SETS = (0, 3, 6), (8, 1, 5, 2)


def num_listening():
    """Returns the number of sockets of this process that listen at a port."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the list has been closed
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    total += sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return total


def record_ports():
    """Returns a list to which each later rendezvous of this process adds the port at which it listens."""
    ports, original = [], bootstrap.connect_peers

    def connect_peers(ranks, settings, peers, lost, server):
        ports.append(server.getsockname()[1])
        return original(ranks, settings, peers, lost, server)

    bootstrap.connect_peers = connect_peers
    return ports


def run_collectives(engine, rank):
    def call(collective, array, **fields):
        (result,) = engine.wait(engine.submit(collective, collective, [array], **fields))
        return result.astype(np.float64)

    ports = record_ports()
    num_links = [len(engine._mesh.paths)]
    values = np.full(ROWS, rank + 1, np.float32)
    total = sum(range(1, COUNT + 1))
    correct = [bool((call("allreduce", values, op=SUM) == total).all())]
    num_links.append(len(engine._mesh.paths))
    for members in SETS:
        pending = engine.submit("add_process_set", f"add {members}", splits=list(members))
        engine.wait(pending)
        if rank in members:
            summed = call("allreduce", values, op=SUM, process_set=pending.response["number"])
            correct.append(bool((summed == sum(member + 1 for member in members)).all()))
    received = call("alltoall", values, splits=(ROWS // COUNT,) * COUNT)
    correct.append(received.tolist() == np.repeat(np.arange(1.0, COUNT + 1), ROWS // COUNT).tolist())
    part = call("reducescatter", values.astype(ml_dtypes.bfloat16), op=SUM)
    correct.append(part.size == ROWS // COUNT and bool((part == total).all()))
    correct.append(bool((call("allreduce", values, op=SUM) == total).all()))
    num_links.append(len(engine._mesh.paths))
    return {"links": num_links, "correct": correct, "listening": num_listening(), "ports": ports}


def end(pause_secs):
    time.sleep(pause_secs)
    os._exit(0)


def error_of_all_to_all(engine, rank, moment):
    if rank == LOST:
        owner, name = (LateLinks, "_connect") if moment == "before_port" else (bootstrap, "connect_peers")
        setattr(owner, name, lambda *arguments: end(0.0 if moment == "before_port" else PAUSE_SECS))
    try:
        values = np.ones(ROWS, np.float32)
        engine.wait(engine.submit("alltoall", "large", [values], splits=(ROWS // COUNT,) * COUNT))
    except HorovodInternalError as e:
        return {"error": str(e)}
    return {"error": None}


def run_rank(rank, addresses, server, *, function):
    engine = Engine(build_ranks(addresses, rank), Settings(algorithm="ring"), server=server)
    return function(engine, rank)


def main(scenario, *arguments):
    function = run_collectives
    if scenario == "lost":
        function = functools.partial(error_of_all_to_all, moment=arguments[0])
    function = functools.partial(run_rank, function=function)
    hosts = ["127.0.0.1"] * COUNT
    outcomes, addresses = forked_ranks.run(function, hosts, keeps_ports=scenario == "lost")
    print(json.dumps({"ranks": outcomes, "addresses": addresses}))


if __name__ == "__main__":
    main(*sys.argv[1:])
