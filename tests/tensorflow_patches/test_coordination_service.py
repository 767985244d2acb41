"""TensorFlow's coordination service; two workers use it in tests/workers."""

import pytest
from ctl.tensorflow_patches import coordination_service
from patching import parameters_of
from tensorflow.python.eager import context


@pytest.mark.parametrize(("method", "parameters"), [
    ("set_config_key_value", ["key", "value"]),
    ("get_config_key_value", ["key", "timeout_in_ms"]),
    ("delete_config_key_value", ["key"]),
    ("check_collective_ops_peer_health", ["task", "timeout_in_ms"]),
])  # fmt: skip
def test_the_client_has_the_methods(method, parameters):
    assert parameters_of(getattr(coordination_service.coordination_client(), method)) == parameters


def test_the_heartbeat_is_part_of_the_configuration(monkeypatch):
    new = context.Context()
    monkeypatch.setattr(coordination_service, "eager_context", lambda: new)
    coordination_service.configure_heartbeat("/job:chief/replica:0/task:0", {"chief": 1, "worker": 3}, 2.5)
    config = new.coordination_service
    assert config.heartbeat_timeout_in_ms == 2500
    assert config.service_leader == "/job:chief/replica:0/task:0"
    assert {job.name: job.num_tasks for job in config.coordinated_job_list} == {"chief": 1, "worker": 3}
