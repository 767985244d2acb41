"""Strategies by name, and errors for invalid names, devices and options."""

import json
import os
import socket

import ctl
import numpy as np
import pytest
import tensorflow as tf
from conftest import some_of
from ctl.distribute import strategy_factories
from ctl.distribute.strategies import STRATEGY_NAMES, topology_of
from ctl.distribute.strategy_kind import strategy_name
from ctl.distribute.topology import Topology
from small_models import Small, every_step, losses


@pytest.fixture
def used_port():
    """A port at which another socket listens."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


def set_config(monkeypatch, addresses, task_type="worker", index=0, **extra_tasks):
    cluster = {"worker": addresses, **extra_tasks}
    text = json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})
    monkeypatch.setenv("TF_CONFIG", text)


@pytest.mark.parametrize("name", ["default", "one_device", "mirrored", "central_storage"])
def test_the_name_of_a_strategy_is_returned_for_it(name):
    assert strategy_name(ctl.make_strategy(name)) == name


def test_auto_takes_all_devices_or_the_given_ones():
    assert ctl.make_strategy("auto").num_replicas_in_sync == 2
    assert strategy_name(ctl.make_strategy("auto", devices=["cpu:0"])) == "one_device"
    assert strategy_name(ctl.make_strategy("auto", devices=["cpu:0", "cpu:1"])) == "mirrored"


@pytest.mark.parametrize("name", ["", "Mirrored", "gpu", "multi-worker"])
def test_an_unknown_name_is_refused_with_all_names(name):
    with pytest.raises(ctl.UsageError, match=rf"strategy is {name!r}; .*{', '.join(STRATEGY_NAMES)}"):
        ctl.make_strategy(name)


@pytest.mark.parametrize("text", ["cpu:1", "CPU:1", "/cpu:1", "/device:CPU:1", "device:cpu:1", " cpu:1 "])
def test_a_device_may_be_written_in_many_ways(text):
    assert ctl.make_strategy("one_device", devices=[text]).extended.worker_devices[0].endswith("CPU:1")


@pytest.mark.parametrize("text", ["cpu:7", "gpu:0", "cpu:x", "", "tpu", "cpu:01"])
@pytest.mark.parametrize("name", ["one_device", "mirrored"])
def test_a_missing_device_is_refused_with_the_existing_ones(name, text):
    with pytest.raises(ctl.UsageError, match=rf"device {text!r} does not exist.*cpu:0, cpu:1"):
        ctl.make_strategy(name, devices=[text])


@pytest.mark.parametrize("name", ["default", "one_device"])
def test_one_device_with_two_is_refused(name):
    with pytest.raises(ctl.UsageError, match=rf"'{name}' uses one device and got 2.*'mirrored'"):
        ctl.make_strategy(name, devices=["cpu:0", "cpu:1"])


def test_a_device_twice_is_refused():
    with pytest.raises(ctl.UsageError, match="one device twice"):
        ctl.make_strategy("mirrored", devices=["cpu:0", "CPU:0"])


def test_virtual_devices_after_the_start_are_refused_unless_they_exist():
    assert ctl.make_strategy("mirrored", num_virtual_devices=2).num_replicas_in_sync == 2
    tf.constant(0)
    with pytest.raises(ctl.UsageError, match="num_virtual_devices=3 was set after"):
        ctl.make_strategy("mirrored", num_virtual_devices=3)
    with pytest.raises(ctl.UsageError, match="num_virtual_devices is -1"):
        ctl.make_strategy("mirrored", num_virtual_devices=-1)


@pytest.mark.parametrize("name", ["default", "one_device", "mirrored"])
def test_several_workers_that_would_train_alone_are_refused(monkeypatch, name):
    set_config(monkeypatch, ["127.0.0.1:1", "127.0.0.1:2"])
    with pytest.raises(ctl.UsageError, match=rf"'{name}', but TF_CONFIG names 2 workers"):
        ctl.make_strategy(name)


@pytest.mark.parametrize("name", ["auto", "multi_worker"])
def test_a_port_in_use_is_named(monkeypatch, used_port, name):
    set_config(monkeypatch, [f"127.0.0.1:{used_port}", "127.0.0.1:9"])
    with pytest.raises(ctl.UsageError, match=rf"Port {used_port} of .* is in use"):
        ctl.make_strategy(name)


def test_devices_do_not_go_with_multi_worker(monkeypatch):
    set_config(monkeypatch, ["127.0.0.1:1", "127.0.0.1:2"])
    with pytest.raises(ctl.UsageError, match="got devices cpu:0.*CUDA_VISIBLE_DEVICES"):
        ctl.make_strategy("multi_worker", devices=["cpu:0"])


def test_a_parameter_server_is_refused(monkeypatch):
    set_config(monkeypatch, ["127.0.0.1:1"], task_type="ps", ps=["127.0.0.1:2"])
    with pytest.raises(ctl.UsageError, match="makes this process a 'ps'"):
        ctl.make_strategy("multi_worker")


@pytest.mark.parametrize("name", STRATEGY_NAMES)
@pytest.mark.parametrize("listed", [True, False])
def test_an_evaluator_has_its_own_strategy_for_every_name(monkeypatch, name, listed):
    extra_tasks = {"evaluator": ["127.0.0.1:3"]} if listed else {}
    set_config(monkeypatch, ["127.0.0.1:1", "127.0.0.1:2"], task_type="evaluator", **extra_tasks)
    before = os.environ["TF_CONFIG"]
    strategy = ctl.make_strategy(name)
    assert strategy_name(strategy) == "default" and os.environ["TF_CONFIG"] == before
    topology = topology_of(strategy)
    assert topology == Topology(task_type="evaluator", has_evaluator=listed)
    assert (topology.num_workers, topology.worker_index) == (1, 0)
    assert (topology.is_chief, topology.evaluates) == (False, True)


def test_a_bad_tf_config_is_refused_for_every_name(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    for name in STRATEGY_NAMES:
        with pytest.raises(ctl.UsageError, match="TF_CONFIG is not JSON"):
            ctl.make_strategy(name)


def test_a_topology_counts_the_replicas_of_one_process(two_replicas):
    assert topology_of(two_replicas) == Topology(num_replicas=2, num_local_replicas=2)
    assert topology_of(two_replicas).is_chief
    for name in ("default", "one_device"):
        assert topology_of(ctl.make_strategy(name)) == Topology()


TWO_STRATEGIES_PROGRAM = """
import ctl, json, tensorflow as tf
sums = []
for dtype in (tf.float32, tf.float16):
    strategy = ctl.make_strategy("mirrored", num_virtual_devices=2)
    @tf.function
    def total():
        def share():
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([5], dtype))
        return strategy.experimental_local_results(strategy.run(share))[0]
    sums.append(total().numpy().tolist())
print(json.dumps({"sums": sums}))
"""


@pytest.mark.workers
def test_a_second_mirrored_strategy_of_a_process_does_not_mix_with_the_first(run_program):
    result = run_program(1, ["-c", TWO_STRATEGIES_PROGRAM])[0]
    assert result.code == 0, result.output[-500:]
    assert result.json == {"sums": [[2.0] * 5] * 2}


class FakeResolver:
    """Resolver of a TPU that does not exist."""

    def __init__(self, master="grpc://10.0.0.2:8470"):
        self._master = master

    def master(self):
        return self._master


def test_a_tpu_is_connected_and_initialised_before_the_strategy_is_made(monkeypatch):
    calls = []
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", lambda r: calls.append("connect"))
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda r: calls.append("init"))
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda r: calls.append("strategy") or "made")
    tpu_names = []
    resolvers = tf.distribute.cluster_resolver
    monkeypatch.setattr(
        resolvers, "TPUClusterResolver", lambda tpu: tpu_names.append(tpu) or FakeResolver()
    )
    assert strategy_factories.tpu("my-tpu") == "made"
    assert (tpu_names, calls) == (["my-tpu"], ["connect", "init", "strategy"])
    calls.clear()
    assert strategy_factories.tpu(resolver=FakeResolver("local")) == "made"
    assert calls == ["init", "strategy"], "a local TPU is connected to already"


def test_without_a_tpu_the_strategy_is_refused(monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    with pytest.raises(ctl.UsageError, match=r"found no TPU.*TPU_NAME"):
        ctl.make_strategy("tpu")
    with pytest.raises(ctl.UsageError, match=r"cannot use the local TPU"):
        strategy_factories.tpu(resolver=FakeResolver("local"))


def test_auto_takes_the_tpu_that_the_environment_names(monkeypatch):
    class Tpu:
        def __init__(self, name):
            self.tpu = name

    monkeypatch.setenv("TPU_NAME", "my-tpu")
    monkeypatch.setattr(strategy_factories, "tpu", Tpu)
    assert ctl.make_strategy("auto").tpu == ""


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mirrored", {"cross_device_ops": "mpi"}, "expected one of auto, nccl"),
        ("mirrored", {"cross_device_ops": "nccl"}, "sums on GPUs"),
        ("multi_worker", {"communication": "nccl"}, "sums on GPUs"),
        ("multi_worker", {"communication": "gloo"}, "expected one of auto, ring"),
        ("multi_worker", {"timeout_secs": -1}, "timeout_secs is -1"),
        ("multi_worker", {"heartbeat_secs": -1}, "heartbeat_secs is -1"),
        ("multi_worker", {"num_virtual_devices": 2}, "got 2 virtual CPUs"),
        ("default", {"cross_device_ops": "nccl"}, "belongs to strategy 'mirrored'"),
        ("mirrored", {"communication": "ring"}, "belongs to strategy 'multi_worker'"),
        ("mirrored", {"tpu": "x"}, "belongs to strategy 'tpu'"),
    ],
)
def test_options_of_another_strategy_are_refused(name, options, message):
    with pytest.raises(ctl.UsageError, match=message):
        ctl.make_strategy(name, **options)


def test_communication_options_reach_tensorflow(monkeypatch):
    class RecordingStrategy(tf.distribute.MultiWorkerMirroredStrategy):
        def __init__(self, communication_options):
            self.options = communication_options

    monkeypatch.setattr(tf.distribute, "MultiWorkerMirroredStrategy", RecordingStrategy)
    options = ctl.make_strategy("multi_worker", communication="ring", timeout_secs=7).options
    assert options.implementation == tf.distribute.experimental.CommunicationImplementation.RING
    assert options.timeout_seconds == 7
    assert ctl.make_strategy("multi_worker").options.timeout_seconds is None


OPTIONS_BY_CASE = {
    **{("central_storage", framework): {} for framework in ("keras3", "tf_keras", "module")},
    ("mirrored", "keras3"): {"cross_device_ops": "hierarchical_copy"},
    ("mirrored", "tf_keras"): {"cross_device_ops": "hierarchical_copy"},
    ("mirrored", "module"): {"cross_device_ops": "reduction_to_one_device"},
}


FAST_CASES = [("mirrored", "module")]


@pytest.mark.parametrize("case", some_of(OPTIONS_BY_CASE, *FAST_CASES), ids=str)
def test_every_reduction_gives_the_numbers_of_one_device(case):
    name, framework = case
    options = OPTIONS_BY_CASE[case]

    def trained(strategy):
        writer = ctl.MemoryWriter()
        trainer = Small(framework, "adam", strategy=strategy, intervals=every_step(), writers=[writer])
        trainer.train(5)
        return losses(writer), trainer.evaluate()["loss"]

    expected = trained("default")
    result = trained(ctl.make_strategy(name, devices=["cpu:0", "cpu:1"], **options))
    np.testing.assert_allclose(result[0], expected[0], atol=1e-5)
    assert result[1] == pytest.approx(expected[1], abs=1e-5)
