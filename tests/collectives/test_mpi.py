"""Transport over MPI: collectives of real processes below `mpirun`, lost ranks, and errors."""

import itertools
import socket
import sys
import types

import numpy as np
import pytest
from conftest import some_of
from ctl.collectives.frames import Lost
from ctl.collectives.transports import mpi
from ctl.collectives.transports.link import CHUNK, connect_links
from ctl.collectives.transports.sockets import SocketTransport
from ctl.errors import UsageError
from mpi_jobs import needs_mpi, run_mpi
from rank_threads import run_on_ranks


@needs_mpi
@pytest.mark.parametrize("count", some_of([2, 3, 4], 3))
def test_collectives_over_mpi_equal_numpy(count):
    result = run_mpi(count, ["tests/programs/mpi_engine.py"])
    assert result.code == 0, result.output
    assert result.json == {
        "compared": 81, "paths": ["mpi"], "tensorflow": False, "size": count, "local_size": count,
    }  # fmt: skip


@needs_mpi
def test_a_killed_rank_ends_the_job(tmp_path):
    result = run_mpi(3, ["tests/programs/mpi_engine.py", "SIGKILL", str(tmp_path)])
    assert result.code != 0


@needs_mpi
def test_a_stopped_rank_ends_the_job_after_the_silence_limit(tmp_path):
    result = run_mpi(3, ["tests/programs/mpi_engine.py", "SIGSTOP", str(tmp_path)])
    assert result.code != 0
    errors = [path.read_text() for path in tmp_path.iterdir()]
    assert any("rank 1 died (silent for" in error for error in errors), result.output


LATE_END = """
import atexit, time
from ctl.collectives.transports import mpi
from ctl.io import exit_hook

def end_late():  # runs after MPI_Finalize
    time.sleep(0.5 * world.rank)
    print(f"rank {world.rank} ends", flush=True)

atexit.register(end_late)
world = mpi.join_world()
exit_hook.end_process(0)  # without exit functions of C libraries
"""


@needs_mpi
def test_processes_may_end_at_different_times_without_exit_functions():
    result = run_mpi(3, ["-c", LATE_END])
    assert result.code == 0, result.output
    assert all(f"rank {rank} ends" in result.output for rank in range(3))


class FakeMpi(types.ModuleType):
    """MPI of one process that has messages in a dictionary."""

    THREAD_MULTIPLE, BYTE, Exception = 3, "byte", KeyError

    def __init__(self, size=2, level=3):
        super().__init__("MPI")
        self.COMM_WORLD = types.SimpleNamespace(size=size)
        self.level = level

    def Is_initialized(self):
        return False

    def Is_finalized(self):
        return False

    def Query_thread(self):
        return self.level

    def Get_library_version(self):
        return "MPICH Version:      5.0\nmore"


@pytest.fixture
def library(monkeypatch):
    """Replaces mpi4py by a module with these contents."""

    def install(**contents):
        module = types.ModuleType("mpi4py")
        module.rc = lambda **options: None
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, "mpi4py", module)
        monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)

    return install


def test_missing_packages_and_mpirun_are_named(library, monkeypatch):
    library(MPI=FakeMpi())
    with pytest.raises(UsageError, match="outside of mpirun; start the program with `mpirun -np N`"):
        mpi.join_world({})
    library()
    with pytest.raises(UsageError, match="mpi4py cannot load an MPI library"):
        mpi.join_world({"PMI_RANK": "0"})
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UsageError, match=r"requires mpi4py. Install it with `pip install 'tf-ctl\[mpi\]'`"):
        mpi.join_world({"PMI_RANK": "0"})


@pytest.mark.parametrize(
    ("fake", "environ", "error_message"),
    [
        (FakeMpi(size=1), {"PMI_SIZE": "4"}, r"has started 4 processes, but MPI \(MPICH Version: +5.0\) c"),
        (FakeMpi(size=1), {"PMI_SIZE": "1"}, "with one process; expected at least 2"),
        (FakeMpi(level=1), {}, r"thread level 1; expected MPI_THREAD_MULTIPLE \(3\)"),
    ],
)
def test_an_unsuitable_mpi_is_refused(fake, environ, error_message):
    with pytest.raises(UsageError, match=error_message):
        mpi._check_initialized(fake, environ)


@pytest.mark.parametrize("sizes", [[0], [7], [CHUNK], [3, 0, CHUNK, 5], [CHUNK + 1, 1, 2 * CHUNK - 2, 9]])
def test_pieces_are_the_concatenation_of_the_arrays(sizes):
    arrays = [np.random.default_rng(i).integers(0, 255, n).astype(np.uint8) for i, n in enumerate(sizes)]
    pieces = list(mpi._split_into_pieces(arrays))
    assert np.concatenate([*pieces, arrays[0][:0]]).tobytes() == np.concatenate(arrays).tobytes()
    assert all(piece.size == CHUNK for piece in pieces[:-1])


class FakeRequest:
    """Request that is never complete."""

    def Test(self):
        return False


def fake_world(**values):
    world = types.SimpleNamespace(
        mpi=FakeMpi(), rank=0, token="a", tags=itertools.count(1), has_failed=False, **values
    )
    world.record_failure = lambda: vars(world).update(has_failed=True)
    world.start_send = world.start_receive = lambda *_: FakeRequest()
    return world


def test_a_link_detects_the_end_of_the_other_process(monkeypatch):
    monkeypatch.setattr(mpi, "_LAST_BYTES_SECS", 0.0)
    own_socket, other_socket = socket.socketpair()
    world = fake_world()
    link = mpi.MpiLink(own_socket, 1, world, 1, 1)
    link.receive(8, np.empty(8, np.uint8), None)
    link.read()
    assert link.needs_read and not link.poll()
    other_socket.close()
    link.read()
    assert not link.needs_read
    with pytest.raises(Lost) as lost:
        while True:
            link.poll()
    assert lost.value.args[1] == 1 and world.has_failed


class OtherPath(SocketTransport):
    path = "mpi"


def test_ranks_with_different_transports_are_refused():
    sockets = socket.socketpair()
    transports = [SocketTransport(), OtherPath()]

    def connect(rank):
        other = 1 - rank
        with pytest.raises(UsageError, match=f"rank {other} sends data over '{transports[other].path}'"):
            connect_links(transports[rank], rank, {other: sockets[rank]})

    run_on_ranks(2, connect)


def test_processes_of_different_jobs_are_refused(monkeypatch):
    monkeypatch.setattr(mpi, "join_world", fake_world)
    own_socket, _ = socket.socketpair()
    with pytest.raises(UsageError, match="rank 3 belongs to another mpirun"):
        mpi.MpiTransport().accept_offer(own_socket, 3, {"token": "b", "world_rank": 0, "tag": 1})
