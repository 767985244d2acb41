"""The sums of a MultiWorkerMirroredStrategy over the engine: the same numbers as over TensorFlow's ring."""

import pytest
from conftest import free_ports
from ctl.distribute import engine_all_reduce
from ctl.distribute.topology import Topology


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


def test_a_worker_listens_at_the_port_after_its_own_or_at_a_free_one():
    for _ in range(20):
        (port,) = free_ports(1)
        topology = Topology({"worker": (f"127.0.0.1:{port}", "127.0.0.1:1")})
        with engine_all_reduce._listening(topology) as server:
            if server.getsockname()[1] != port + 1:  # another program had it
                continue
            with engine_all_reduce._listening(topology) as other:
                assert other.getsockname()[1] not in (port, port + 1)
            return
    raise AssertionError("the next port was never taken")
