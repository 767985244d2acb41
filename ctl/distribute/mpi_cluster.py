"""Cluster configuration of the processes that `mpirun` starts, exchanged through MPI.

mpirun numbers the processes and does not list their addresses. `join_cluster` gathers the host and a free
port of each process, and writes them to TF_CONFIG, which all parts of ctl and TensorFlow read.
"""

import os
import random
import secrets
import socket
from collections.abc import MutableMapping

from ctl.collectives.settings import read_settings
from ctl.collectives.transports import mpi
from ctl.distribute.platforms import listed, tf_config
from ctl.distribute.topology import Topology
from ctl.errors import UsageError
from ctl.io.authenticated_channel import SECRET_VARIABLE

MPI = "mpi"  # the value of --communication and CTL_COLLECTIVES
_PORTS = range(15000, 31000, 2)  # below the ports of clients; the next port is that of the engine
_MAX_ATTEMPTS = 100
_LOOPBACK = "127.0.0.1"


def join_if_requested(communication: str = "auto", environ: MutableMapping[str, str] = os.environ) -> None:
    """Calls `join_cluster` if `communication` or CTL_COLLECTIVES is "mpi"."""
    if communication == MPI or read_settings(environ).transport == MPI:
        join_cluster(environ)


def join_cluster(environ: MutableMapping[str, str] = os.environ) -> None:
    """Initializes MPI and sets TF_CONFIG and the secret of the job. Blocks until all processes call it.

    TF_CONFIG and CTL_WORKERS have priority if they are set. Further calls are no-ops.

    Raises:
      UsageError: If mpi4py or its library is missing or unsuitable, or outside of mpirun.
      HorovodInternalError: If another process does not call it within HOROVOD_START_TIMEOUT.
    """
    world = mpi.join_world(environ)
    if environ.get(tf_config.TF_CONFIG, "").strip() or environ.get(listed.WORKERS_VARIABLE, "").strip():
        return
    host = socket.gethostname()
    hosts = world.allgather(host)
    with _bind_free_port() as server:  # until all processes of this host have chosen different ports
        name = _LOOPBACK if len(set(hosts)) == 1 else host
        addresses = world.allgather(f"{name}:{server.getsockname()[1]}")
    environ[tf_config.TF_CONFIG] = Topology({"worker": tuple(addresses)}, "worker", world.rank).tf_config()
    environ[SECRET_VARIABLE] = world.allgather(environ.get(SECRET_VARIABLE) or secrets.token_hex(32))[0]


def _bind_free_port() -> socket.socket:
    """Returns a socket that is bound to a free port of all interfaces."""
    for port in (*random.sample(_PORTS, _MAX_ATTEMPTS), 0):
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            server.bind(("", port))
            return server
        except OSError:
            server.close()
    raise UsageError("no TCP port of this machine is free; expected one for the address of this process.")
