"""Cluster configuration of the processes of mpirun, with a fake MPI."""

import json
import sys
import types

import ctl.hvd as hvd
import pytest
from ctl.collectives.transports import mpi
from ctl.distribute import mpi_cluster, rank_variables
from ctl.hvd import built


@pytest.fixture
def join(monkeypatch):
    """A function that joins rank 1 of two processes on these hosts. Returns its environment."""

    def run(hosts, **environ):
        gathered = []

        def allgather(text):
            gathered.append(text)
            other = {1: hosts[0], 2: f"{hosts[0]}:15000", 3: "secret of rank 0"}[len(gathered)]
            return [other, text]

        world = types.SimpleNamespace(rank=1, allgather=allgather)
        monkeypatch.setattr(mpi, "join_world", lambda environ: world)
        monkeypatch.setattr(mpi_cluster.socket, "gethostname", lambda: hosts[1])
        mpi_cluster.join_cluster(environ)
        return environ

    return run


def test_addresses_are_those_that_mpi_gathers(join):
    environ = join(["host1", "host2"])
    config = json.loads(environ["TF_CONFIG"])
    first, second = config["cluster"]["worker"]
    assert first == "host1:15000"
    host, _, port = second.partition(":")
    assert host == "host2" and int(port) > 1024
    assert config["task"] == {"type": "worker", "index": 1}
    assert environ["CTL_HVD_SECRET"] == "secret of rank 0"
    ranks = rank_variables.read_ranks(environ)
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.cross_rank) == (1, 2, 0, 1)


def test_processes_of_one_machine_use_its_loopback_address(join):
    config = json.loads(join(["host1", "host1"])["TF_CONFIG"])
    assert config["cluster"]["worker"][1].startswith("127.0.0.1:")


@pytest.mark.parametrize("name", ["TF_CONFIG", "CTL_WORKERS"])
def test_a_given_cluster_has_priority(name, join):
    assert join(["host1", "host2"], **{name: "value"}) == {name: "value"}


def test_mpi_is_joined_only_on_request(monkeypatch):
    joined = []
    monkeypatch.setattr(mpi_cluster, "join_cluster", joined.append)
    mpi_cluster.join_if_requested("auto", {"PMI_RANK": "0"})
    assert not joined
    mpi_cluster.join_if_requested("mpi", {})
    mpi_cluster.join_if_requested("auto", {"CTL_COLLECTIVES": "mpi"})
    assert len(joined) == 2


def test_hvd_reports_whether_mpi_is_used(monkeypatch):
    monkeypatch.delenv("CTL_COLLECTIVES", raising=False)
    assert not hvd.mpi_enabled() and hvd.gloo_enabled() and not hvd.mpi_threads_supported()
    monkeypatch.setattr(built.importlib.util, "find_spec", lambda name: None)
    assert not hvd.mpi_built()
    monkeypatch.setattr(built.importlib.util, "find_spec", lambda name: object())
    assert hvd.mpi_built()
    monkeypatch.setenv("CTL_COLLECTIVES", "mpi")
    assert hvd.mpi_enabled() and not hvd.gloo_enabled()
    fake = types.ModuleType("MPI")
    fake.THREAD_MULTIPLE, fake.Is_initialized, fake.Query_thread = 3, lambda: True, lambda: 3
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    assert hvd.mpi_threads_supported()
