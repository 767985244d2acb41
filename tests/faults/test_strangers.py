"""Strangers at a port of a job that starts: the job neither ends, nor waits, nor lets them in."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
from conftest import ROOT, TIMEOUT_SECS, environment, free_ports
from ctl.collectives import bootstrap, ranks
from ctl.collectives.settings import Settings
from hvd.elastic_jobs import ElasticJob
from hvd.ranks import rank_environment
from polling import wait_until
from strangers import connect, crowd

pytestmark = pytest.mark.workers

BARRIER_PROGRAM = """
import json, sys
from ctl.distribute import startup_barrier
from ctl.distribute.platforms import detection
input()
startup_barrier.run_barrier(detection.read_topology(), {"--lr": 0.1}, 60.0)
print(json.dumps("met"))
"""
INIT_PROGRAM = """
import json, os, pathlib
import ctl.hvd as hvd
input()
hvd.init()
open_files = set()
for f in pathlib.Path("/proc/self/fd").iterdir():
    try: open_files.add(os.readlink(f))
    except FileNotFoundError: pass  # closed meanwhile
open_ports = [
    line.split()[1] for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
    if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in open_files
]
total = hvd.allreduce(float(hvd.rank()), op=hvd.Sum).numpy()
print(json.dumps([hvd.size(), float(total), open_ports]))
"""


def start(program, environ):
    return processes.start(
        [sys.executable, "-c", program], env=environ, cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def started_amid_a_crowd(program, environs, port):
    """Returns the output of two processes. A crowd uses the first one's port before the second starts."""
    started = []
    try:
        started += [start(program, environ) for environ in environs]
        started[0].stdin.write("\n")
        started[0].stdin.flush()
        wait_until(lambda: connect(port), started[0])
        with crowd(port, silent=1200):
            for _ in range(200):  # before the other process connects
                connect(port)
            outputs = [process.communicate("\n", timeout=TIMEOUT_SECS) for process in started[::-1]]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, err) in zip(started[::-1], outputs, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.parametrize("secret", ["known to this job only", ""])
def test_workers_connect_despite_other_connections(secret):
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    environs = [
        environment(
            CTL_HVD_SECRET=secret,
            TF_CONFIG=json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            ),
        )
        for index in range(2)
    ]
    assert started_amid_a_crowd(BARRIER_PROGRAM, environs, ports[0]) == ["met", "met"]


def test_two_ranks_find_each_other_amid_strangers_and_listen_no_more():
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    port = int(addresses[0].rpartition(":")[2])
    ranks_of_job = [ranks.build_ranks(addresses, rank) for rank in range(2)]
    settings = Settings(start_timeout=TIMEOUT_SECS, secret=b"known to this job only")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(bootstrap.connect_ranks, ranks_of_job[0], settings)
        wait_until(lambda: connect(port) or first.done())
        assert not first.done(), first.result()
        with crowd(port, silent=600):
            for _ in range(200):  # before the other process connects
                connect(port)
            second = pool.submit(bootstrap.connect_ranks, ranks_of_job[1], settings).result(TIMEOUT_SECS)
            first = first.result(TIMEOUT_SECS)
    assert connect(port) is None
    second.peers[0].sendall(b"peer")
    second.control.sendall(b"control")
    assert first.peers[1].recv(8) == b"peer" and first.accepted[1].recv(8) == b"control"
    open_still = [first.control, second.control, first.peers[1], second.peers[0]]
    for connection in [*open_still, *first.accepted.values()]:
        connection.close()


@pytest.mark.slow
def test_ranks_connect_despite_other_connections_and_close_their_ports():
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    environs = [
        rank_environment(rank, addresses, CTL_HVD_SECRET="known to this job only") for rank in range(2)
    ]
    assert started_amid_a_crowd(INIT_PROGRAM, environs, ports[0]) == [[2, 1.0, []]] * 2


@pytest.mark.slow
def test_a_rank_that_died_is_replaced_amid_strangers(tmp_path):
    job = ElasticJob(tmp_path, "localhost:2", "-np", "2", "--min-np", "1")
    job.wait_for_step(3, 2)
    port = next(
        int(variable.rpartition(b":")[2])
        for fact in job.steps(3, 2)
        for variable in Path(f"/proc/{fact['pid']}/environ").read_bytes().split(b"\0")
        if variable.startswith(b"CTL_HVD_RENDEZVOUS=")
    )
    with crowd(port, silent=600):
        job.die(5)
        job.go(8)  # the remaining rank trains alone, because the new one starts a second later
        job.wait(lambda: "group 3: 2 ranks" in job.output)
        job.go(20)
        job.wait_for_step(20, 2)
        job.go(1000)
        code, output = job.end()
    assert code == 0 and "no further process is started there" not in output, output[-3000:]
