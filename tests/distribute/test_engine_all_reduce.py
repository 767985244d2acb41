"""The sums of a MultiWorkerMirroredStrategy over the engine: the same numbers as over TensorFlow's ring."""

import pytest


@pytest.mark.workers
def test_two_workers_sum_over_the_engine_as_over_the_ring(run_program, tmp_path):
    results = [r.json for r in run_program(2, ["tests/programs/engine_paths.py", str(tmp_path)])]
    for found in results:
        assert found["paths"] == ["memory"]
        assert found["sums"] and found["weights"] and found["fits"]
        assert found["kept"] == ["ring", "ring"]
        assert found["unreachable"][:2] == [True, True]
        assert "no way to rank 0" in found["refused"] or "not here after" in found["refused"]
    chief, other = results
    (line,) = chief["measured"]
    assert "tcp " in line and "ring " in line and line.endswith(("-> tcp", "-> ring"))
    assert other["measured"] == [] and other["unreachable"][2] == []
    assert any("stays with TensorFlow's ring" in said for said in chief["unreachable"][2])
