"""Threads as the ranks of a group."""

import functools
import itertools
import socket
import threading

from ctl.collectives.mesh import Mesh
from ctl.collectives.settings import Settings
from hypothesis import strategies as st

# ranks of a group of nine, in any order
PROCESS_SETS = st.lists(st.integers(0, 8), min_size=1, max_size=9, unique=True)


def connected(count):
    """Returns meshes of at most nine ranks. Tests share them, because they have many files."""
    return _nine_meshes()[:count]


@functools.cache
def _nine_meshes():
    return meshes(9)


def meshes(count, **settings):
    """One mesh per rank, all connected."""
    pairs = {pair: socket.socketpair() for pair in itertools.combinations(range(count), 2)}
    peers = [
        {b if rank == a else a: ends[rank == b] for (a, b), ends in pairs.items() if rank in (a, b)}
        for rank in range(count)
    ]
    controls = [socket.socketpair()[0] for _ in range(count)]

    def build_mesh(rank):
        return Mesh(rank, peers[rank], controls[rank], lambda: True, lambda: None, Settings(**settings))

    return run_on_ranks(count, build_mesh)


def run_on_ranks(count, call):
    """Calls `call(rank)` for each rank in a thread. Returns the results, or raises the first error."""
    results, errors = [None] * count, []

    def run(rank):
        try:
            results[rank] = call(rank)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=[rank], daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results
