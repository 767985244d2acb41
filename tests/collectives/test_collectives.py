"""Collectives between real processes, each with numbers that NumPy says too."""

import re

import pytest
from hvd.ranks import PROGRAMS, results

CASES = re.findall(r"^def case_(\w+)", (PROGRAMS / "collectives.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def said(request):
    return results(PROGRAMS / "collectives.py", request.param)


@pytest.mark.parametrize("case", CASES)
def test_a_collective_gives_the_numbers_of_numpy_on_every_rank(said, case):
    for rank, of_rank in enumerate(said):
        assert of_rank[case] == "ok", f"rank {rank}:\n{of_rank[case]}"


def test_one_rank_alone_needs_nobody():
    (said,) = results(
        "import tensorflow as tf, ctl.hvd as hvd, json\n"
        "hvd.init()\n"
        "x = tf.constant([3.0, 1.0])\n"
        "found = [hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0), hvd.alltoall(x),\n"
        "         hvd.reducescatter(x), tf.function(hvd.allreduce)(x)]\n"
        "assert hvd.broadcast_object({'a': 1}) == {'a': 1} and hvd.allgather_object(2) == [2]\n"
        "print(json.dumps({'same': all((f.numpy() == x.numpy()).all() for f in found)}))\n",
        1,
    )
    assert said["same"]
