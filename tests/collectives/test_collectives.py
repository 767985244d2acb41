"""Collectives between processes, compared with NumPy."""

import re

import pytest
from hvd.ranks import PROGRAMS, results, run_ranks

CASES = re.findall(r"^def case_(\w+)", (PROGRAMS / "collectives.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def results_by_rank(request):
    return results(PROGRAMS / "collectives.py", request.param)


@pytest.mark.parametrize("case", CASES)
def test_a_collective_gives_the_numbers_of_numpy_on_every_rank(results_by_rank, case):
    for rank, case_results in enumerate(results_by_rank):
        assert case_results[case] == "ok", f"rank {rank}:\n{case_results[case]}"


def test_one_rank_alone_needs_no_peer():
    (result,) = results(
        "import tensorflow as tf, ctl.hvd as hvd, json\n"
        "hvd.init()\n"
        "x = tf.constant([3.0, 1.0])\n"
        "found = [hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0), hvd.alltoall(x),\n"
        "         hvd.reducescatter(x), tf.function(hvd.allreduce)(x)]\n"
        "assert hvd.broadcast_object({'a': 1}) == {'a': 1} and hvd.allgather_object(2) == [2]\n"
        "print(json.dumps({'same': all((f.numpy() == x.numpy()).all() for f in found)}))\n",
        1,
    )
    assert result["same"]


LARGE_SUM = """
import json, os, socket
import ctl.hvd as hvd, numpy as np
hvd.init()
x = np.random.default_rng(hvd.rank()).normal(size=1_300_001).astype(np.float32)
total = hvd.allreduce(x, op=hvd.Sum).numpy()
want = sum(np.random.default_rng(r).normal(size=x.size).astype(np.float32) for r in range(2))
fp16 = hvd.Compression.fp16
half = [hvd.allreduce(x, op=hvd.Sum, compression=fp16), hvd.reducescatter(x, op=hvd.Sum, compression=fp16)]
parts = [total, hvd.reducescatter(x, op=hvd.Sum)]
rounded = [not np.array_equal(h, p) for h, p in zip(half, parts)]
sockets = 0
for name in os.listdir("/proc/self/fd"):
    try:
        sockets += socket.socket(fileno=os.dup(int(name))).getpeername()[0] == "127.0.0.1"
    except (OSError, IndexError):
        pass
hvd.barrier()  # a rank that ends closes its sockets
print(json.dumps({"same": bool((total == want).all()), "sockets": sockets, "rounded": rounded}))
"""


@pytest.mark.parametrize("plane", ["tcp", "auto"])
def test_a_large_tensor_is_summed_over_one_socket_to_the_other_rank(plane):
    rounded = [plane == "tcp"] * 2  # compression applies to networks, not to shared memory
    sockets = 2  # the second one connects the rank with the coordinator
    expected = {"same": True, "sockets": sockets, "rounded": rounded}
    assert results(LARGE_SUM, 2, environ={"CTL_COLLECTIVES": plane}) == [expected] * 2


def test_an_unknown_data_plane_is_refused_before_ranks_connect():
    for code, _, err in run_ranks(LARGE_SUM, 2, environ={"CTL_COLLECTIVES": "many"}):
        assert code and "CTL_COLLECTIVES is 'many'; expected one of auto, tcp, mpi, tensorflow" in err
