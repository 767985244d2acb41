"""TensorFlow's collectives between ranks."""

import pytest
from ctl.tensorflow_patches import collective_runtime
from patching import parameters_of
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.eager import context


@pytest.mark.parametrize(("method", "parameters"), [
    ("configure_collective_ops", {"collective_leader", "device_filters"}),
    ("enable_collective_ops", {"server_def"}),
    ("abort_collective_ops", {"code", "message"}),
])  # fmt: skip
def test_tensorflow_has_the_methods(method, parameters):
    assert parameters <= set(parameters_of(getattr(context.Context, method)))


def test_the_methods_are_called_before_the_context_exists(monkeypatch):
    calls = []
    new = context.Context()
    assert new._context_handle is None
    monkeypatch.setattr(collective_runtime, "eager_context", lambda: new)
    monkeypatch.setattr(new, "enable_collective_ops", calls.append)
    collective_runtime.enable_collectives(1001, {1000: "a:1", 1001: "b:2"}, "leader")
    collective_runtime.abort_collectives("a no-op without a handle")
    server = tensorflow_server_pb2.ServerDef.FromString(calls[0].SerializeToString())
    assert (server.job_name, server.task_index) == ("worker", 1001)
    assert dict(server.cluster.job[0].tasks) == {1000: "a:1", 1001: "b:2"}
    assert server.default_session_config.experimental.collective_group_leader == "leader"
    assert list(server.default_session_config.device_filters) == ["/job:worker/task:1001"]
