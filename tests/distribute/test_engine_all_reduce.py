"""Sums of a MultiWorkerMirroredStrategy over the engine, compared with TensorFlow's ring."""

import pytest
import tensorflow as tf
from conftest import free_ports
from ctl.distribute import engine_all_reduce
from ctl.distribute.topology import Topology


@pytest.mark.workers
def test_two_workers_sum_over_the_engine_as_over_the_ring(run_program, tmp_path):
    results = [r.json for r in run_program(2, ["tests/programs/engine_paths.py", str(tmp_path)])]
    for result in results:
        assert result["paths"] == ["memory"]
        assert result["sums"] and result["weights"] and result["fits"]
        assert result["rounded"] == [True, False]  # 16 bits are for a network
        assert result["kept"] == ["ring", "ring"]
        assert result["unreachable"][:2] == [True, True]
        assert "no way to rank 0" in result["refused"] or "not connected after" in result["refused"]
    chief, worker = results
    (line,) = chief["measured"]
    assert "tcp " in line and "ring " in line and line.endswith(("-> tcp", "-> ring"))
    assert worker["measured"] == [] and worker["unreachable"][2] == []
    assert any("use TensorFlow's ring" in message for message in chief["unreachable"][2])


def test_a_worker_listens_at_the_port_after_its_own_or_at_a_free_one():
    for _ in range(20):
        (port,) = free_ports(1)
        topology = Topology({"worker": (f"127.0.0.1:{port}", "127.0.0.1:1")})
        with engine_all_reduce._listening(topology) as server:
            if server.getsockname()[1] != port + 1:  # another program had it
                continue
            with engine_all_reduce._listening(topology) as other_server:
                assert other_server.getsockname()[1] not in (port, port + 1)
            return
    raise AssertionError("the next port was never taken")


class FakeCoordinationService:
    """Coordination service that returns a text after some polls, and one health state per call."""

    def __init__(self, num_polls, *states):
        self.num_polls, self.states = num_polls, list(states)

    def get_config_key_value(self, key, timeout_in_ms):
        if self.num_polls:
            self.num_polls -= 1
            raise tf.errors.DeadlineExceededError(None, None, "no text yet")
        return f"text of {key}"

    def check_collective_ops_peer_health(self, task, timeout_in_ms):
        state = self.states.pop(0)
        if state is not None:
            raise state(None, None, f"{task} is gone")


UNAVAILABLE, DEADLINE_EXCEEDED = tf.errors.UnavailableError, tf.errors.DeadlineExceededError


def test_the_wait_for_a_worker_ends_when_its_process_has_ended():
    service = FakeCoordinationService(
        100, None, UNAVAILABLE, DEADLINE_EXCEEDED, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE
    )
    with pytest.raises(tf.errors.UnavailableError, match="task:1 is gone"):
        engine_all_reduce._text_of(service, "/job:worker/replica:0/task:1", "key")
    assert service.states == []


def test_a_worker_that_is_late_is_waited_for():
    service = FakeCoordinationService(5, DEADLINE_EXCEEDED, UNAVAILABLE, UNAVAILABLE, None, UNAVAILABLE)
    assert engine_all_reduce._text_of(service, "/job:worker/replica:0/task:1", "key") == "text of key"
