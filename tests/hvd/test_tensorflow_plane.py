"""CTL_COLLECTIVES=tensorflow: TensorFlow carries collectives out, in the coordinator's order."""

import pytest
from ctl.collectives import tensorflow_plane
from ctl.collectives.settings import Settings
from ctl.errors import UsageError
from ctl.hvd import built, process
from ctl.hvd.elastic_line import LAUNCHER_VARIABLE
from ranks import PROGRAMS, results, run_ranks

pytestmark = pytest.mark.workers
PROGRAM = PROGRAMS / "by_tensorflow.py"
STATIC = {"CTL_COLLECTIVES": "tensorflow"}
ALL = {**STATIC, "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}


def test_collectives_are_those_of_the_other_way():
    for outcomes in results(PROGRAM, 3, "all", environ=ALL):
        assert set(outcomes.values()) == {"ok"}, outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "environ"), [("collectives.py", ALL), ("sets.py", STATIC), ("fusing.py", ALL)]
)
def test_programs_of_the_other_way_run(program, environ):
    for outcomes in results(PROGRAMS / program, 3, environ=environ):
        assert set(outcomes.values()) == {"ok"}, outcomes


def test_tensors_of_gpus_go_this_way_and_others_the_other():
    for outcomes in results(PROGRAM, 2, "devices"):
        assert set(outcomes.values()) == {"ok"}, outcomes


def test_ranks_with_different_planes_use_the_common_one():
    for outcomes in results(PROGRAM, 2, "words", environ=ALL):
        assert outcomes == {"total": [1.0] * 3, "count": 0}


def test_a_rank_that_dies_within_a_collective_is_an_error_on_the_others():
    *survivors, (code, _, _) = run_ranks(PROGRAM, 4, "dies", environ=ALL)  # one is no neighbour
    assert code == 7
    for code, out, err in survivors:
        assert code == 0 and "rank 3 died" in out and '"waits": false' in out, out + err[-2000:]


def test_tensors_that_were_created_before_init_are_reported():
    for outcomes in results(PROGRAM, 2, "late", environ=ALL):
        assert (
            "Call hvd.init() first" in outcomes["said"] and outcomes["code"] == 2 and not outcomes["plane"]
        )


def test_elastic_jobs_are_refused(monkeypatch):
    monkeypatch.setenv(LAUNCHER_VARIABLE, "127.0.0.1:1")
    with pytest.raises(UsageError, match="in an elastic job"):
        process._join_plane(None, Settings(plane="tensorflow"))
    process._join_plane(None, Settings())


@pytest.mark.parametrize(("plane", "gpus", "expected"), [("", True, 1), ("tcp", True, 0), ("", False, 0)])
def test_nccl_built_returns_whether_nccl_is_used(monkeypatch, plane, gpus, expected):
    monkeypatch.setattr(built, "cuda_built", lambda: True)
    monkeypatch.setattr(tensorflow_plane, "has_gpus", lambda: gpus)
    monkeypatch.setenv("CTL_COLLECTIVES", plane)
    assert built.nccl_built() == expected
